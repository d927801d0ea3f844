"""A process that is stopped as a whole: it answers neither polls nor requests, and no reading shows its silence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from llmproxy.core.domain import Grant, Listing, ModelCard, Revoke, Trouble, Verdict
from llmproxy.core.lease_events import Progress, Returned, Started
from llmproxy.core.pools import Pools
from tests.core.make import BASE, DEFAULTS, listing, pools, reading, request

POLL_S = 0.2
TIMEOUT_S = 2.0
STOPPED_S = 5.0
SETTINGS = replace(DEFAULTS, placement="least_request", ceilings={})


BOTH = Listing(0.0, (ModelCard(BASE, None, 4096), ModelCard("x", None, 4096)))


class Fleet:
    """Backends under polls every `POLL_S`. Each owes `owed` answers, which take longer than any test.

    The polls of a backend in `holds` are not answered for so many seconds, from `STOPPED_S` on. `metrics` alone hang if
    `healthy`. Readings are published unless not `numbers`.
    """

    def __init__(
        self,
        names: str = "ab",
        *,
        holds: Mapping[str, float],
        owed: Mapping[str, int] | None = None,
        listings: Mapping[str, Listing] | None = None,
        healthy: bool = False,
        numbers: bool = True,
        **asked: Any,
    ) -> None:
        self.of: Pools = pools(dict.fromkeys(names, 8), SETTINGS, listings=listings)
        self.names, self.holds, self.healthy, self.numbers = names, holds, healthy, numbers
        self.now = 0.0
        self.grants: dict[int, Grant] = {}
        self.revoked: list[int] = []
        self.begun: list[int] = []
        self._asks_s = dict.fromkeys(names, 0.0)
        self._sent_s = dict.fromkeys(names, inf)
        for name in names:
            for _ in range((owed or {}).get(name, 2)):
                self.send(name, **asked)

    def send(self, name: str, **asked: Any) -> None:
        model = min(self.of.backends[name].health.models)
        asked = {"stream": False, "pool": model, "model": model, "deadline_s": 90.0, **asked}
        self.of.submit(request(**asked), self.now, frozenset(self.names) - {name})
        self.decide()

    def decide(self) -> None:
        for decision in self.of.decide(self.now):
            if isinstance(decision, Grant):
                self.grants[decision.lease] = decision
            elif isinstance(decision, Revoke):
                assert decision.hung, "the process may go on later"
                self.revoked.append(decision.lease)
                self.of.apply(Returned(self.grants.pop(decision.lease).lease, Verdict.LOST), self.now)
        self.of.check(self.now)

    def begin(self, lease: int) -> None:
        """A stream begins, and gets tokens while its backend is not held."""
        self.of.apply(Started(lease), self.now)
        self.begun.append(lease)

    def owed_by(self, name: str) -> list[int]:
        return [lease for lease, grant in self.grants.items() if grant.placed.backend == name]

    def held(self, name: str) -> bool:
        return STOPPED_S <= self.now < STOPPED_S + self.holds.get(name, 0.0)

    def run(self, seconds: float) -> None:
        for _ in range(round(10 * seconds)):
            self.now = round(self.now + 0.1, 3)
            for name in self.names:
                self.poll(name)
            for lease in self.grants.keys() & self.begun:
                if not self.held(self.grants[lease].placed.backend):
                    self.of.apply(Progress(lease, round(20 * self.now)), self.now)
            self.decide()

    def poll(self, name: str) -> None:
        """Ask the next question when it is due. Without an answer it ends after `TIMEOUT_S`."""
        backend = self.of.backends[name]
        self._sent_s[name] = min(self._sent_s[name], self.now) if self.now >= self._asks_s[name] else inf
        if self._sent_s[name] == inf:
            return
        if self.held(name):
            if self.now < self._sent_s[name] + TIMEOUT_S:
                return
            backend.timed_out(self.now)
            if not self.healthy:
                self.of.troubled(name, Trouble.TIMEOUT)
        elif self.numbers:
            running = len(self.owed_by(name))
            backend.observe(reading(self.now, running=running, generated=int(1000 * self.now)))
        if self.healthy or not self.held(name):
            backend.answered(self.now)
        self._asks_s[name], self._sent_s[name] = self.now + POLL_S, inf

    def ejected_after_s(self, limit_s: float, name: str = "a") -> float:
        """Seconds from `STOPPED_S` until a backend is ejected, infinite if it is not."""
        while self.now < STOPPED_S + limit_s:
            self.run(0.1)
            if self.of.backends[name].health.ejected:
                return self.now - STOPPED_S
        return inf


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("numbers", [False, True], ids=["no metrics", "metrics"])
@pytest.mark.parametrize(
    ("names", "given"),
    [
        ("ab", {}),
        ("abc", {}),
        ("ab", {"owed": {"a": 1, "b": 0}}),
        ("abc", {"listings": {"a": listing(base="x"), "b": listing(base="x"), "c": listing(base="y")}}),
    ],
    ids=["two", "three", "the other is idle", "a model on two of three"],
)
def test_process_that_is_stopped_is_found_in_four_seconds(
    names: str, given: dict[str, Any], numbers: bool, stream: bool
) -> None:
    fleet = Fleet(names, holds={"a": inf}, numbers=numbers, stream=stream, **given)
    if stream:
        for lease in fleet.grants:
            fleet.begin(lease)
        fleet.run(STOPPED_S)
        fleet.send("a", stream=True)
    owed = fleet.owed_by("a")
    assert fleet.ejected_after_s(10.0) <= 4.0
    fleet.run(STOPPED_S + 4.0 - fleet.now)
    assert sorted(fleet.revoked) == owed, "they may be tried elsewhere, and the streams that have begun may go on there"


@pytest.mark.parametrize("begun", [False, True], ids=["nothing has begun", "streams have begun"])
@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"holds": {"a": 3.0}}, "a pause"),
        ({"holds": {"a": 30.0}, "healthy": True}, "its metrics hang, but its health is well"),
        ({"holds": {"a": 3.6, "b": 3.4}}, "the network to all of them"),
        ({"holds": {"a": 6.0}, "prompt_tokens": 50_000, "stream": False}, "its server may be at work on a long prompt"),
        ({"holds": {"a": 3.8}, "numbers": False, "prepared": True, "stream": False}, "its server may fetch pictures"),
        ({"holds": {"a": 30.0}, "owed": {"a": 0}}, "it owes nothing"),
        ({"holds": {"a": 30.0}, "names": "a"}, "there is no other"),
        ({"holds": {"a": 30.0}, "listings": {"a": BOTH}}, "another model would be gone"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_backend_does_not_hang_where(given: dict[str, Any], why: str, begun: bool) -> None:
    fleet = Fleet(**{"stream": begun} | given)
    for lease in fleet.grants if begun and "stream" not in given else ():
        fleet.begin(lease)
    owed = fleet.owed_by("a")
    assert fleet.ejected_after_s(20.0) == inf, why
    assert fleet.owed_by("a") == owed
    assert not fleet.of.take_health_events()


def test_paused_proxy_polls_again() -> None:
    """Its time limits run out all at once, also those of answers that have come. Another backend is read before."""
    fleet = Fleet(holds={})
    fleet.run(STOPPED_S)
    fleet.now += 4.0
    fleet.of.backends["b"].observe(reading(fleet.now, running=2, generated=9000))
    fleet.of.backends["b"].answered(fleet.now)
    fleet.of.backends["a"].timed_out(fleet.now)
    fleet.decide()
    fleet.run(10.0)
    assert not fleet.of.backends["a"].health.ejected
    assert len(fleet.grants) == 4


@pytest.mark.parametrize("numbers", [False, True], ids=["no metrics", "metrics"])
def test_no_probe_is_sent_before_a_poll_is_answered(numbers: bool) -> None:
    """Then a request without a stream is one, because polls show whether it is silent too."""
    fleet = Fleet(holds={"a": 4.2}, numbers=numbers)
    fleet.run(STOPPED_S + 4.1)
    assert fleet.of.backends["a"].health.ejected
    for probes in (0, 1):
        fleet.of.submit(request(stream=False, deadline_s=90.0), fleet.now)
        fleet.decide()
        assert len(fleet.owed_by("a")) == probes
        fleet.run(0.5)


def test_an_answer_that_is_no_use_is_an_answer() -> None:
    fleet = Fleet(holds={"a": inf})
    fleet.ejected_after_s(5.0)
    fleet.now += 5.0
    assert not fleet.of.backends["a"].health.available(fleet.now)
    fleet.of.troubled("a", Trouble.GARBAGE)
    assert fleet.of.backends["a"].health.available(fleet.now)
