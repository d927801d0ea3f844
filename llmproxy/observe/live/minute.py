"""Requests that ended in the last minute: times per band, tokens per backend and flow, outcomes.

A request is counted once, in the sums of the second in which it ended. After each second, its sums are added to the
minute, and the sums of the oldest second are subtracted.
"""

from __future__ import annotations

from collections import Counter, deque
from math import log

from llmproxy.core.domain import Outcome, Verdict
from llmproxy.observe.exit import RequestExit

SPAN_S = 60
FLOWS_MAX = 1_000  # The maximum number of flows that are counted within one second, `OTHER` included.
OTHER = "other"
NO_BAND = "none"

KINDS = ("completed", "refused", "failed", "cancelled", "client_error")
"""The ways in which a request ends; see `kind_of`."""
REFUSED = frozenset(
    {
        Outcome.REJECTED_CAPACITY,
        Outcome.REJECTED_NO_BACKENDS,
        Outcome.REJECTED_DEADLINE,
        Outcome.RATE_LIMITED,
        Outcome.EXPIRED,
        Outcome.EXPIRED_NO_BACKENDS,
        Outcome.SHED,
        Outcome.DRAINING,
    }
)
CLIENT_ERRORS = frozenset({Outcome.BAD_REQUEST, Outcome.UNKNOWN_MODEL, Outcome.UNAUTHORIZED, Outcome.TOO_LARGE})

NO_FAILURES = frozenset({Verdict.SERVED, Verdict.CLIENT_GONE, Verdict.PREEMPTED, Verdict.LOCAL_FAILURE})
"""Verdicts that are no failure of the backend."""

LEAST_S = 1e-4  # Times up to this many seconds are in the first bucket.
_GROWTH = 1.02
_SCALE = 1.0 / log(_GROWTH)
_OFFSET = -log(LEAST_S) * _SCALE + 1.0
_HALF = 2.0 / (1.0 + 1.0 / _GROWTH)


def kind_of(ended: RequestExit) -> str:
    """Returns how a request ended: `completed`, `refused` (by the proxy), `client_error`, `cancelled` or `failed`.

    An engine's 4xx answer is a client error.
    """
    outcome = ended.outcome
    if outcome is Outcome.COMPLETED:
        return "completed"
    if outcome in REFUSED:
        return "refused"
    if outcome in CLIENT_ERRORS or (outcome is Outcome.UPSTREAM_STATUS and 400 <= ended.status < 500):
        return "client_error"
    return "cancelled" if outcome is Outcome.CANCELLED else "failed"


def bucket_of(seconds: float) -> int:
    """Returns the histogram bucket of a time. The middle of a bucket differs from each of its times by at most 1 %."""
    return int(log(seconds) * _SCALE + _OFFSET) if seconds > LEAST_S else 0


def quantile(buckets: Counter[int], share: float) -> float | None:
    """Returns the quantile `share` of the times in `buckets`, within 1 % (first bucket: 0); None without times."""
    total = buckets.total()
    if not total:
        return None
    rank, seen, bucket = max(1.0, share * total - 1e-9), 0, 0
    for bucket in sorted(buckets):
        seen += buckets[bucket]
        if seen >= rank:
            break
    return LEAST_S * _GROWTH ** (bucket - 1) * _HALF if bucket else 0.0


class BandSums:
    """The requests of one band: how they ended, whether they met their objectives, and buckets of their times.

    `wait_s`, `ttft_s` and `tpot_s` map a bucket to the number of requests in it.
    """

    __slots__ = ("kinds", "met", "missed", "tpot_s", "ttft_s", "wait_s")

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.met = self.missed = 0
        self.wait_s: Counter[int] = Counter()
        self.ttft_s: Counter[int] = Counter()
        self.tpot_s: Counter[int] = Counter()


