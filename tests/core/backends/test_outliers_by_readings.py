"""Backends that hang or have become slow, detected by readings alone, without streams."""

from __future__ import annotations

from itertools import count
from math import inf
from typing import Any

import pytest

from llmproxy.core.backends.health import Health, Peers
from llmproxy.core.backends.outlier_detection import OutlierDetection
from llmproxy.core.domain import Placed, Usage
from tests.core.make import DEFAULTS, reading, request

POLL_S = 0.2


def detection_of(*names: str, drained: str | None = None) -> OutlierDetection:
    peers = Peers(0.5)
    peers.members = {name: Health(DEFAULTS.health) for name in names}
    for health in peers.members.values():
        health.poll_succeeded(0.0)
    if drained is not None:
        peers.members[drained].drained = True
    detection = OutlierDetection(DEFAULTS.health, peers)
    for lease, name in enumerate(names):
        detection.booked(lease, request(), Placed(name, 0.0, (), 2), False, 0.0)
    return detection


@pytest.mark.parametrize("factor", [8.0, 100.0])
def test_engine_that_generates_slowly_is_found_in_five_seconds(factor: float) -> None:
    detection = detection_of("a", "b")
    tokens, slow_s = {"a": 0.0, "b": 0.0}, None
    for poll in range(1, 150):
        now = poll * POLL_S
        for name in tokens:
            tokens[name] += 8 * 50 * POLL_S / (factor if name == "a" and now > 15.0 else 1.0)
            detection.read(name, reading(now, running=8, generated=int(tokens[name])), 8)
        slow = detection.outliers(now)[1]
        assert slow.keys() <= {"a"}
        if slow and slow_s is None:
            slow_s = now - 15.0
    assert slow_s is not None
    assert 0.0 < slow_s <= 5.0


def test_counter_that_paused_with_its_process_is_not_slow() -> None:
    detection = detection_of("a", "b")
    tokens = {"a": 0, "b": 0}
    for poll in range(1, 250):
        now = poll * POLL_S
        for name in tokens:
            if name == "b" or not 15.0 < now < 35.0:
                tokens[name] += 80
                detection.read(name, reading(now, running=8, generated=tokens[name]), 8)
        assert not detection.outliers(now)[1]


@pytest.mark.parametrize(
    ("prepared", "running", "earliest_s", "latest_s"),
    [(False, 0, 1.5, 3.0), (True, 0, 8.0, 10.0), (False, 1, 19.0, 21.0)],
    ids=["text", "media or a grammar", "a busy engine"],
)
def test_engine_that_shows_none_of_its_requests_hangs(
    prepared: bool, running: int, earliest_s: float, latest_s: float
) -> None:
    detection = detection_of("a", "b")
    for poll in range(1, 26):
        for name in "ab":
            detection.read(name, reading(poll * POLL_S, running=1, generated=20 * poll), 1)
    for lease in (0, 1):
        detection.finished(lease, 5.0)
    detection.booked(2, request(prepared=prepared), Placed("a", 0.0, (), 2), False, 5.0)
    hung_s = 20.0
    for poll in range(26, 125):
        now = poll * POLL_S
        detection.read("a", reading(now, running=running, generated=500 + poll * running), 1)
        detection.read("b", reading(now, running=0, generated=500), 0)
        if (hang := detection.outliers(now)[0].get("a")) is not None:
            hung_s = now - 5.0
            break
    assert earliest_s <= hung_s <= latest_s
    if hang is not None:
        assert list(detection.give_up("a", hang, now)) == [2], "nothing was computed, so that it may be tried elsewhere"


@pytest.mark.parametrize("stream", [False, True])
def test_last_backend_that_is_not_drained_does_not_hang(stream: bool) -> None:
    """The streams of the other backend run to their ends."""
    hung = set()
    for drained in (None, "b"):
        detection = detection_of("a", "b", drained=drained)
        detection.booked(2, request(stream=True), Placed("b", 0.0, (), 2), False, 0.0)
        detection.booked(3, request(stream=stream), Placed("a", 0.0, (), 2), False, 0.0)
        for poll in range(1, 150):
            now = poll * POLL_S
            detection.progress(2, poll, 4, None, now)
            detection.read("a", reading(now, running=int(stream), generated=0), 2)
            detection.read("b", reading(now, running=2, generated=20 * poll), 2)
            if "a" in detection.outliers(now)[0]:
                hung.add(drained)
    assert hung == {None}


@pytest.mark.parametrize(
    ("per_poll", "running", "hangs", "given_up_s"),
    [(20, 4, False, inf), (0, 4, True, 3.0), (0, 0, True, inf), (1, 4, False, inf)],
    ids=["a tool call that is held back", "frozen", "nothing runs: its clients do not read", "slow"],
)
def test_streams_that_stop_together_are_given_up_only_where_an_engine_is_frozen(
    per_poll: int, running: int, hangs: bool, given_up_s: float
) -> None:
    gone_s = inf
    detection = detection_of("a", "b")
    for lease in range(10, 18):
        detection.booked(lease, request(stream=True), Placed("ab"[lease % 2], 0.0, (), 2), False, 0.0)
        detection.started(lease, 0.2)
    tokens, hung = {"a": 0, "b": 0}, False
    for poll in range(2, 60):
        now = poll * POLL_S
        for name in tokens:
            tokens[name] += per_poll if name == "a" and now > 2.0 else 20
            shown = running if name == "a" and now > 2.0 else 4
            detection.read(name, reading(now, running=shown, generated=tokens[name]), 4)
        for lease in range(10, 18):
            if "ab"[lease % 2] == "b" or now <= 2.0:
                detection.progress(lease, poll, 4, None, now)
        if (hang := detection.outliers(now)[0].get("a")) is not None:
            hung = True
            if list(detection.give_up("a", hang, now)) == [10, 12, 14, 16]:
                gone_s = now - 2.0
    assert hung is hangs
    assert given_up_s <= gone_s <= given_up_s + 0.5


