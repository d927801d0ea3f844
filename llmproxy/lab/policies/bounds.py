"""Bounds that hardly any policy can beat, computed from a trace and a fleet without a simulation."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf

from llmproxy.lab.fleet.fleet_file import room_tokens
from llmproxy.lab.fleet.spec import SimulatedFleet
from llmproxy.lab.policies.pooled_server import (
    EngineWork,
    PooledServer,
    QueueBounds,
    Served,
    balance_rps,
    queue_bounds,
    work_of,
)
from llmproxy.lab.results.fairness import OUTPUT_WEIGHT, PROMPT_WEIGHT
from llmproxy.lab.results.result import Bound
from llmproxy.lab.results.sums import ratio
from llmproxy.lab.traces.arrival import Arrival, Trace

BLOCKS_MAX = 1 << 21  # Most distinct blocks of the unlimited cache; about 200 MB.


def vtc_bound_tokens(longest_prompt_tokens: int, fleet: SimulatedFleet) -> float:
    """Returns VTC's bound on the difference of weighted service between two backlogged tenants.

    The bound is 2 max(w_p L, w_q M) in "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024). The
    weights are 1 per prompt token and 2 per output token, and L is the longest prompt. M, the tokens of a batch in the
    paper, is here the size of all KV caches, the most tokens that can run at a time. Requests that wait inside engines
    are left out, so a proxy that dispatches early can exceed the bound.
    """
    unfinished_tokens = sum(spec.kv_tokens for spec in fleet.replicas)
    return 2 * max(PROMPT_WEIGHT * longest_prompt_tokens, OUTPUT_WEIGHT * unfinished_tokens)


def static_lora(requests_by_adapter: Mapping[str, int], slots: int) -> float | None:
    """Returns the share of requests for the `slots` most popular adapters; None without requests.

    This is the hit ratio if each of these adapters stays in one slot of one replica, the best static placement. A
    placement that follows changes of popularity can have more hits.
    """
    total = sum(requests_by_adapter.values())
    return ratio(sum(sorted(requests_by_adapter.values(), reverse=True)[:slots]), total)


def all_bounds(
    trace: Trace, fleet: SimulatedFleet, prefill_scale: float = 1.0, warmup_s: float = 0.0
) -> dict[str, Bound]:
    """Maps names to bounds, in display order. Requests before `warmup_s` are not counted. Raises TraceError.

    The trace is read twice, and only the blocks in the caches are kept. All replicas are assumed healthy. Every policy
    refuses requests that are longer than every context; they count in `goodput_max` only.
    """
    longest = max(min(spec.max_model_len, room_tokens(spec.kv_tokens, spec.block_size)) for spec in fleet.replicas)
    cache_tokens = sum(spec.kv_tokens for spec in fleet.replicas)
    sums = _TraceSums.over(_OrderedRequests(trace, cache_tokens, longest, warmup_s))
    queue, balance = QueueBounds(), None
    if sums.fitting:
        balance = balance_rps(fleet, prefill_scale, sums.work)
        server = PooledServer(fleet, prefill_scale, sums.work)
        again = _OrderedRequests(trace, cache_tokens, longest, warmup_s)
        queue = queue_bounds(again.fitting(), server, timed=not sums.closed, since_s=warmup_s)
    return _queue_bounds(sums, queue, balance) | _cache_bounds(sums) | _fairness_bounds(sums, fleet)


def _queue_bounds(sums: _TraceSums, queue: QueueBounds, balance: float | None) -> dict[str, Bound]:
    untimed = "; not computed: later turns arrive when earlier answers end" if sums.closed else ""
    bounds = {
        "goodput_max": Bound(
            value=ratio(sums.fitting, sums.offered),
            unit="share",
            about="requests that fit into the context of a replica; all others are refused by every policy",
        ),
        "rate_max": Bound(
            value=queue.requests_per_s,
            unit="requests/s",
            about="no policy that hits no more than hit_pooled_lru sustains more: engines without waste, as one server",
        ),
        "rate_balance": Bound(
            value=balance,
            unit="requests/s",
            about="engines that prefill in full steps and decode in the largest batch, in turns; an estimate, no bound",
        ),
        "utilisation": Bound(
            value=queue.utilisation,
            unit="share",
            about="work of the trace over the capacity of the fleet at rate_max" + untimed,
        ),
        "service_s": Bound(
            value=queue.service_s, unit="s", about="mean time of the whole fleet per request, at rate_max"
        ),
    }
    for quantile, pooled_s, floor_s in (
        ("p50", queue.pooled_ttft_p50_s, queue.floor_ttft_p50_s),
        ("p99", queue.pooled_ttft_p99_s, queue.floor_ttft_p99_s),
    ):
        bounds[f"ttft_{quantile}_pooled"] = Bound(
            value=pooled_s,
            unit="s",
            about="one queue, one server as fast as the fleet, then an idle replica's prefill (Lindley); not strict"
            + untimed,
        )
        bounds[f"ttft_{quantile}_floor"] = Bound(
            value=floor_s,
            unit="s",
            about="a central queue for nothing but prompts; no policy that serves in order of arrival is below"
            + untimed,
        )
    return bounds


def _cache_bounds(sums: _TraceSums) -> dict[str, Bound]:
    """Returns the cached shares of prompt tokens if prompts are served one after the other; None without tokens.

    A hit ends at the first missing block. The least recently used block is evicted first, and the tail of a prompt
    before its head.

    `hit_pooled_lru` has one cache as large as all caches together. It is usually too high, because it ignores the KV
    cache of answers and the time to compute a prompt. But a policy that orders its queue by prefix can beat it.
    `hit_endless` has an unlimited cache: a strict bound for all policies, unless the trace has more than `BLOCKS_MAX`
    distinct blocks.
    """
    excess = "" if sums.endless_exact else f"; too low, since only {BLOCKS_MAX:,} distinct blocks are remembered"
    return {
        "hit_pooled_lru": Bound(
            value=ratio(sums.hit_tokens, sums.prompt_tokens),
            unit="share",
            about="prompt tokens found in one LRU cache as large as all together, in order of arrival; not strict",
        ),
        "hit_endless": Bound(
            value=ratio(sums.known_tokens, sums.prompt_tokens),
            unit="share",
            about=f"prompt tokens that an earlier request had{excess}",
        ),
    }


def _fairness_bounds(sums: _TraceSums, fleet: SimulatedFleet) -> dict[str, Bound]:
    bounds = {
        "vtc_difference": Bound(
            value=vtc_bound_tokens(sums.longest_prompt_tokens, fleet),
            unit="tokens",
            about="weighted service of two backlogged tenants under VTC: 2 max(longest prompt, 2 x KV of the fleet)",
        )
    }
    if sums.adapters:
        slots = sum(spec.max_loras for spec in fleet.replicas)
        bounds["lora_static_hit"] = Bound(
            value=static_lora(sums.adapters, slots),
            unit="share",
            about=f"requests whose adapter is resident when the {slots} most popular ones stay",
        )
    return bounds


# --- the trace in order -----------------------------------------------------------------------------------------------


def in_order(arrivals: Iterator[Arrival]) -> Iterator[tuple[float, Arrival]]:
    """Yields (earliest possible time, arrival) for all arrivals, including later requests of closed loops.

    A later request comes `think_s` after the earlier one, as if answers took no time. Loops alternate at equal times.
    """
    serial = count()
    coming: list[tuple[float, int, Arrival]] = []
    for arrival in arrivals:
        while coming and coming[0][0] < arrival.at_s:
            yield _next_turn(coming, serial)
        heappush(coming, (arrival.at_s, next(serial), arrival))
    while coming:
        yield _next_turn(coming, serial)


def _next_turn(coming: list[tuple[float, int, Arrival]], serial: Iterator[int]) -> tuple[float, Arrival]:
    at_s, _, arrival = heappop(coming)
    if arrival.then is not None:
        heappush(coming, (at_s + arrival.think_s, next(serial), arrival.then))
    return at_s, arrival


class _PooledCache:
    """An LRU cache of `capacity_tokens`, in blocks of `block_tokens`.

    A hit ends at the first missing block, and the tail of a prompt is evicted before its head.
    """

    def __init__(self, capacity_tokens: int, block_tokens: int) -> None:
        self._capacity = capacity_tokens // block_tokens
        self._block_tokens = block_tokens
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def serve(self, blocks: tuple[int, ...], prompt_tokens: int) -> int:
        """Returns how many of `prompt_tokens` are cached, and adds all `blocks` of the prompt to the cache."""
        hits = _known(blocks, self._blocks)
        # The head is used last, so it is evicted last.
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
        return min(hits * self._block_tokens, prompt_tokens)


class _EndlessCache:
    """A cache without eviction. It is `full` at `BLOCKS_MAX` blocks, and then drops new ones."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._seen: set[int] = set()

    @property
    def full(self) -> bool:
        return len(self._seen) >= BLOCKS_MAX

    def serve(self, blocks: tuple[int, ...], prompt_tokens: int) -> int:
        hits = _known(blocks, self._seen)
        if not self.full:
            self._seen.update(blocks)
        return min(hits * self._block_tokens, prompt_tokens)


