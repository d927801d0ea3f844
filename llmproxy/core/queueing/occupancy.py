"""How full the waiting room is compared with its limits, and how fast it empties."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from llmproxy.core.domain import Request
from llmproxy.core.settings import QueueSettings


@dataclass(slots=True)
class _Usage:
    requests: int = 0
    body_bytes: int = 0
    tokens: int = 0

    def add(self, request: Request, times: int) -> None:
        self.requests += times
        self.body_bytes += times * request.body_bytes
        self.tokens += times * (request.prompt_tokens + request.output_tokens)


_NOTHING = _Usage()


@dataclass(frozen=True, slots=True)
class Full:
    """A limit of the waiting room that is reached, by its name in the configuration; `total` over all bands."""

    name: str
    limit: int
    total: bool


class Occupancy:
    """How much waits in this process, over all pools: requests, body bytes, and tokens (prompt and answer, estimated).

    Each of the three is limited for one flow, for one band and in total. Since when each request waits is kept too.
    """

    def __init__(self, limits: QueueSettings) -> None:
        self._limits = limits
        self._total = _Usage()
        self._bands: defaultdict[int, _Usage] = defaultdict(_Usage)
        self._flows: defaultdict[tuple[int, str], _Usage] = defaultdict(_Usage)
        # A plain dict would search for its first entry among those that have left.
        self._since_s: defaultdict[int, OrderedDict[str, float]] = defaultdict(OrderedDict)

    def reconfigure(self, limits: QueueSettings) -> None:
        """Apply other limits; requests that wait beyond them stay."""
        self._limits = limits

    def full(self, request: Request, without: Sequence[Request] = ()) -> Full | None:
        """The limit that `request` would break, None where it fits. The narrowest comes first.

        `without` are requests of lower bands that are counted as if they had left.
        """
        limits = self._limits
        flow = self._flows.get((request.band, request.flow), _NOTHING)
        band = self._bands.get(request.band, _NOTHING)
        total = self._total
        if without:
            total = replace(total)
            for one in without:
                total.add(one, -1)
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
            # A request above the limit of tokens may wait when nothing else does, because tokens are only an estimate.
            if tokens_max is not None and used.tokens and used.tokens + tokens > tokens_max:
                return Full(f"queue.{whose}tokens_max", tokens_max, not whose)
        return None

    def enter(self, request: Request, now: float) -> None:
        self._since_s[request.band][request.id] = now
        for usage in (self._total, self._bands[request.band], self._flows[request.band, request.flow]):
            usage.add(request, 1)

    def leave(self, request: Request) -> None:
        del self._since_s[request.band][request.id]
        flow = self._flows[request.band, request.flow]
        for usage in (self._total, self._bands[request.band], flow):
            usage.add(request, -1)
        # Flows come and go without an end to their names.
        if not flow.requests:
            del self._flows[request.band, request.flow]

    def queued(self) -> dict[int, tuple[int, int]]:
        """Band -> (requests, body bytes) waiting."""
        return {band: (usage.requests, usage.body_bytes) for band, usage in self._bands.items()}

    def since_s(self, request: Request) -> float:
        """Return when a waiting request began to wait."""
        return self._since_s[request.band][request.id]

    def longest_s(self, now: float) -> dict[int, float]:
        """Band -> how long the one that came first has waited since it came, or came back."""
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
    """How fast the waiting room empties, for `Retry-After`: measured over the last grants.

    A request that came back, because its attempt failed or was preempted, is not counted.
    """

    _GRANTS = 64
    _PAUSE_S = 10.0
    _RETRY_MIN_S = 1.0
    _RETRY_MAX_S = 60.0
    _FLOWS_SHOWN = 3

    def __init__(self) -> None:
        self._grants: deque[tuple[float, Request]] = deque(maxlen=self._GRANTS)

    def granted(self, request: Request, now: float) -> None:
        # After a pause in which nothing was asked for, the old pace says nothing of the new one.
        if self._grants and now - self._grants[-1][0] > self._PAUSE_S:
            self._grants.clear()
        self._grants.append((now, request))

    def came_back(self, request_id: str) -> None:
        """A request that was granted waits again."""
        for at, (_, granted) in enumerate(self._grants):
            if granted.id == request_id:
                del self._grants[at]
                return

    def since(self, arrived_s: float) -> tuple[tuple[int, str, int], ...]:
        """Return the `_FLOWS_SHOWN` flows most granted after `arrived_s`, of the last `_GRANTS`.

        As (band, flow, requests), the most frequent first.
        """
        found: Counter[tuple[int, str]] = Counter()
        for at_s, request in reversed(self._grants):
            if at_s <= arrived_s:
                break
            found[request.band, request.flow] += 1
        return tuple([(*key, count) for key, count in found.most_common(self._FLOWS_SHOWN)])

    def interval_s(self, now: float) -> float | None:
        """Seconds between two grants of late, None before the first."""
        if not self._grants:
            return None
        return max(now - self._grants[0][0], 0.1) / len(self._grants)

    def retry_after_s(self, ahead: int, now: float) -> float:
        """Seconds until a request with `ahead` others before it would be granted, within 1 s and 60 s."""
        interval_s = self.interval_s(now)
        if interval_s is None:
            return self._RETRY_MIN_S
        return min(self._RETRY_MAX_S, max(self._RETRY_MIN_S, (ahead + 1) * interval_s))