def stuck_after_s(
    *,
    stuck_s: float = inf,
    tokens: int = 20,
    counted_at_end: bool = False,
    running: int = 4,
    prompt_tokens: int = 100,
    by_b: int = 20,
    idle_b: bool = False,
) -> float:
    """Return how many seconds after its counter stopped "a" is found to hang, infinite if it is not.

    "a" has four answers in one piece and stops for `stuck_s`. Both backends ended four answers before. "b" goes on, or
    ends its last answer half a second after "a" stopped.
    """
    detection, leases, counts = detection_of("a", "b"), count(10), {"a": 0, "b": 0}
    under_way = {name: [0 if name == "a" else 1] for name in "ab"}
    began_s = inf
    for poll in range(1, 250):
        now = poll * POLL_S
        stuck = 4.0 <= now < 4.0 + stuck_s
        for name in "ab":
            stopped, idle = name == "a" and stuck, name == "b" and idle_b and now > 4.5
            if idle:
                for lease in under_way.pop("b", ()):
                    detection.finished(lease, now, Usage(prompt_tokens, 100))
            elif (now <= 4.0 or (name == "b" and by_b)) and poll % 5 == 0:
                for lease in under_way[name]:
                    detection.started(lease, now)
                    detection.finished(lease, now, Usage(prompt_tokens, 100))
                counts[name] += 100 * len(under_way[name]) if counted_at_end else 0
                under_way[name] = [next(leases) for _ in range(4)]
                for lease in under_way[name]:
                    facts = request(prompt_tokens=prompt_tokens)
                    detection.booked(lease, facts, Placed(name, 0.0, (), 2), False, now)
            if not counted_at_end and not stopped and not idle:
                counts[name] += tokens if name == "a" else by_b
            shown, seen = (0, 0) if idle else (running if stopped else 4, 4)
            detection.read(name, reading(now, running=shown, waiting=seen - shown, generated=counts[name]), seen)
        if (hang := detection.outliers(now)[0].get("a")) is not None:
            began_s = now - 4.0
            assert hang.why(now).endswith(" s, no token generated, answers owed: 4")
            assert sorted(detection.give_up("a", hang, now)) == sorted(under_way["a"]), "they may be tried elsewhere"
            break
    return began_s


@pytest.mark.parametrize(("running", "earliest_s"), [(4, 3.0), (0, 8.0)], ids=["running", "waiting"])
def test_engine_that_generates_nothing_of_whole_answers_hangs(running: int, earliest_s: float) -> None:
    assert earliest_s <= stuck_after_s(running=running) <= earliest_s + 1.5


def test_engine_that_generates_nothing_hangs_beside_an_idle_engine() -> None:
    assert 3.0 <= stuck_after_s(idle_b=True) <= 4.5
    assert stuck_after_s(idle_b=True, stuck_s=2.6) == inf


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"stuck_s": 2.6}, "a pause"),
        ({"counted_at_end": True}, "its tokens are counted when an answer ends"),
        ({"by_b": 0}, "the others stopped too"),
        ({"prompt_tokens": 50_000, "stuck_s": 10.0}, "it computes a prompt"),
        ({"running": 0, "stuck_s": 7.0}, "it waits for a grammar"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_engine_that_may_yet_answer_does_not_hang(given: dict[str, Any], why: str) -> None:
    assert stuck_after_s(**given) == inf, why


def test_a_counter_that_paused_before_is_given_more_time() -> None:
    """Pauses that ended by themselves, for example during prefills of other clients, explain later pauses."""
    detection = detection_of("a", "b")
    hung, counts = [], {"a": 0, "b": 0}
    for poll in range(1, 300):
        now = poll * POLL_S
        for name in "ab":
            # "a" generates for 2 s after each pause of 4 s.
            counts[name] += 20 if name == "b" or now % 6.0 < 2.0 else 0
            detection.read(name, reading(now, running=1, generated=counts[name]), 1)
        if "a" in detection.outliers(now)[0]:
            hung.append(now)
            detection.finished(0, now)
            detection.booked(0, request(), Placed("a", 0.0, (), 2), False, now)
    assert hung
    assert hung[-1] < 20.0, "the pauses that were seen explain later ones"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("together", [1, 6])
def test_long_prompts_do_not_make_an_engine_slow(together: int, stream: bool) -> None:
    """The engine computes prompts of 8,000 tokens one after the other, long after their arrival."""
    detection = detection_of("a", "b")
    tokens, leases = {"a": 0.0, "b": 0.0}, count(10)
    computing: list[tuple[float, int]] = []
    for poll in range(1, 250):
        now = poll * POLL_S
        if poll % 100 == 75:
            for _ in range(together):
                lease = next(leases)
                asked = request(prompt_tokens=8_000, stream=stream)
                detection.booked(lease, asked, Placed("a", 0.0, (), 2), False, now)
                computing.append((max(now, computing[-1][0] if computing else 0.0) + 8_000 / 8_000, lease))
        while computing and computing[0][0] <= now:
            lease = computing.pop(0)[1]
            detection.started(lease, now)
            detection.finished(lease, now)
        for name in tokens:
            tokens[name] += 8 * 50 * POLL_S / (20.0 if name == "a" and computing else 1.0)
            detection.read(name, reading(now, running=8, generated=int(tokens[name])), 8)
        assert not detection.outliers(now)[1]
        assert (detection.paces(now).get("a") or 1.0) < 1.5
