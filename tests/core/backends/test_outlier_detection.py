"""Backends that hang or have become slow, and backends that only seem so."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import count

import pytest
from msgspec import structs

from llmproxy.core.backends.health import Ejected, Health, Peers
from llmproxy.core.backends.outlier_detection import BASE_TOKENS, OutlierDetection
from llmproxy.core.domain import AdmissionKind, Grant, Placed, Request, Revoke, Stage, Usage, Verdict
from llmproxy.core.lease_events import Progress, Returned, Started
from llmproxy.core.settings import Settings
from tests.core.make import DEFAULTS, kill, pools, reading, request

TICK_S = 0.05
TOKENS = 100
SETTINGS = replace(
    DEFAULTS, placement="round_robin", ceilings={}, health=replace(DEFAULTS.health, hung_s=1.5, slow_factor=3.0)
)


@dataclass
class Answer:
    """A lease in its engine, with the fractional progress of its prompt and its answer."""

    grant: Grant
    prompt_done: float = 0.0
    tokens: float = 0.0
    reported: int = 0


@dataclass
class SimulatedPool:
    """Backends of equal speed, except for `factors`: multiples of the usual time; 0 means a frozen backend.

    A prompt is computed at 10,000 tokens a second, before everything else, and each stream gets 50 tokens a second.
    """

    names: str = "abcd"
    placement: str = "round_robin"
    per_s: float = 12.0
    settings: Settings = SETTINGS
    now: float = 0.0
    factors: dict[str, float] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)
    revoked: list[Request] = field(default_factory=list)
    granted: list[str] = field(default_factory=list)
    deaf: bool = False

    def __post_init__(self) -> None:
        self.of = pools(dict.fromkeys(self.names, 200), replace(self.settings, placement=self.placement))
        self._serial = count()
        self._due = 0.0

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            self._due += self.per_s * TICK_S
            while self._due >= 1.0:
                self._due -= 1.0
                self.send()
            for answer in list(self.answers.values()):
                if not self.deaf:
                    self._bring(answer)
            self.decide()
        self.of.check(self.now)

    def until(self, name: str, limit_s: float) -> float:
        """Returns the seconds until `name` is ejected; `limit_s` if it is not."""
        began_s = self.now
        while not self.ejected(name) and self.now - began_s < limit_s:
            self.run(TICK_S)
        return self.now - began_s

    def send(self, prompt_tokens: int = 200, stream: bool = True) -> None:
        asked = request(id=f"q{next(self._serial)}", prompt_tokens=prompt_tokens, stream=stream)
        asked = structs.replace(asked, arrived_s=self.now, deadline_s=self.now + 60.0)
        self.of.submit(asked, self.now)

    def decide(self) -> None:
        for decision in self.of.decide(self.now):
            if isinstance(decision, Grant):
                self.granted.append(decision.placed.backend)
                self.answers[decision.lease] = Answer(decision)
            elif isinstance(decision, Revoke):
                self.revoked.append(decision.request)
                self.of.apply(Returned(self.answers.pop(decision.lease).grant.lease, Verdict.LOST), self.now)
                self.of.submit(decision.request, self.now, frozenset({decision.backend}), AdmissionKind.RETRY)

    def _bring(self, answer: Answer) -> None:
        grant = answer.grant
        name, asked = grant.placed.backend, grant.request
        factor = self.factors.get(name, 1.0)
        if not factor:
            return
        step_s = TICK_S / factor
        first = next((a for a in self.answers.values() if a.grant.placed.backend == name and not a.tokens), None)
        if not answer.tokens:
            if answer is first:
                answer.prompt_done += 10_000 * step_s
                if answer.prompt_done >= asked.prompt_tokens:
                    answer.tokens = 1.0
                    if asked.stream:
                        self.of.apply(Started(grant.lease), self.now)
            return
        blocked = first is not None and first.grant.request.prompt_tokens > 2_000
        answer.tokens += (0.0 if blocked else 50.0) * step_s
        if asked.stream and int(answer.tokens) > answer.reported and round(self.now / TICK_S) % 6 == grant.lease % 6:
            answer.reported = int(answer.tokens)
            self.of.apply(Progress(grant.lease, answer.reported), self.now)
        if answer.tokens >= TOKENS:
            del self.answers[grant.lease]
            self.of.apply(Returned(grant.lease, Verdict.SERVED), self.now)

    def ejected(self, name: str) -> bool:
        return self.of.backends[name].health.ejected


def warm(**given: object) -> SimulatedPool:
    pool = SimulatedPool(**given)  # type: ignore[arg-type]
    pool.run(20.0)
    assert not any(pool.ejected(name) for name in pool.names), "nobody is ill"
    return pool


def only_ejection(pool: SimulatedPool) -> Ejected:
    """Returns the ejection of `a` by default."""
    [(backend, ejected)] = pool.of.take_health_events()
    assert backend == "a"
    assert isinstance(ejected, Ejected)
    return ejected


# --- hung -------------------------------------------------------------------------------------------------------------


def test_silent_backend_is_ejected_in_two_seconds_and_its_leases_revoked() -> None:
    pool = warm()
    pool.factors["a"] = 0.0
    owed = len([a for a in pool.answers.values() if a.grant.placed.backend == "a" and not a.tokens])
    assert pool.until("a", 10.0) <= 2.0
    ejected = only_ejection(pool)
    assert ejected.pause_s == pool.settings.health.ejection_s
    match = re.fullmatch(r"hung: silent for (1\.\d) s, first bytes owed: (\d+)", ejected.why)
    assert match is not None
    assert float(match[1]) >= 1.5
    assert int(match[2]) == len(pool.revoked) > owed
    assert not pool.of.take_health_events(), "it is reported once"
    assert pool.revoked
    pool.run(0.5)
    assert not [a for a in pool.answers.values() if a.grant.placed.backend == "a" and not a.tokens]


def test_probe_of_a_hung_backend_is_revoked_until_it_answers() -> None:
    pool = warm()
    pool.factors["a"] = 0.0
    pool.until("a", 10.0)
    at_first = len(pool.revoked)
    pool.run(10.0)
    assert len(pool.revoked) > at_first
    assert len(pool.revoked) <= at_first + 4, "one probe at a time, at growing distances"
    pool.factors["a"] = 1.0
    pool.run(12.0)
    assert not pool.ejected("a")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("deaf", "factors"),
    [(True, {}), (False, {"a": 2.0}), (False, dict.fromkeys("abcd", 8.0))],
    ids=["all are silent", "one is twofold slower", "all are slower"],
)
def test_there_is_no_outlier_where(deaf: bool, factors: dict[str, float]) -> None:
    pool = warm()
    pool.deaf, pool.factors = deaf, factors
    pool.run(20.0)
    assert not pool.of.take_health_events(), "not for a moment"


def test_single_backend_is_never_judged() -> None:
    pool = warm(names="a")
    pool.factors["a"] = 0.0
    pool.run(10.0)
    assert not pool.ejected("a")
    assert pool.of.next_wakeup(pool.now) is None


@pytest.mark.parametrize("per_s", [4.0, 12.0])
def test_a_long_prompt_explains_a_long_silence(per_s: float) -> None:
    """The same for several streams that stop together."""
    pool = warm(per_s=per_s)
    pool.send(prompt_tokens=60_000)
    pool.run(7.0)
    assert not pool.of.take_health_events(), "not for a moment"
    assert not pool.revoked


def test_a_long_prompt_has_its_time_where_short_ones_take_equally_long() -> None:
    """If times do not grow with lengths, a fitted line would predict the time of short prompts for all."""
    pool = warm(per_s=0.0)
    for number in range(400):
        pool.send(prompt_tokens=50 + 37 * number % 350)
        pool.run(0.1)
    pool.per_s = 12.0
    pool.send(prompt_tokens=60_000)
    pool.run(7.0)
    assert not pool.of.take_health_events(), "not for a moment"
    assert not pool.revoked


def test_readers_that_stop_reading_prove_nothing() -> None:
    pool = warm(per_s=0.0)
    for _ in range(8):
        pool.send()
    pool.run(0.2)
    for answer in pool.answers.values():
        assert answer.tokens
    pool.factors["a"] = 0.0
    pool.run(10.0)
    assert not pool.ejected("a"), "streams under way may wait for their clients"


def test_an_engine_that_has_not_begun_anything_does_not_hang() -> None:
    """An engine fetches images and compiles grammars before prefill, without any visible sign."""
    pool = warm(per_s=0.0)
    pool.run(5.0)
    pool.factors["a"] = 0.0
    for _ in range(6):
        pool.send()
    for _ in range(40):
        pool.of.backends["a"].observe(reading(pool.now, running=0))
        pool.run(0.2)
        pool.send()
    assert not pool.ejected("a")
    for _ in range(20):
        pool.of.backends["a"].observe(reading(pool.now, running=1))
        pool.run(0.2)
        pool.send()
    assert pool.ejected("a")


def test_streams_that_stop_together_show_a_hang_without_owed_bytes() -> None:
    pool = warm(per_s=0.0)
    for _ in range(16):
        pool.send()
    pool.run(0.8)
    pool.factors["a"] = 0.0
    assert pool.until("a", 10.0) <= 2.0
    assert only_ejection(pool).why.endswith("first bytes owed: 0, streams that stopped together: 4")
    assert not pool.revoked, "they have begun, and may go on"


def test_reading_from_before_a_freeze_excuses_nothing() -> None:
    pool = warm(per_s=0.0)
    pool.run(5.0)
    pool.of.backends["a"].observe(reading(pool.now, running=0))
    pool.factors["a"] = 0.0
    pool.per_s = 8.0
    assert pool.until("a", 10.0) <= 2.5


# --- slow -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["round_robin", "least_request", "cost"])
def test_tenfold_slower_backend_is_ejected_within_five_seconds(placement: str) -> None:
    pool = warm(placement=placement)
    pool.factors["a"] = 10.0
    assert pool.until("a", 20.0) <= 5.0
    assert not any(pool.ejected(name) for name in "bcd")
    match = re.fullmatch(r"slow: (\d+\.\d) times as slow as usual", only_ejection(pool).why)
    assert match is not None
    assert 3.0 <= float(match[1]) <= 15.0


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("names", "factor"), [("abcd", 10.0), ("ab", 10.0), ("ab", 5.0)])
def test_backend_stays_ejected_while_its_probes_are_slow(names: str, factor: float) -> None:
    pool = warm(names=names)
    pool.factors["a"] = factor
    assert pool.until("a", 20.0) < 20.0
    pool.granted.clear()
    for _ in range(200):
        pool.run(0.1)
        assert pool.ejected("a")
    assert pool.granted.count("a") <= 5, "probes alone, at growing distances"
    pool.factors["a"] = 1.0
    pool.run(40.0)
    assert not pool.ejected("a")
    pool.granted.clear()
    pool.run(10.0)
    assert pool.granted.count("a") >= 25, "its share of all, as before"


def test_one_of_three_backends_is_judged_although_another_is_slow_too() -> None:
    pool = warm(names="abc")
    pool.factors = {"a": 10.0, "b": 10.0}
    pool.run(8.0)
    assert pool.ejected("a") or pool.ejected("b"), "the third is as fast as ever"


def test_a_process_that_was_stopped_and_goes_on_is_not_slow() -> None:
    peers = Peers(0.5)
    peers.members = {name: Health(DEFAULTS.health) for name in "ab"}
    detection = OutlierDetection(DEFAULTS.health, peers)
    for lease, name in enumerate("ab"):
        detection.booked(lease, request(stream=True), Placed(name, 0.0, (), 2), False, 0.0)
        detection.started(lease, 0.1)
    tokens = {0: 1, 1: 1}
    for half in range(1, 80):
        now = 0.1 + 0.5 * half
        for lease in tokens:
            if lease == 1 or not 30 < half < 60:
                tokens[lease] += 50
                detection.progress(lease, tokens[lease], 1, 0.5, now)
        assert detection.outliers(now) == ({}, {})


@pytest.mark.parametrize("factor", [2.0, 6.0])
def test_backend_that_was_always_slow_is_no_outlier(factor: float) -> None:
    pool = SimulatedPool(factors={"a": factor})
    pool.run(40.0)
    assert not pool.ejected("a")


def test_a_slow_backend_returns_once_the_others_are_as_slow() -> None:
    pool = warm()
    pool.factors["a"] = 10.0
    pool.until("a", 20.0)
    pool.factors = dict.fromkeys("abcd", 6.0)
    pool.run(4.0)
    assert not pool.ejected("a")


def test_long_uncached_prompts_make_no_backend_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    booked = OutlierDetection.booked

    def believing(of: OutlierDetection, lease: int, asked: Request, placed: Placed, cold: bool, now: float) -> None:
        cached_tokens = max(0, asked.prompt_tokens - 200)
        booked(of, lease, asked, structs.replace(placed, cached_tokens=cached_tokens), cold, now)

    pool = warm()
    monkeypatch.setattr(OutlierDetection, "booked", believing)
    for _ in range(40):
        # Its prefill takes 0.8 s, in which the other streams pause.
        pool.send(prompt_tokens=8_000)
        pool.run(0.25)
        assert not any(pool.ejected(name) for name in pool.names)


@pytest.mark.parametrize(("owed", "expected"), [(True, set()), (False, {"a"})])
def test_prompt_that_waited_for_room_explains_time_when_computed(owed: bool, expected: set[str]) -> None:
    peers = Peers(0.5)
    peers.members = {name: Health(DEFAULTS.health) for name in "ab"}
    detection = OutlierDetection(DEFAULTS.health, peers)
    for lease, name in enumerate("ab"):
        detection.booked(lease, request(stream=True), Placed(name, 0.0, (), 2), False, 0.0)
        detection.started(lease, 0.1)
    tokens = {0: 1, 1: 1}
    slow: set[str] = set()
    for half in range(1, 60):
        now = 0.1 + 0.5 * half
        if half == 10 and owed:
            # Nearly all of it is believed to be cached, but nothing is.
            asked = request(stream=True, prompt_tokens=80_000)
            detection.booked(2, asked, Placed("a", 0.0, (), 2, cached_tokens=79_000), False, now)
        for lease in tokens:
            # It waits for twenty seconds, and its prefill then occupies the backend for five.
            tokens[lease] += 1 if lease == 0 and half > 50 else 50
            detection.progress(lease, tokens[lease], 2, 0.5, now)
        slow |= detection.outliers(now)[1].keys()
    assert slow == expected


def test_one_of_two_backends_is_always_left() -> None:
    pool = warm(names="ab")
    pool.factors["a"] = 10.0
    assert pool.until("a", 10.0) < 10.0
    pool.factors["b"] = 60.0
    for _ in range(100):
        pool.run(0.1)
        assert not (pool.ejected("a") and pool.ejected("b"))


def test_engine_with_a_full_cache_is_not_judged() -> None:
    pool = warm()
    pool.factors["a"] = 10.0
    for _ in range(100):
        pool.run(0.1)
        pool.of.backends["a"].observe(reading(pool.now, running=1, kv_used=0.95))
    assert not pool.ejected("a")


def test_usual_speed_is_forgotten_with_its_process() -> None:
    pool = warm()
    kill(pool.of, "a")
    pool.decide()
    pool.of.backends["a"].answered(pool.now)
    pool.factors["a"] = 6.0
    pool.run(20.0)
    assert not pool.ejected("a"), "the new one is another kind of machine"


def test_a_prompt_may_be_estimated_shorter_than_its_cached_part() -> None:
    """The remaining prefill is 0 and not negative if the cached tokens exceed the prompt by the base cost."""
    detection = OutlierDetection(DEFAULTS.health, Peers(0.5))
    asked = request(prompt_tokens=10, stream=True)
    detection.booked(1, asked, Placed("a", 1.0, (), 1, cached_tokens=10 + round(BASE_TOKENS)), cold=False, now=0.0)
    detection.started(1, 0.5)
    detection.check()


def test_a_prompt_takes_what_is_ahead_of_it_too() -> None:
    detection = OutlierDetection(DEFAULTS.health, Peers(0.5))
    for number in range(200):
        asked = request(prompt_tokens=1_000, stream=True)
        for lease in (0, 1):
            detection.booked(lease, asked, Placed("a", 1.0, (), 1), cold=False, now=float(number))
        for lease, took_s in ((0, 0.1), (1, 0.2)):
            detection.started(lease, number + took_s)
            detection.finished(lease, number + took_s)
    assert [detection._prefill.at(tokens) for tokens in (1_000.0, 4_000.0)] == pytest.approx([0.1, 0.4], rel=0.02)


def test_a_prompt_that_another_backend_computed_takes_no_time_here() -> None:
    """Its first token teaches nothing, and later prompts do not wait for it."""
    fetching, alone = (OutlierDetection(DEFAULTS.health, Peers(0.5)) for _ in range(2))
    fetched = structs.replace(request(prompt_tokens=20_000, stream=True), stage=Stage.DECODE)
    for number in range(50):
        now = float(number)
        fetching.booked(0, fetched, Placed("a", 1.0, (), 1), cold=False, now=now)
        fetching.booked(1, structs.replace(fetched, stream=False), Placed("a", 1.0, (), 1), cold=False, now=now)
        for detection in (fetching, alone):
            whole = request(prompt_tokens=1_000, stream=True)
            detection.booked(2, whole, Placed("a", 1.0, (), 1), cold=False, now=now)
        fetching.started(0, now + 0.05)
        for detection in (fetching, alone):
            detection.started(2, now + 0.1)
            detection.finished(2, now + 0.1)
        for lease in (0, 1):
            fetching.finished(lease, now + 0.1)
        fetching.check()
    for tokens in (0.0, 1_000.0, 20_000.0):
        assert fetching._prefill.at(tokens) == alone._prefill.at(tokens)
    # Prefills excuse a slow stream and prevent learning; these prompts do neither.
    assert fetching._backends["a"].computed_tokens == alone._backends["a"].computed_tokens


def test_an_answer_in_one_piece_whose_tokens_were_seen_as_they_came_counts_once() -> None:
    of = pools({"a": 1, "b": 1})
    of.submit(request(stream=False), 0.0)
    (grant,) = of.decide(0.0)
    assert isinstance(grant, Grant)
    of.apply(Progress(grant.lease, 900), 0.5)
    of.apply(Started(grant.lease), 1.0)
    of.apply(Returned(grant.lease, Verdict.SERVED, Usage(20, 900)), 1.0)
    of.check(1.0)
