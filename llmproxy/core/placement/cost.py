"""The cost placement: the backend on which a request adds the fewest seconds, for itself and for other requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import inf
from random import Random

from llmproxy.core.backends.view import View, rooms
from llmproxy.core.domain import (
    DECODE,
    PREFILL,
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
from llmproxy.core.placement.backend_load import InFlight
from llmproxy.core.placement.policy import (
    NO_CAPACITY,
    NO_MATCH,
    NO_MATCH_FOR_MODEL,
    Placement,
    Quote,
    presets,
    with_context,
)
from llmproxy.core.placement.pool_model import STREAM, PoolModel
from llmproxy.core.placement.prefix_index import PrefixIndex
from llmproxy.core.placement.price import NAMES, PriceRow, with_headroom
from llmproxy.core.placement.rates import PROMPTS_MOST
from llmproxy.core.queueing.claims import Claims

TIE_S = 0.005  # Prices this close count as equal, because no estimate is more exact. Then the least load decides.
HIT_GAIN = 0.02  # Weight of the newest request in the hit ratio, which reflects about the last fifty.
EXPLAINED_MAX = 100  # Number of past choices whose candidate prices are kept for the debug pages.


@presets.register("cost", prefixes=True, answers=True)
class CostPlacement(Placement):
    """Takes the backend with the least cost in seconds, for the request itself and for the requests that it delays.

    The terms are:

    - `queue`: until the backend has computed its earlier prompts; longer if the oldest of them is overdue.
    - `prefill`: to compute the uncached part of the prompt.
    - `adapter`: to load an adapter, or to wait for an adapter slot.
    - `slot`: until a full backend has a free slot, or objectives no longer ration its prompts.
    - `stream`: for the rest of the answer, weighted by `STREAM`.
    - `harm`: the slowdown of the streams on the backend, weighted by `STREAM`, and the delay of later requests, which
      grows with the share of time that the backend spends on prompts.
    - `eviction`: to recompute the cached blocks that this prompt evicts from a full cache, at the pool's hit ratio, and
      to load an evicted adapter again.
    - `memory`: for the KV cache space of the prompt during the answer, except blocks shared with other requests; grows
      as the cache fills.
    - `transfer`: to fetch a prompt that another backend computed. Replaces `prefill`.
    - `range`: a penalty if the prompt's length is outside the backend's `prompt_range`.
    - `headroom`: for time that the backend would leave unused under the request's objective (`with_headroom`).

    A backend is closed to prompts while it has enough prompts, or while prompts take more of its time than the
    objectives of its streams allow (`BackendLoad.opens_at`). If a full or closed backend is the cheapest, the request
    waits for it, at most about as long as that backend saves. Later requests may take free slots elsewhere. Speeds are
    learned for the pool, and for each backend relative to the pool.
    """

    def __init__(self, rng: Random, index: PrefixIndex | None = None, without: frozenset[str] = frozenset()) -> None:
        """`without`: names of terms to leave out, for measurements. `objectives` means the term `headroom`."""
        self._rng = rng
        self._without = without
        self._model = model = PoolModel(index or PrefixIndex(), without)
        self._index, self._rates, self._backend_loads = model.index, model.rates, model.loads
        self._flights: dict[int, InFlight] = {}
        self._explained: deque[tuple[tuple[str, str, str, float, int, str], list[PriceRow]]] = deque(
            maxlen=EXPLAINED_MAX
        )
        # The earliest time at which a closed backend opens, as seen at `_seen_s`: `changes_at` returns it, so that the
        # scheduler runs again.
        self._opens_s = inf
        self._seen_s = -1.0

    def watch(self, claims: Claims) -> None:
        self._model.claims = claims

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
            if price.total_s < least_s:
                least_s = price.total_s
        near, fitting = [], []
        for index, price in enumerate(prices):
            if price.total_s <= least_s + TIE_S:
                near.append(index)
                if fits[index]:
                    fitting.append(index)
        fitting = fitting or self._idle(able, fits, prices, least_s)
        if not fitting:
            cheapest = prices[near[0]]
            prefill_s = cheapest.seconds[NAMES.index("prefill")] or 0.0
            return NoMatch(whole_model=False, later=cheapest.backend, prefill_s=prefill_s)
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
        serving, fits, model = [], [], request.model
        for view, has in zip(views, room, strict=True):
            if view.available and model in view.served and view.backend not in excluded:
                serving.append(view)
                fits.append(has)
        able = with_context(request, serving, views, excluded)
        if able is not serving:
            fits = rooms(able, ceiling)
        # A decode stage has no prompt to compute.
        band = None if request.stage is DECODE else request.band
        fits = self._takes_prompts(able, fits, band, ceiling, now)
        if True not in fits and not (waits and able):
            if True in self._takes_prompts(serving, rooms(serving, ceiling), band, ceiling, now):
                return NO_MATCH
            return NO_MATCH_FOR_MODEL if True in self._takes_prompts(views, room, band, ceiling, now) else NO_CAPACITY
        if request.stage is DECODE:
            # The blocks in the prefill engine expire, so the decode stage considers only backends with room.
            able = [view for view, fit in zip(able, fits, strict=True) if fit]
            fits = [True] * len(able)
        return able, fits, self._model.prices(request, able, fits, ceiling, now)

    def _idle(
        self, able: Sequence[View], fits: Sequence[bool], prices: Sequence[PriceRow], least_s: float
    ) -> list[int]:
        """Returns the index of the idle backend with the least price without `harm`, if that is at most `least_s`.

        Waiting for another backend while this one is idle would serve no request sooner.
        """
        harm = NAMES.index("harm")
        idle = [
            (price.total_s - (price.seconds[harm] or 0.0), index)
            for index, (view, price) in enumerate(zip(able, prices, strict=True))
            if fits[index] and not view.load
        ]
        return [index for total_s, index in sorted(idle)[:1] if total_s <= least_s]

    def _takes_prompts(
        self, views: Sequence[View], room: list[bool], band: int | None, ceiling: float, now: float
    ) -> list[bool]:
        """Returns for each backend whether it has room and takes another prompt of `band`.

        `room` says for each of `views` whether it has a free slot. If `band` is None, there is no prompt to compute,
        and `room` is returned.
        """
        if band is None:
            return room
        if now != self._seen_s:
            self._seen_s, self._opens_s = now, inf
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
        able = [(self._model.load_of(view.backend), view.limit) for view in views if view.available]
        if not able or not self._rates.prefill.seen:
            return None
        speeds = [(one.prefill.factor, one.step.factor, limit) for one, limit in able]
        return self._rates.work_s(requests, prompt_tokens * (1.0 - self._model.hit_ratio), output_tokens, speeds)

    # --- events ------------------------------------------------------------------------------------------------------

    def booked(self, lease: int, request: Request, placed: Placed, now: float) -> None:
        fetched_tokens = 0
        if request.stage is DECODE:
            matched = self._index.match(request.prefix).get(placed.backend, 0) * request.prefix_tokens
            fetched_tokens = max(0, request.prompt_tokens - round(matched))
        own_tokens = request.prompt_tokens - placed.cached_tokens
        assert placed.ttft is not None, "another placement chose it"
        assert placed.tpot is not None, "another placement chose it"
        backend_load = self._backend_loads.get(placed.backend) or self._model.load_of(placed.backend)
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
        if request.adapter is not None:
            self._model.demand.add(request.adapter, now)
        backend_load.book(lease, flight, self._rates, now)
        if not flight.fetched:
            self._model.hit_ratio += HIT_GAIN * (placed.cached_tokens / request.prompt_tokens - self._model.hit_ratio)

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

    def learned(self, backends: Iterable[str], now: float) -> Learned:
        return self._model.learned(backends, now)

    def explained(self) -> Sequence[Explained]:
        return tuple(Explained(*facts, tuple(row.price() for row in rows)) for facts, rows in self._explained)
