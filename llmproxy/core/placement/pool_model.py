"""The model of a pool in the cost placement: its learned speed, the load of its backends, and prices in seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp

from llmproxy.core.backends.view import View
from llmproxy.core.domain import DECODE, PREFILL, BackendPace, Learned, Request
from llmproxy.core.placement.adapter_demand import AdapterDemand, LoadedAdapters
from llmproxy.core.placement.backend_load import WORK_S, BackendLoad
from llmproxy.core.placement.prefix_index import PrefixIndex
from llmproxy.core.placement.price import NAMES, PriceRow
from llmproxy.core.placement.rates import PoolRates
from llmproxy.core.queueing.claims import Claims

STREAM = 0.1
"""Weight of a second of streaming, relative to a second before the first token. A reader notices the wait for the first
token far more than slightly slower tokens."""
ASIDE_S = 2.0  # Cost of sending a prompt to a backend whose configured `prompt_range` does not include its length.
CONGESTED = 0.95
"""Use of a resource (0..1) above which its price stops rising, because the price at 1 would be infinite. Below, the
price is `used / (1 - used)`, the mean number of requests at the resource, as in an M/M/1 queue."""
SCARCEST = CONGESTED / (1.0 - CONGESTED)


class PoolModel:
    """Prices requests on the backends of a pool. `CostPlacement` explains the terms, and `without`."""

    def __init__(self, index: PrefixIndex, without: frozenset[str]) -> None:
        self.index = index
        self.without = without
        self.rates = PoolRates()
        self.loads: dict[str, BackendLoad] = {}  # Backend -> its load.
        self.hit_ratio = 0.0  # The mean cached share of prompts.
        self.demand = AdapterDemand(self.rates.loads)
        self.claims = Claims()

    def prices(
        self, request: Request, able: Sequence[View], fits: Sequence[bool], ceiling: float, now: float
    ) -> list[PriceRow]:
        """Returns the prices of `able`, where `fits` says whether each has a free slot now."""
        known, backend_loads = self.loads, []
        for view in able:
            backend_load = known.get(view.backend) or self.load_of(view.backend)
            backend_loads.append(backend_load)
            if request.prefix and view.kv_tokens and view.kv_tokens != backend_load.kv_tokens:
                backend_load.kv_tokens = view.kv_tokens
                self.index.resize(view.backend, int(view.kv_tokens / request.prefix_tokens))
        matched = self.index.match(request.prefix) if request.prefix else {}
        rates, index, without = self.rates, self.index, self.without
        prefill_base_s, token_s = rates.prefill.base, rates.prefill.slope
        step_base_s, step_slope_s = rates.step.base, rates.step.slope
        attention = 0.5 * rates.attention.share
        hits = self.hit_ratio
        displaces = hits / (1.0 - hits) if hits < CONGESTED else SCARCEST
        prefill_seen, step_seen = rates.prefill.seen, rates.step.seen
        prompt_tokens, output_tokens, block_tokens = request.prompt_tokens, request.output_tokens, request.prefix_tokens
        adapter, prefix = request.adapter, request.prefix
        least_load_s = 0.0
        fetched, alone = request.stage is DECODE, request.stage is PREFILL
        if adapter is not None and not rates.loads.seen:
            # No adapter load has ended yet. Running loads give a lower bound.
            least_load_s = max([backend_load.loading_s(now) for backend_load in backend_loads])
        prices = []
        # This loop runs for every backend and request and takes most of the time of a decision, hence the local names.
        loaded = None
        for view, backend_load, has_room in zip(able, backend_loads, fits, strict=True):
            speed, step_speed = backend_load.prefill, backend_load.step
            if prefill_seen >= speed.stale_at or step_seen >= step_speed.stale_at or backend_load.loads:
                backend_load.renew(rates, now)
            backend_load.limit, slots, busy_share = view.limit, backend_load.adapters, backend_load.busy_share
            slots.size = view.max_adapters
            load, step_factor = view.load, step_speed.factor
            shared_tokens = backend_load.in_use.matched(prefix) * block_tokens if backend_load.in_flight else 0.0
            cached_tokens = matched.get(view.backend, 0) * block_tokens
            if cached_tokens < shared_tokens:
                # Prompts are computed in order: earlier prompts have cached their blocks before this one begins.
                cached_tokens = shared_tokens
            if cached_tokens > prompt_tokens - 1.0:
                cached_tokens = prompt_tokens - 1.0
            base_s = prefill_base_s * speed.factor
            queue_s = backend_load.queue_s(rates, now) if backend_load.unstarted else base_s
            transfer_s = None
            if fetched:
                # The prefill engine sends the uncached part of the prompt.
                transfer_s = rates.transfer.at(prompt_tokens - cached_tokens)
                cached_tokens = float(prompt_tokens)
                queue_s -= base_s
            # Each token attends to all earlier tokens: on average to the cached tokens and half of the uncached ones.
            work_tokens = (prompt_tokens - cached_tokens) * (1.0 + attention * (prompt_tokens + cached_tokens))
            prefill_s = work_tokens * token_s * speed.factor
            tpot_s = (step_base_s + step_slope_s * load) * step_factor
            answer_s = output_tokens * tpot_s
            crowd_s = output_tokens * load * step_slope_s * step_factor
            ttft_s = queue_s + prefill_s
            stream_s = STREAM * answer_s
            # `DecayingRate.at`.
            busy = busy_share.per_s * exp((busy_share.at_s - now) / WORK_S) if busy_share.per_s else 0.0
            scarce = busy / (1.0 - busy) if busy < CONGESTED else SCARCEST
            # A further prefill stage slows down only streams. The requests without a first byte are prefill stages too.
            streams = load - len(backend_load.unstarted) if alone else load
            harm_s = STREAM * (crowd_s + streams * prefill_s) + prefill_s * scarce
            eviction_s = prefill_s * displaces
            if eviction_s and (room := index.room(view.backend)):
                eviction_s *= max(0.0, 1.0 - room * block_tokens / (prompt_tokens - cached_tokens))
            total_s = queue_s + prefill_s + stream_s + harm_s + eviction_s
            adapter_s = range_s = memory_s = slot_s = None
            if adapter is not None and adapter in slots.deferred:
                adapter_s = answer_s
            elif adapter is not None and adapter not in slots.users:
                adapter_s = answer_s if slots.taken else 0.0
                if adapter_s or adapter not in view.resident:
                    load_s = max(least_load_s, rates.loads.at(slots.tier(adapter)))
                    adapter_s += load_s
                    # An engine pauses its batch and its waiting prompts while it loads an adapter: now, and when the
                    # displaced adapter is loaded again.
                    stall = STREAM * load + (1.0 - STREAM) * len(backend_load.unstarted) + scarce
                    loaded = loaded or LoadedAdapters(able)
                    reload_s = self.demand.reload_s(adapter, view, slots, loaded, least_load_s, now) * (1.0 + stall)
                    harm_s += load_s * stall
                    eviction_s += reload_s
                    total_s += load_s * stall + reload_s
            if adapter_s is not None:
                ttft_s += adapter_s
                total_s += adapter_s
            if transfer_s is not None:
                ttft_s += transfer_s
                total_s += transfer_s
            ranged = None if fetched else view.prompt_range
            if ranged is not None and not ranged[0] <= prompt_tokens <= ranged[1]:
                range_s = ASIDE_S
                total_s += range_s
            if view.kv_tokens:
                kv_used = view.kv_used
                scarce_kv = kv_used / (1.0 - kv_used) if kv_used < CONGESTED else SCARCEST
                memory_s = answer_s * (prompt_tokens - shared_tokens) / view.kv_tokens * scarce_kv
                total_s += memory_s
            if not has_room:
                slot_s = self._slot_s(request, view, ceiling, answer_s, now)
                ttft_s += slot_s
                total_s += slot_s
            seconds: tuple[float | None, ...] = (
                queue_s,
                prefill_s,
                stream_s,
                harm_s,
                eviction_s,
                adapter_s,
                range_s,
                memory_s,
                slot_s,
                transfer_s,
            )
            if without:
                seconds = tuple([None if n in without else s for n, s in zip(NAMES, seconds, strict=False)])
                total_s = sum(s for s in seconds if s is not None)
            cold = bool(adapter_s)
            prices.append(PriceRow(view.backend, total_s, seconds, ttft_s, tpot_s, cached_tokens, cold, has_room))
        return prices

    def _slot_s(self, request: Request, view: View, ceiling: float, answer_s: float, now: float) -> float:
        """Returns the seconds until a backend takes this request, if the others that wait for it come first.

        A request that waits already is expected to wait at least as long again. So it waits about as long as the
        backend saves, and then takes another (the rule of ski rental), even if others overtake it all the time.
        """
        others, prompts_s = self.claims.others(request, view.backend)
        if view.has_room(ceiling):
            until_s = self.load_of(view.backend).rationed_until(self.rates, request.band, ceiling, now)
            slot_s = until_s - now + prompts_s
        else:
            waiting = max(0, view.load - min(view.limit, view.slots(ceiling))) + others + 1
            slot_s = waiting * answer_s / max(1, view.load)
        return max(slot_s, self.claims.waited_s(request, view.backend, now))

    def learned(self, backends: Iterable[str], now: float) -> Learned:
        rates = self.rates
        return Learned(
            prefill_base_s=rates.prefill.base,
            prefill_token_s=rates.prefill.slope,
            prefill_attention=rates.attention.share,
            step_s=rates.step.at(1.0),
            sequence_s=rates.step.slope,
            adapter_s=rates.loads.coldest_s,
            ttft_p90_factor=rates.late_ttft.factor,
            tpot_p90_factor=rates.late_tpot.factor,
            backends=tuple(self._pace(backend, now) for backend in backends),
        )

    def _pace(self, backend: str, now: float) -> BackendPace:
        backend_load, index = self.load_of(backend), self.index
        backend_load.renew(self.rates, now)
        return BackendPace(
            backend,
            backend_load.prefill.factor,
            backend_load.step.factor,
            backend_load.busy_share.at(now),
            backend_load.in_flight,
            index.size(backend),
            index.limit(backend),
        )

    def load_of(self, backend: str) -> BackendLoad:
        backend_load = self.loads.get(backend)
        if backend_load is None:
            backend_load = self.loads[backend] = BackendLoad()
        return backend_load
