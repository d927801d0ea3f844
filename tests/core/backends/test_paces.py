"""The paces of backends that the page and `top` show."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from llmproxy.core.backends.health import Ejected, EjectionEvent, Health, Peers, Unejected
from llmproxy.core.backends.outlier_detection import FRESH_S, LEARNING_S, OutlierDetection
from llmproxy.core.domain import Placed
from tests.core.make import DEFAULTS, reading, request

POLL_S = 0.2
SEQUENCES = 8


class Pool:
    """Backends that run SEQUENCES sequences each, at 50 tokens/s with factor 1."""

    def __init__(self, *names: str) -> None:
        self.now = 0.0
        self.peers = Peers(0.5)
        self.peers.members = {name: Health(DEFAULTS.health) for name in names}
        for health in self.peers.members.values():
            health.poll_succeeded(0.0)
        self.detection = OutlierDetection(DEFAULTS.health, self.peers)
        self.events: list[EjectionEvent] = []
        for health in self.peers.members.values():
            health.on_event = self.events.append
        self._tokens = dict.fromkeys(names, 0.0)
        for lease, name in enumerate(names):
            self.detection.booked(lease, request(), Placed(name, 0.0, (), 2), False, 0.0)

    def run(self, seconds: float, **factors: float) -> Mapping[str, float | None]:
        """Return the paces after `seconds` more. A backend with factor 0 has no readings."""
        for _ in range(round(seconds / POLL_S)):
            self.now += POLL_S
            for name in self._tokens:
                if factor := factors.get(name, 1.0):
                    self._tokens[name] += SEQUENCES * 50 * POLL_S / factor
                    read = reading(self.now, running=SEQUENCES, generated=int(self._tokens[name]))
                    self.detection.read(name, read, SEQUENCES)
            self.detection.outliers(self.now)
        return self.detection.paces(self.now)


def test_pace_is_unknown_at_first() -> None:
    assert Pool("a", "b").run(POLL_S, a=8.0) == {"a": None, "b": None}


@pytest.mark.parametrize("factor", [2.0, 8.0])
def test_slow_backend_is_known_within_three_seconds(factor: float) -> None:
    paces = Pool("a", "b").run(3.0, a=factor)
    assert paces == {"a": pytest.approx(factor, rel=0.1), "b": 1.0}


def test_one_slow_judgement_is_no_pace() -> None:
    pool = Pool("a", "b")
    pool.run(5.0)
    assert pool.run(0.6, a=8.0) == {"a": pytest.approx(1.0, rel=0.1), "b": pytest.approx(1.0, rel=0.1)}


def test_recovered_backend_is_known_within_three_seconds() -> None:
    pool = Pool("a", "b")
    assert pool.run(5.0, a=8.0)["a"] == pytest.approx(8.0, rel=0.1)
    assert pool.run(3.0)["a"] == pytest.approx(1.0, rel=0.1)


def test_measurements_before_and_in_an_ejection_are_forgotten() -> None:
    pool = Pool("a", "b")
    pool.run(5.0)
    health = pool.peers.members["a"]
    health.eject_slow("slow", pool.now)
    pool.run(1.0, a=8.0)
    health.booked(1)
    health.measured(1, True, pool.now + 60.0)
    assert [type(event) for event in pool.events] == [Ejected, Unejected]
    assert pool.run(POLL_S).get("a") is None


def test_an_old_judgement_is_no_pace_and_nor_is_one_without_another() -> None:
    pool = Pool("a", "b")
    pool.run(5.0)
    assert pool.run(FRESH_S + 1.0, a=0.0) == {}
    assert Pool("a").run(5.0) == {}


def test_answers_that_are_too_short_to_be_judged_are_not_waited_for_without_end() -> None:
    pool = Pool("a", "b")
    assert pool.run(LEARNING_S - 1.0, a=0.0, b=0.0) == {"a": None, "b": None}
    assert pool.run(2.0, a=0.0, b=0.0) == {}
