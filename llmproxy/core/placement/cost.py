"""The cost placement: the backend on which a request adds the fewest seconds, for itself and for other requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import exp, inf
from random import Random

from llmproxy.core.backends.view import View, rooms
from llmproxy.core.domain import (
    DECODE,
    PREFILL,
    BackendPace,
    Explained,
    Learned,
    NoCapacity,
    NoMatch,
    Placed,
    Predicted,
    Request,
    Usage,
    Verdict,
)
from llmproxy.core.placement.adapter_demand import AdapterDemand
from llmproxy.core.placement.backend_load import WORK_S, BackendLoad, InFlight
from llmproxy.core.placement.policy import (
    NO_CAPACITY,
    NO_MATCH,
    NO_MATCH_FOR_MODEL,
    Placement,
    Quote,
    presets,
    with_context,
)
from llmproxy.core.placement.prefix_index import PrefixIndex
from llmproxy.core.placement.price import NAMES, PriceRow, with_headroom
from llmproxy.core.placement.rates import PROMPTS_MOST, PoolRates

TIE_S = 0.005
"""Prices this close count as equal, because no estimate is more exact. Of backends at equal prices, the least loaded is
chosen."""
STREAM = 0.1
"""Weight of a second of streaming, relative to a second before the first token. A reader notices the wait for the first
token far more than slightly slower tokens."""
HIT_GAIN = 0.02
"""Weight of the newest request in the pool's hit ratio, so the ratio reflects about the last fifty requests."""
ASIDE_S = 2.0
"""Cost of sending a prompt to a backend whose configured `prompt_range` does not include its length."""
EXPLAINED_MAX = 100
"""Number of past choices whose candidate prices are kept for the debug pages."""
CONGESTED = 0.95
"""Use of a resource (0..1) above which its price stops rising, because the price at 1 would be infinite. Below, the
price is `used / (1 - used)`, the mean number of requests that wait for the resource, as in an M/M/1 queue."""
SCARCEST = CONGESTED / (1.0 - CONGESTED)


