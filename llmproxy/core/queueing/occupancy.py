"""The requests, bytes and tokens in the waiting room relative to their limits, and the rate of grants."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import astuple

from llmproxy.core.domain import Request
from llmproxy.core.settings import QueueSettings


class _Usage(Struct):
    requests: int = 0
    body_bytes: int = 0
    tokens: int = 0


_NOTHING = _Usage()


@dataclass(frozen=True, slots=True)
class Full:
    """A reached limit of the waiting room, named as in the configuration."""

    name: str
    limit: int
    total: bool  # Whether the limit is for all bands together.


class Occupancy:
    """Waiting requests, body bytes and estimated tokens (prompt and answer) of this process, over all pools.

    Each of these sums is limited per flow, per band and in total. The object also records when each request began to
    wait.
    """

    def __init__(self, limits: QueueSettings) -> None:
        self._limits = limits
        self._total = _Usage()
        self._bands: defaultdict[int, _Usage] = defaultdict(_Usage)
        self._flows: defaultdict[tuple[int, str], _Usage] = defaultdict(_Usage)
        # OrderedDict, because finding the first entry of a dict is slow after many removals from its front.
        self._since_s: defaultdict[int, OrderedDict[str, float]] = defaultdict(OrderedDict)

    def reconfigure(self, limits: QueueSettings) -> None:
        """Applies new limits. Waiting requests stay, even above the limits."""
        self._limits = limits

    def full(self, request: Request, without: Sequence[Request] = ()) -> Full | None:
        """Returns the first limit that `request` would exceed if `without` (of lower bands) had left; else None."""
        limits = self._limits
        flow = self._flows.get((request.band, request.flow), _NOTHING)
        band = self._bands.get(request.band, _NOTHING)
        total = self._total
        if without:
            total = _Usage(
                total.requests - len(without),
                total.body_bytes - sum(one.body_bytes for one in without),
                total.tokens - sum(one.prompt_tokens + one.output_tokens for one in without),
            )
        body_bytes, tokens = request.body_bytes, request.prompt_tokens + request.output_tokens
        for whose, used, requests_max, bytes_max, tokens_max in (
            ("flow_", flow, limits.flow_requests_max, limits.flow_bytes_max, limits.flow_tokens_max),
            ("band_", band, limits.band_requests_max, limits.band_bytes_max, limits.band_tokens_max),
            ("", total, limits.requests_max, limits.bytes_max, limits.tokens_max),
        ):
            if requests_max is not None and used.requests + 1 > requests_max:
                return Full(f"queue.{whose}requests_max", requests_max, not whose)
            if bytes_max is not None and used.body_bytes + body_bytes > bytes_max:
                return Full(f"queue.{whose}bytes_max", bytes_max, not whose)
            # A single request may exceed the token limit if nothing else waits, because tokens are an estimate.
            if tokens_max is not None and used.tokens and used.tokens + tokens > tokens_max:
                return Full(f"queue.{whose}tokens_max", tokens_max, not whose)
        return None

    def enter(self, request: Request, now: float) -> None:
        self._since_s[request.band][request.id] = now
        tokens = request.prompt_tokens + request.output_tokens
        for usage in (self._total, self._bands[request.band], self._flows[request.band, request.flow]):
            usage.requests += 1
            usage.body_bytes += request.body_bytes
            usage.tokens += tokens

    def leave(self, request: Request) -> None:
        del self._since_s[request.band][request.id]
        flow = self._flows[request.band, request.flow]
        tokens = request.prompt_tokens + request.output_tokens
        for usage in (self._total, self._bands[request.band], flow):
            usage.requests -= 1
            usage.body_bytes -= request.body_bytes
            usage.tokens -= tokens
        # The number of flow names is unlimited, so empty flows are removed.
        if not flow.requests:
            del self._flows[request.band, request.flow]

    def queued(self) -> dict[int, tuple[int, int]]:
        """Maps bands to (waiting requests, their body bytes)."""
        return {band: (usage.requests, usage.body_bytes) for band, usage in self._bands.items()}

    def since_s(self, request: Request) -> float:
        """Returns when a waiting request began to wait."""
        return self._since_s[request.band][request.id]

    def longest_s(self, now: float) -> dict[int, float]:
        """Maps each band with waiting requests to the longest present wait in the band, in seconds."""
        return {band: now - next(iter(since_s.values())) for band, since_s in self._since_s.items() if since_s}

    def check(self) -> None:
        for parts in (self._bands, self._flows):
            rows = [astuple(usage) for usage in parts.values()]
            assert all(number >= 0 for row in rows for number in row)
            assert tuple(map(sum, zip((0, 0, 0), *rows, strict=True))) == astuple(self._total)
        assert {band: len(since_s) for band, since_s in self._since_s.items()} == {
            band: usage.requests for band, usage in self._bands.items()
        }
        assert all(usage.requests for usage in self._flows.values()), "a flow that is empty is still listed"


class DrainRate:
    """The rate at which requests are granted a backend, for `Retry-After` and `refuse_late`.

    Covers the last `_GRANTS` grants. The grant of a request that waits again is not counted.
    """

    _GRANTS = 64
    _PAUSE_S = 10.0
    _RETRY_MIN_S = 1.0
    _RETRY_MAX_S = 60.0
    _FLOWS_SHOWN = 3

    def __init__(self) -> None:
        self._grants: deque[tuple[float, Request]] = deque(maxlen=self._GRANTS)

    def granted(self, request: Request, now: float) -> None:
        # After a pause without grants the old rate is meaningless.
        if self._grants and now - self._grants[-1][0] > self._PAUSE_S:
            self._grants.clear()
        self._grants.append((now, request))

    def forget(self, request_id: str) -> None:
        """Removes the grant of a request that waits again."""
        for at, (_, granted) in enumerate(self._grants):
            if granted.id == request_id:
                del self._grants[at]
                return

    def granted_since(self, arrived_s: float) -> tuple[tuple[int, str, int], ...]:
        """Returns (band, flow, grants) of the `_FLOWS_SHOWN` flows with the most grants after `arrived_s`."""
        found: Counter[tuple[int, str]] = Counter()
        for at_s, request in reversed(self._grants):
            if at_s <= arrived_s:
                break
            found[request.band, request.flow] += 1
        return tuple([(*key, count) for key, count in found.most_common(self._FLOWS_SHOWN)])

    def interval_s(self, now: float) -> float | None:
        """Returns the recent mean seconds between two grants, None before the first grant."""
        if not self._grants:
            return None
        return max(now - self._grants[0][0], 0.1) / len(self._grants)

    def retry_after_s(self, ahead: int, now: float) -> float:
        """Returns the expected seconds until a request behind `ahead` others is granted, between 1 and 60."""
        interval_s = self.interval_s(now)
        if interval_s is None:
            return self._RETRY_MIN_S
        return min(self._RETRY_MAX_S, max(self._RETRY_MIN_S, (ahead + 1) * interval_s))