class BackendSums:
    """The attempts on one backend, and the tokens of the requests that ended on it.

    `first_us` is the sum of the times to the first token, and `firsts` is their number. `token_us` is the sum of the
    times per token, and `streams` is their number. The sums are integer microseconds, because sums of floats drift.
    """

    __slots__ = (
        "cached", "ends", "expected", "failures", "first_us", "firsts", "output", "prompt", "streams", "token_us"
    )  # fmt: skip

    def __init__(self) -> None:
        self.ends = self.failures = self.prompt = self.output = self.expected = self.cached = 0
        self.first_us = self.firsts = self.token_us = self.streams = 0

    @property
    def ttft_s(self) -> float | None:
        """The mean seconds from grant to first token; None without a first token."""
        return self.first_us / self.firsts * 1e-6 if self.firsts else None

    @property
    def tpot_s(self) -> float | None:
        """The mean seconds per token after the first; None without a stream that counts."""
        return self.token_us / self.streams * 1e-6 if self.streams else None


class FlowSums:
    """The requests of one flow in one band, their tokens, and their queue time in microseconds.

    `weight` is the weight of the newest request.
    """

    __slots__ = ("ends", "tokens", "wait_us", "weight")

    def __init__(self) -> None:
        self.ends = self.tokens = self.wait_us = 0
        self.weight = 1.0

    @property
    def wait_s(self) -> float:
        """The mean seconds in the queue, including requests that were refused there."""
        return self.wait_us / self.ends * 1e-6 if self.ends else 0.0


class Sums:
    """Sums over requests that ended in the same period. `flows` maps (band, flow) to sums.

    `errors` counts predicted times to first token, and `error_ratio` is the sum of their relative errors. `outcomes`
    counts only refused and failed requests.
    """

    def __init__(self) -> None:
        self.bands: dict[str, BandSums] = {}
        self.backends: dict[str, BackendSums] = {}
        self.flows: dict[tuple[str, str], FlowSums] = {}
        self.outcomes: Counter[str] = Counter()
        self.retries = self.preemptions = self.errors = 0
        self.error_ratio = 0.0

    def band(self, name: str) -> BandSums:
        return self.bands.get(name) or BandSums()

    def backend(self, name: str) -> BackendSums:
        return self.backends.get(name) or BackendSums()

    def kind(self, kind: str) -> int:
        """Returns the number of requests of all bands that ended in this way (see KINDS)."""
        return sum(band.kinds[kind] for band in self.bands.values())

    def add(self, ended: RequestExit) -> None:
        name, kind = ended.band or NO_BAND, kind_of(ended)
        band = self.bands.get(name)
        if band is None:
            band = self.bands[name] = BandSums()
        band.kinds[kind] += 1
        if kind in ("refused", "failed"):
            self.outcomes[ended.outcome] += 1
        if ended.met is not None:
            band.met += ended.met
            band.missed += not ended.met
        if ended.queue_wait_s is not None:
            band.wait_s[bucket_of(ended.queue_wait_s)] += 1
        last = ended.last
        tokens = max(0, last.prompt_tokens or 0), max(0, last.output_tokens or 0)
        if ended.flow is not None:
            self._add_flow((name, ended.flow), ended.weight, sum(tokens), ended.queue_wait_s or 0.0)
        tpot_s = ended.time_per_output_token_s if ended.stream else None
        if ended.stream and ended.ttft_s is not None:
            band.ttft_s[bucket_of(ended.ttft_s)] += 1
            if tpot_s is not None:
                band.tpot_s[bucket_of(tpot_s)] += 1
        for attempt in ended.tried:
            if attempt.backend is not None:
                served = self.backends.get(attempt.backend)
                if served is None:
                    served = self.backends[attempt.backend] = BackendSums()
                served.ends += 1
                served.failures += attempt.verdict not in NO_FAILURES
        if last.backend is None:
            return
        self.retries += max(0, ended.attempts - ended.preemptions - 1)
        self.preemptions += ended.preemptions
        backend = self.backends[last.backend]
        backend.prompt += tokens[0]
        backend.output += tokens[1]
        if last.cached_tokens is not None:
            backend.cached += max(0, last.cached_tokens)
            backend.expected += max(0, last.expected_cached_tokens or 0)
        if tpot_s is not None:
            backend.token_us += round(tpot_s * 1e6)
            backend.streams += 1
        observed_s = ended.backend_ttft_s if ended.stream else None
        if observed_s is not None and observed_s > 0.0:
            backend.first_us += round(observed_s * 1e6)
            backend.firsts += 1
            if last.predicted_ttft is not None:
                self.error_ratio += last.predicted_ttft.error_ratio(observed_s)
                self.errors += 1

    def _add_flow(self, key: tuple[str, str], weight: float, tokens: int, wait_s: float) -> None:
        flow = self.flows.get(key)
        if flow is None:
            if len(self.flows) >= FLOWS_MAX - 1:
                key = (key[0], OTHER)
            flow = self.flows.setdefault(key, FlowSums())
        flow.ends += 1
        flow.tokens += tokens
        flow.wait_us += round(wait_s * 1e6)
        flow.weight = weight

    def merge(self, other: Sums, sign: int) -> None:
        """Adds `other`, or subtracts it if `sign` is -1. Drops backends and flows that become empty."""
        for name, one in other.bands.items():
            band = self.bands.setdefault(name, BandSums())
            band.met += sign * one.met
            band.missed += sign * one.missed
            for field in ("kinds", "wait_s", "ttft_s", "tpot_s"):
                _merge(getattr(band, field), getattr(one, field), sign)
        for name, served in other.backends.items():
            backend = self.backends.setdefault(name, BackendSums())
            for field in BackendSums.__slots__:
                setattr(backend, field, getattr(backend, field) + sign * getattr(served, field))
            if not backend.ends:
                del self.backends[name]
        for key, theirs in other.flows.items():
            flow = self.flows.setdefault(key, FlowSums())
            flow.ends += sign * theirs.ends
            flow.tokens += sign * theirs.tokens
            flow.wait_us += sign * theirs.wait_us
            if not flow.ends:
                del self.flows[key]
            elif sign > 0:
                flow.weight = theirs.weight
        _merge(self.outcomes, other.outcomes, sign)
        self.retries += sign * other.retries
        self.preemptions += sign * other.preemptions
        self.errors += sign * other.errors
        # Float sums drift when values are subtracted, so an empty sum is reset.
        self.error_ratio = self.error_ratio + sign * other.error_ratio if self.errors else 0.0