@presets.register("cost", prefixes=True, answers=True)
class CostPlacement(Placement):
    """Takes the backend with the least cost in seconds, for the request itself and for the requests that it delays.

    The terms are:

    - `queue`: until the backend has computed its earlier prompts; longer if the oldest of them is overdue.
    - `prefill`: to compute the uncached part of the prompt.
    - `adapter`: to load an adapter, or to wait for an adapter slot.
    - `slot`: until a full backend has a free slot, or a closed backend takes prompts again.
    - `stream`: for the rest of the answer, weighted by `STREAM`.
    - `harm`: the slowdown of the streams on the backend, weighted by `STREAM`, and the delay of later requests, which
      grows with the share of time that the backend spends on prompts.
    - `eviction`: to recompute the cached blocks that this prompt evicts from a full cache, at the pool's hit ratio.
    - `memory`: for the KV cache space of the answer, except blocks shared with other requests; grows as the cache
      fills.
    - `transfer`: to fetch a prompt that another backend computed. Replaces `prefill`.
    - `range`: a penalty if the prompt's length is outside the backend's `prompt_range`.
    - `headroom`: for time that the backend would leave unused under the request's objective (`with_headroom`).

    A backend is closed to prompts while it has enough prompts, or while prompts take more of its time than the
    objectives of its streams allow (`BackendLoad.opens_at`). If a full or closed backend is the cheapest, the request
    waits for it, behind the requests that already wait for it. Later requests may take free slots elsewhere. Speeds are
    learned for the pool, and for each backend relative to the pool.
    """

    def __init__(self, rng: Random, index: PrefixIndex | None = None, without: frozenset[str] = frozenset()) -> None:
        """`without`: names of terms to leave out, for measurements. `objectives` means the term `headroom`."""
        self._rng = rng
        self._without = without
        self._index = index or PrefixIndex()
        self._rates = PoolRates()
        self._backend_loads: dict[str, BackendLoad] = {}
        self._flights: dict[int, InFlight] = {}
        self._hit_ratio = 0.0
        self._demand = AdapterDemand(self._rates.loads)
        self._explained: deque[tuple[tuple[str, str, str, float, int, str], list[PriceRow]]] = deque(
            maxlen=EXPLAINED_MAX
        )
        # State of one scheduling pass, whose calls all have the same `now`. `_open` resets it when `now` changes.
        # Full or closed backend -> (request id -> prefill seconds) of the requests that wait for it in this pass, in
        # the order of their turns. `place` adds these claims, and `_slot_s` counts the requests ahead.
        self._claims: dict[str, dict[str, float]] = {}
        # The `now` of the pass to which the claims belong.
        self._claims_at_s = -1.0
        # The earliest time at which a closed backend opens: `changes_at` returns it, so that the scheduler runs again.
        self._opens_s = inf

    # --- the choice --------------------------------------------------------------------------------------------------

    def place(
        self, request: Request, views: Sequence[View], ceiling: float, excluded: frozenset[str], now: float
    ) -> Placed | NoCapacity | NoMatch:
        found = self._candidates(request, views, ceiling, excluded, now)
        if not isinstance(found, tuple):
            return found
        able, fits, prices = found
        if request.slo is not None and "objectives" not in self._without:
            late = self._rates.late_ttft.factor, self._rates.late_tpot.factor
            prices = with_headroom(prices, request, STREAM, late, now)
        least_s = prices[0].total_s
        for price in prices:
            least_s = min(least_s, price.total_s)
        near, fitting = [], []
        for index, price in enumerate(prices):
            if price.total_s <= least_s + TIE_S:
                near.append(index)
                if fits[index]:
                    fitting.append(index)
        fitting = fitting or self._idle(able, fits, prices, least_s)
        if not fitting:
            for index in near:
                # A pass may place the same request several times. The request keeps its first position.
                claims = self._claims.setdefault(prices[index].backend, {})
                claims.setdefault(request.id, prices[index].seconds[NAMES.index("prefill")] or 0.0)
            # `later` names the backend to wait for; the scheduler passes the request over (`WaitReason.LATER`).
            return NoMatch(whole_model=False, later=prices[near[0]].backend)
        if len(fitting) > 1:
            near, fitting, lightest = fitting, [], inf
            for index in near:
                load = able[index].load
                if load < lightest:
                    lightest, fitting = load, [index]
                elif load == lightest:
                    fitting.append(index)
        chosen = prices[self._rng.choice(fitting)]
        facts = request.id, request.label, request.model, now, request.prompt_tokens, chosen.backend
        self._explained.append((facts, prices))
        rates = self._rates
        in_use = self._backend_loads[chosen.backend].in_use
        shared_blocks = in_use.matched(request.prefix) if request.prefix else 0
        return Placed(
            chosen.backend,
            chosen.total_s,
            chosen.terms(),
            len(able),
            round(chosen.cached_tokens),
            min(request.prompt_tokens, round(shared_blocks * request.prefix_tokens)),
            chosen.cold_adapter,
            Predicted(chosen.ttft_s, chosen.ttft_s * rates.late_ttft.factor),
            Predicted(chosen.tpot_s, chosen.tpot_s * rates.late_tpot.factor),
        )

    def quote(
        self, request: Request, views: Sequence[View], ceiling: float, excluded: frozenset[str], now: float
    ) -> Quote | None:
        found = self._candidates(request, views, ceiling, excluded, now)
        if not isinstance(found, tuple):
            return None
        least = min(found[2], key=lambda price: price.total_s)
        return Quote(least.total_s, least.backend, least.cached_tokens)

    def _candidates(
        self, request: Request, views: Sequence[View], ceiling: float, excluded: frozenset[str], now: float
    ) -> tuple[list[View], list[bool], list[PriceRow]] | NoCapacity | NoMatch:
        """Returns the backends that can serve a request, whether each has a free slot now, and their prices."""
        # A split request can be served whole instead, so its prefill stage is priced even where it would have to wait.
        waits = request.stage is PREFILL
        room = rooms(views, ceiling)
        if not waits and True not in room:
            return NO_CAPACITY
        serving, fits, model, shortest = [], [], request.model, inf
        for view, has in zip(views, room, strict=True):
            if view.available and model in view.served and view.backend not in excluded:
                serving.append(view)
                fits.append(has)
                if view.max_model_len is not None and view.max_model_len < shortest:
                    shortest = view.max_model_len
        able = serving
        if shortest < request.prompt_tokens + (request.max_tokens or 1):
            able = with_context(request, serving, views, excluded)
            fits = rooms(able, ceiling)
        fits = self._open(request, able, fits, ceiling, now)
        if True not in fits and not (waits and able):
            if True in self._open(request, serving, rooms(serving, ceiling), ceiling, now):
                return NO_MATCH
            return NO_MATCH_FOR_MODEL if True in self._open(request, views, room, ceiling, now) else NO_CAPACITY
        if request.stage is DECODE:
            # The blocks in the prefill engine expire, so the decode stage considers only backends with room.
            able = [view for view, fit in zip(able, fits, strict=True) if fit]
            fits = [True] * len(able)
        return able, fits, self._prices(request, able, fits, ceiling, now)

    def _idle(
        self, able: Sequence[View], fits: Sequence[bool], prices: Sequence[PriceRow], least_s: float
    ) -> list[int]:
        """Returns the index of the idle backend with the least price without `harm`; empty if that price is above
        `least_s`.

        Waiting for another backend while this one is idle would serve no request sooner.
        """
        harm = NAMES.index("harm")
        idle = [
            (price.total_s - (price.seconds[harm] or 0.0), index)
            for index, (view, price) in enumerate(zip(able, prices, strict=True))
            if fits[index] and not view.load
        ]
        return [index for total_s, index in sorted(idle)[:1] if total_s <= least_s]

    def _prices(
        self, request: Request, able: Sequence[View], fits: Sequence[bool], ceiling: float, now: float
    ) -> list[PriceRow]:
        known, backend_loads = self._backend_loads, []
        for view in able:
            backend_load = known.get(view.backend) or self._backend_load(view.backend)
            backend_loads.append(backend_load)
            if request.prefix and view.kv_tokens and view.kv_tokens != backend_load.kv_tokens:
                backend_load.kv_tokens = view.kv_tokens
                self._index.resize(view.backend, int(view.kv_tokens / request.prefix_tokens))
        matched = self._index.match(request.prefix) if request.prefix else {}
        rates, index, without = self._rates, self._index, self._without
        prefill_base_s, token_s = rates.prefill.base, rates.prefill.slope
        step_base_s, step_slope_s = rates.step.base, rates.step.slope
        attention = 0.5 * rates.attention.share
        hits = self._hit_ratio
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
                    again_s = self._demand.again_s(adapter, view, slots, able, least_load_s, now) * (1.0 + stall)
                    harm_s += load_s * stall
                    eviction_s += again_s
                    total_s += load_s * stall + again_s
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
        """Returns the seconds until a backend takes this request, after the requests that already wait for it."""
        claims = list(self._claims.get(view.backend, {}).items())
        before = next((index for index, (name, _) in enumerate(claims) if name == request.id), len(claims))
        if view.has_room(ceiling):
            prompts_s = sum([prefill_s for _, prefill_s in claims[:before]])
            until_s = self._backend_load(view.backend).rationed_until(self._rates, request.band, ceiling, now)
            return until_s - now + prompts_s
        waiting = max(0, view.load - min(view.limit, view.slots(ceiling))) + before + 1
        return waiting * answer_s / max(1, view.load)

    def _open(
        self, request: Request, views: Sequence[View], room: list[bool], ceiling: float, now: float
    ) -> list[bool]:
        """Returns for each backend whether it has `room` and, unless the prompt is fetched, takes the prompt now."""
        return room if request.stage is DECODE else self._takes_prompts(views, room, request.band, ceiling, now)

    def _takes_prompts(
        self, views: Sequence[View], room: list[bool], band: int, ceiling: float, now: float
    ) -> list[bool]:
        """Returns for each backend whether it has `room` and takes one more prompt of `band` now."""
        if now != self._claims_at_s:
            self._claims_at_s = now
            self._claims.clear()
            self._opens_s = inf
        fits = []
        for view, has in zip(views, room, strict=True):
            fit = has
            # A probe must be sent even if the backend is closed to prompts.
            backend_load = self._backend_loads.get(view.backend) if fit and not view.probed else None
            if backend_load is not None and (backend_load.unstarted or backend_load.rationing):
                opens_s = backend_load.opens_at(self._rates, band, ceiling, view.prompt_window_s, now)
                if opens_s > now:
                    fit = False
                    self._opens_s = min(self._opens_s, opens_s)
            fits.append(fit)
        return fits

    def ready(self, views: Sequence[View], band: int, ceiling: float, now: float) -> list[View]:
        fits = self._takes_prompts(views, rooms(views, ceiling), band, ceiling, now)
        return [view for view, fit in zip(views, fits, strict=True) if fit]

    def changes_at(self, now: float) -> float | None:
        return self._opens_s if now < self._opens_s < inf else None

    def work_s(self, requests: int, prompt_tokens: int, output_tokens: int, views: Sequence[View]) -> float | None:
        able = [(self._backend_load(view.backend), view.limit) for view in views if view.available]
        if not able or not self._rates.prefill.seen:
            return None
        speeds = [(one.prefill.factor, one.step.factor, limit) for one, limit in able]
        return self._rates.work_s(requests, prompt_tokens * (1.0 - self._hit_ratio), output_tokens, speeds)

    # --- events ------------------------------------------------------------------------------------------------------

    def booked(self, lease: int, request: Request, placed: Placed, now: float) -> None:
        fetched_tokens = 0
        if request.stage is DECODE:
            matched = self._index.match(request.prefix).get(placed.backend, 0) * request.prefix_tokens
            fetched_tokens = max(0, request.prompt_tokens - round(matched))
        own_tokens = request.prompt_tokens - placed.cached_tokens
        assert placed.ttft is not None, "another placement chose it"
        assert placed.tpot is not None, "another placement chose it"
        backend_load = self._backend_loads.get(placed.backend) or self._backend_load(placed.backend)
        flight = InFlight(
            request,
            placed.backend,
            backend_load,
            now,
            own_tokens,
            placed.cached_tokens,
            placed.cold_adapter,
            placed.ttft.expected_s,
            placed.tpot.expected_s,
            request.stage is DECODE,
            fetched_tokens=fetched_tokens,
        )
        self._flights[lease] = flight
        for claims in self._claims.values():
            # A request that is ahead of lower bands may switch to another backend while waiting; drop its old claim.
            claims.pop(request.id, None)
        if request.adapter is not None:
            self._demand.add(request.adapter, now)
        backend_load.book(lease, flight, self._rates, now)
        if not flight.fetched:
            self._hit_ratio += HIT_GAIN * (placed.cached_tokens / request.prompt_tokens - self._hit_ratio)

    def recomputing(self, lease: int) -> None:
        self._flights[lease].fetched_tokens = None

    def started(self, lease: int, now: float) -> None:
        flight = self._flights[lease]
        if flight.started_s is not None:
            return
        flight.started_s = now
        backend_load = flight.backend_load
        backend_load.start(lease, flight, self._rates, now)
        if flight.request.stream:
            flight.begun_at_work_s = backend_load.worked_s
        fetched_tokens = flight.fetched_tokens
        if flight.request.stream and fetched_tokens is not None:
            self._rates.late_ttft.learn(flight.ttft_s, now - flight.booked_s)
            if flight.fetched and not flight.cold_adapter and not flight.crowded:
                # The time includes prompts that the backend computed meanwhile, because the next transfer will wait
                # for prompts too. `crowded` excludes waits for the end of another answer.
                self._rates.transfer.learn(fetched_tokens, now - flight.booked_s)
        # The first byte proves that the prompt was computed. If the process has been replaced since, nothing is cached.
        if self._backend_loads.get(flight.backend) is backend_load:
            self._index.record(flight.backend, flight.request.prefix)

    def finished(self, lease: int, verdict: Verdict, usage: Usage | None, now: float) -> None:
        flight = self._flights.pop(lease)
        backend_load = flight.backend_load
        backend_load.finish(lease, flight, now)
        if verdict is not Verdict.SERVED or usage is None:
            return
        if usage.cached_tokens is not None and not flight.fetched:
            self._index.calibrate(flight.backend, flight.cached_tokens, usage.cached_tokens)
        steps = usage.output_tokens / flight.request.sequences - 1.0
        if flight.request.stream and flight.started_s is not None and steps > 0.0:
            took_s = now - flight.started_s
            tpot_s = took_s / steps
            prompts_s = min(backend_load.worked_s - flight.begun_at_work_s, PROMPTS_MOST * took_s)
            decode_s = (took_s - prompts_s) / steps
            self._rates.streamed(backend_load.step, backend_load.in_flight, tpot_s, decode_s)
            self._rates.late_tpot.learn(flight.tpot_s, tpot_s)
        elif not flight.request.stream:
            backend_load.answered(flight, usage, self._rates, now)

    def cached(self, backend: str, hashes: Sequence[int]) -> None:
        self._index.record(backend, hashes)

    def lost(self, backend: str) -> None:
        self._index.forget(backend)
        # Requests in flight keep the old `BackendLoad` until they end.
        self._backend_loads.pop(backend, None)

    def explained(self) -> Sequence[Explained]:
        return tuple(Explained(*facts, tuple(row.price() for row in rows)) for facts, rows in self._explained)

    def learned(self, backends: Iterable[str], now: float) -> Learned:
        rates = self._rates
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
        backend_load, index = self._backend_load(backend), self._index
        backend_load.renew(self._rates, now)
        return BackendPace(
            backend,
            backend_load.prefill.factor,
            backend_load.step.factor,
            backend_load.busy_share.at(now),
            backend_load.in_flight,
            index.size(backend),
            index.limit(backend),
        )

    def _backend_load(self, backend: str) -> BackendLoad:
        backend_load = self._backend_loads.get(backend)
        if backend_load is None:
            backend_load = self._backend_loads[backend] = BackendLoad()
        return backend_load
