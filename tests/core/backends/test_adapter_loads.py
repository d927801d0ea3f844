"""Silences that adapter loads explain or do not explain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmproxy.core.backends.adapter_loads import MOST_S, LongestLoad
from llmproxy.core.backends.health import Health, Peers
from llmproxy.core.backends.outlier_detection import SPAN_S, OutlierDetection
from llmproxy.core.domain import Placed, Request
from tests.core.make import DEFAULTS, request

HUNG_S = 1.5
TICK_S = 0.05
PROMPT = request(stream=True)
LORA = request(stream=True, adapter="lora")


class TwoBackends:
    """Two backends: `b` sends bytes all the time, `a` only on demand."""

    def __init__(self) -> None:
        peers = Peers(0.5)
        peers.members = {name: Health(DEFAULTS.health) for name in "ab"}
        for health in peers.members.values():
            health.poll_succeeded(0.0)
        self.detection = OutlierDetection(replace(DEFAULTS.health, hung_s=HUNG_S, slow_factor=5.0), peers)
        self.now = 0.0
        self.slow = False
        self._leases = 0
        self._tokens = 1
        self._speaker = self.start(PROMPT, "b")

    def book(self, asked: Request, backend: str = "a", cold: bool = False) -> int:
        self._leases += 1
        self.detection.booked(self._leases, asked, Placed(backend, 0.0, (), 2), cold, self.now)
        return self._leases

    def start(self, asked: Request, backend: str = "a", cold: bool = False) -> int:
        lease = self.book(asked, backend, cold)
        self.detection.started(lease, self.now)
        return lease

    def load(self, took_s: float) -> None:
        """Serves a request whose adapter takes `load_s` to load."""
        lease = self.book(LORA, cold=True)
        assert self.silent_until_hung(took_s) is None
        self.detection.started(lease, self.now)
        self.detection.finished(lease, self.now)

    def silent_until_hung(self, limit_s: float, name: str = "a") -> float | None:
        """Returns the seconds until `name` counts as hung; None if it does not within `limit_s`."""
        began_s = self.now
        while self.now < began_s + limit_s:
            self.now += TICK_S
            self._tokens += 5
            self.detection.progress(self._speaker, self._tokens, 1, None, self.now)
            hung, slow = self.detection.outliers(self.now)
            self.slow |= name in slow
            if name in hung:
                return self.now - began_s
        return None


def test_unstarted_stream_may_wait_for_an_adapter_load() -> None:
    pool = TwoBackends()
    pool.book(LORA, cold=True)
    found_s = pool.silent_until_hung(60.0)
    assert found_s is not None
    # No load is known yet, and a frozen backend must be detected nevertheless.
    assert 5.0 < found_s <= MOST_S + HUNG_S
    plain = TwoBackends()
    plain.book(PROMPT)
    assert plain.silent_until_hung(60.0) == pytest.approx(HUNG_S, abs=0.5)


def test_residency_is_only_an_estimate() -> None:
    pool = TwoBackends()
    pool.book(LORA, cold=False)
    assert pool.silent_until_hung(3.0) is None


def test_an_adapter_that_a_stream_uses_need_not_be_loaded() -> None:
    pool = TwoBackends()
    pool.start(LORA)
    pool.book(LORA)
    assert pool.silent_until_hung(60.0) == pytest.approx(HUNG_S, abs=0.5)


def test_unused_adapter_may_be_evicted() -> None:
    pool = TwoBackends()
    used = pool.start(LORA)
    pool.book(LORA)
    pool.detection.finished(used, pool.now)
    assert pool.silent_until_hung(3.0) is None


@pytest.mark.parametrize("load_s", [0.1, 1.2, 3.0])
def test_how_long_loads_last_is_learned(load_s: float) -> None:
    pool = TwoBackends()
    for _ in range(30):
        pool.load(load_s)
    pool.book(LORA, cold=True)
    found_s = pool.silent_until_hung(60.0)
    assert found_s is not None
    assert HUNG_S + load_s < found_s < HUNG_S + 5.0 * load_s + 0.5


def test_several_loads_in_one_step_take_their_times_together() -> None:
    pool = TwoBackends()
    for _ in range(30):
        pool.load(0.5)
    for _ in range(4):
        pool.book(LORA, cold=True)
    assert pool.silent_until_hung(HUNG_S + 2.0) is None


def test_first_bytes_of_one_step_do_not_make_loads_seem_short() -> None:
    pool = TwoBackends()
    for _ in range(30):
        pool.load(2.0)
    for _ in range(50):
        # A single adapter is loaded. The other requests came too late for that step, or need no load.
        leases = [pool.book(LORA, cold=True) for _ in range(4)]
        pool.silent_until_hung(2.0)
        for lease in leases:
            pool.detection.started(lease, pool.now)
            pool.detection.finished(lease, pool.now)
    pool.book(LORA, cold=True)
    assert pool.silent_until_hung(HUNG_S + 4.0) is None


def test_streams_that_stop_together_beside_a_load_prove_nothing() -> None:
    pool = TwoBackends()
    for _ in range(5):
        pool.start(PROMPT)
    pool.book(LORA, cold=True)
    assert pool.silent_until_hung(3.0) is None
    frozen = TwoBackends()
    for _ in range(5):
        frozen.start(PROMPT)
    assert frozen.silent_until_hung(3.0) is not None


@pytest.mark.parametrize("stream", [True, False])
def test_load_without_a_first_byte_goes_on(stream: bool) -> None:
    """The client left, or the request is not streamed."""
    pool = TwoBackends()
    for _ in range(5):
        pool.start(PROMPT)
    lease = pool.book(request(stream=stream, adapter="lora"), cold=True)
    if stream:
        pool.detection.finished(lease, pool.now)
    assert pool.silent_until_hung(3.0) is None
    assert pool.silent_until_hung(60.0) is not None


@pytest.mark.parametrize(("loading", "expected"), [(True, False), (False, True)])
def test_streams_beside_loads_are_not_slow(loading: bool, expected: bool) -> None:
    pool = TwoBackends()
    lease, tokens = pool.start(PROMPT), 1
    for number in range(60):
        # After both speeds are known, it pauses for four seconds in five.
        if number >= 40:
            other = pool.book(LORA, cold=True) if loading else pool.start(LORA)
            pool.silent_until_hung(4.0)
            pool.detection.started(other, pool.now)
            pool.detection.finished(other, pool.now)
        pool.silent_until_hung(SPAN_S)
        tokens += round(SPAN_S / TICK_S * 5)
        pool.detection.progress(lease, tokens, 1, None, pool.now)
        pool.silent_until_hung(TICK_S * 6)
    assert pool.slow == expected


def test_a_load_time_follows_the_longest_and_forgets_it() -> None:
    time = LongestLoad()
    for _ in range(20):
        time.learn(0.1, True)
    assert time.load_s < 0.5
    time.learn(2.0, False)
    assert time.load_s == 2.0
    # An observation that may not be a load changes nothing.
    time.learn(0.0, False)
    assert time.load_s == 2.0
    for _ in range(300):
        time.learn(0.1, True)
    assert time.load_s < 0.2
    time.learn(1e6, True)
    assert time.explained_s(1) == time.explained_s(100) == MOST_S