def _merge(mine: Counter[str] | Counter[int], theirs: Counter[str] | Counter[int], sign: int) -> None:
    for key, count in theirs.items():
        left = mine[key] + sign * count  # type: ignore[index]
        if left:
            mine[key] = left  # type: ignore[index]
        else:
            del mine[key]


class Minute:
    """The sums of the last minute.

    `total` covers the last `span_s` whole seconds, at most 60. `second` covers only the newest of them.
    """

    def __init__(self) -> None:
        self.total = Sums()
        self.second = Sums()
        self.span_s = 1.0
        self._running = Sums()
        self._seconds: deque[tuple[int, Sums]] = deque()
        self._began_s: int | None = None

    def record(self, ended: RequestExit) -> None:
        self._running.add(ended)

    def tokens_per_s(self, backend: str, since_s: float | None) -> tuple[float, float]:
        """Returns the prompt and output tokens per second of requests that ended on `backend` in the last minute.

        Leaves out requests that ended before `since_s` (None: none). Divides by at least one second.
        """
        sums, span_s = [self.total.backend(backend)], self.span_s
        if since_s is not None and self._seconds:
            sums = [one.backends[backend] for at, one in self._seconds if at >= since_s and backend in one.backends]
            span_s = min(span_s, max(1.0, self._seconds[-1][0] + 1 - since_s))
        return sum(one.prompt for one in sums) / span_s, sum(one.output for one in sums) / span_s

    def roll(self, second: int) -> None:
        """Ends a second: adds its sums to `total`, and subtracts the sums of seconds that are too old."""
        self._began_s = second if self._began_s is None else self._began_s
        self.second, self._running = self._running, Sums()
        self.total.merge(self.second, 1)
        self._seconds.append((second, self.second))
        while self._seconds[0][0] <= second - SPAN_S:
            self.total.merge(self._seconds.popleft()[1], -1)
        self.span_s = float(min(SPAN_S, second - self._began_s + 1))