def _known(blocks: tuple[int, ...], cached: Container[int]) -> int:
    """Returns the number of cached `blocks` before the first uncached one."""
    return next((i for i, block in enumerate(blocks) if block not in cached), len(blocks))


class _OrderedRequests:
    """All requests of a trace in order, with their hits in two caches. Requests that fit no replica use no cache."""

    def __init__(self, trace: Trace, cache_tokens: int, room_tokens: float = inf, warmup_s: float = 0.0) -> None:
        self.endless = _EndlessCache(trace.block_tokens)
        self._trace = trace
        self._pooled = _PooledCache(cache_tokens, trace.block_tokens)
        self._room_tokens = room_tokens
        self._warmup_s = warmup_s

    def all(self) -> Iterator[tuple[Served, bool]]:
        """Yields (request, whether it fits a replica)."""
        for at_s, arrival in in_order(self._trace.arrivals()):
            counted = at_s >= self._warmup_s
            if arrival.prompt_tokens + arrival.output_tokens > self._room_tokens:
                yield Served(arrival, at_s, 0, 0, counted), False
                continue
            blocks = arrival.own_blocks()
            hit_tokens = self._pooled.serve(blocks, arrival.prompt_tokens)
            yield Served(arrival, at_s, hit_tokens, self.endless.serve(blocks, arrival.prompt_tokens), counted), True

    def fitting(self) -> Iterator[Served]:
        return (served for served, fits in self.all() if fits)


@dataclass(slots=True)
class _TraceSums:
    """Sums over the counted requests. The number of adapters is bounded, because the trace was checked before."""

    offered: int = 0
    fitting: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    known_tokens: int = 0
    longest_prompt_tokens: int = 0
    work: EngineWork = field(default_factory=EngineWork)
    adapters: Counter[str] = field(default_factory=Counter)
    closed: bool = False
    endless_exact: bool = True

    @classmethod
    def over(cls, requests: _OrderedRequests) -> _TraceSums:
        sums = cls()
        for served, fits in requests.all():
            sums.closed |= served.arrival.then is not None
            if served.counted:
                sums.offered += 1
                if fits:
                    sums._count(served)
        sums.endless_exact = not requests.endless.full
        return sums

    def _count(self, served: Served) -> None:
        arrival = served.arrival
        self.fitting += 1
        self.prompt_tokens += arrival.prompt_tokens
        self.hit_tokens += served.hit_tokens
        self.known_tokens += served.known_tokens
        self.longest_prompt_tokens = max(self.longest_prompt_tokens, arrival.prompt_tokens)
        self.work = self.work.plus(work_of(served))
        if arrival.adapter is not None:
            self.adapters[arrival.adapter] += 1
