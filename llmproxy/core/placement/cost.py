"""Where, priced in seconds: the backend on which a request costs everybody the least time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from llmproxy.core.capacity import slots_under
from llmproxy.core.domain import NoCapacity, NoMatch, Placed, Request, Usage, Verdict
from llmproxy.core.fleet import View
from llmproxy.core.placement.policy import NO_CAPACITY, NO_MATCH, NO_MATCH_FOR_MODEL, presets, with_context
from llmproxy.core.placement.rates import Rates
from llmproxy.core.placement.station import Flight, Station
from llmproxy.core.prefix import PrefixIndex

LATER = NoMatch(whole_model=False, later=True)
TIE_S = 0.005
"""Prices this close are equal, as no estimate is better than that; the least loaded of the equals is taken."""
STREAM = 0.1
"""What a second of a stream is worth against one before its first token: a reader who waits for the first word has
nothing, one who reads a little slower has almost all."""
HIT_GAIN = 0.02
"""Of the pool's hit ratio: the last fifty requests decide."""
CONGESTED = 0.95
"""Use of a resource beyond which its time gets no dearer: at 1 it would have no price."""


@dataclass(frozen=True, slots=True)
class _Price:
    """Seconds that a request costs on one backend; `terms` add up to it."""

    view: View
    terms: tuple[tuple[str, float], ...]
    cached_tokens: float
    total_s: float
    fits: bool


def _scarce(used: float) -> float:
    """How often others wait for what is taken of a resource that is `used` (0..1): the mean queue of M/M/1."""
    used = min(CONGESTED, used)
    return used / (1.0 - used)


@presets.register("cost", prefixes=True)
class CostPlacement:
    """Least cost in seconds, of the request itself and of those whom it keeps waiting; the terms:

    `queue`: until the backend has computed the prompts that it was given before, more where one of them is overdue.
    `prefill`: the part of the prompt that it has not cached. `adapter`: loading one that is not resident, or waiting
    for a slot of one. `slot`: until a backend that is full releases one. `stream`: what its answer takes there and how
    much longer the streams beside it take, a second of a stream counting as `STREAM`. `harm`: the delay of those that
    come later, dearer the more of its time the backend spends on prompts. `eviction`: what the computed part displaces
    in its cache, which would have been hit as often as prompts are now. `memory`: KV-cache taken for as long as the
    answer lasts, where requests in flight do not hold the same blocks anyway; dearer the fuller it is.

    A backend that is full may thus be the cheapest. Then the request waits for it, while others may take the room that
    there is; those that wait for the same backend before it count. Rates are learned online: the pool's, and how much
    faster or slower each backend is.
    """

    def __init__(self, rng: Random, index: PrefixIndex | None = None) -> None:
        self._rng = rng
        self._index = index or PrefixIndex()
        self._rates = Rates()
        self._stations: dict[str, Station] = {}
        self._flights: dict[int, Flight] = {}
        self._hit_ratio = 0.0
        self._claims: dict[str, dict[str, int]] = {}
        self._claims_at_s = -1.0

    # --- the choice --------------------------------------------------------------------------------------------------

    def place(
        self, request: Request, views: Sequence[View], ceiling: float, excluded: frozenset[str], now: float
    ) -> Placed | NoCapacity | NoMatch:
        if not any(view.has_room(ceiling) for view in views):
            return NO_CAPACITY
        able = [v for v in views if v.available and request.model in v.served and v.backend not in excluded]
        if not any(view.has_room(ceiling) for view in able):
            return NO_MATCH_FOR_MODEL
        able = with_context(request, able, [view for view in views if view.backend not in excluded])
        if not any(view.has_room(ceiling) for view in able):
            return NO_MATCH
        if now != self._claims_at_s:
            self._claims_at_s = now
            self._claims.clear()
        matched = self._matched(request, able)
        prices = [self._price(request, view, ceiling, matched.get(view.backend, 0), now) for view in able]
        least_s = min(price.total_s for price in prices)
        near = [price for price in prices if price.total_s <= least_s + TIE_S]
        fitting = [price for price in near if price.fits]
        if not fitting:
            for price in near:
                # A pass may ask for one request again and again; it keeps its place among those that wait.
                claims = self._claims.setdefault(price.view.backend, {})
                claims.setdefault(request.id, len(claims))
            return LATER
        lightest = min(price.view.load for price in fitting)
        chosen = self._rng.choice([price for price in fitting if price.view.load == lightest])
        return Placed(chosen.view.backend, chosen.total_s, chosen.terms, len(able), round(chosen.cached_tokens))

    def _matched(self, request: Request, able: Sequence[View]) -> dict[str, int]:
        """Blocks of the prompt by backend, from an index as large as each one's cache."""
        if not request.prefix:
            return {}
        for view in able:
            station = self._station(view.backend)
            if view.kv_tokens and view.kv_tokens != station.kv_tokens:
                station.kv_tokens = view.kv_tokens
                self._index.resize(view.backend, int(view.kv_tokens / request.prefix_tokens))
        return self._index.match(request.prefix)

    def _price(self, request: Request, view: View, ceiling: float, blocks: int, now: float) -> _Price:
        station, rates = self._station(view.backend), self._rates
        cached_tokens = min(blocks * request.prefix_tokens, request.prompt_tokens - 1.0)
        prefill_s = (request.prompt_tokens - cached_tokens) * rates.prefill.slope * station.prefill.factor
        step_s = rates.step.at(view.load) * station.step.factor
        crowd_s = rates.step.slope * station.step.factor * view.load
        answer_s = request.output_tokens * step_s
        terms = [
            ("queue", station.queue_s(rates, now)),
            ("prefill", prefill_s),
            ("stream", STREAM * (answer_s + request.output_tokens * crowd_s + view.load * prefill_s)),
            ("harm", prefill_s * _scarce(station.busy_share(now))),
            ("eviction", prefill_s * _scarce(self._hit_ratio)),
        ]
        if request.adapter is not None and request.adapter not in station.adapters:
            if view.max_adapters is not None and len(station.adapters) >= view.max_adapters:
                # Every slot serves somebody: it waits inside the engine until one of them has nobody left.
                terms.append(("adapter", answer_s))
            elif request.adapter not in view.resident:
                terms.append(("adapter", rates.adapter_s))
        if view.kv_tokens:
            taken_tokens = request.prompt_tokens - station.in_use.matched(request.prefix) * request.prefix_tokens
            terms.append(("memory", answer_s * taken_tokens / view.kv_tokens * _scarce(view.kv_used)))
        fits = view.has_room(ceiling)
        if not fits:
            slots = min(view.limit, slots_under(view.limit, ceiling, view.look_ahead))
            claims = self._claims.get(view.backend, {})
            waiting = max(0, view.load - slots) + claims.get(request.id, len(claims)) + 1
            terms.append(("slot", waiting * answer_s / max(1, view.load)))
        return _Price(view, tuple(terms), cached_tokens, sum(seconds for _, seconds in terms), fits)

    # --- what became of choices --------------------------------------------------------------------------------------

    def booked(self, lease: int, request: Request, placed: Placed, now: float) -> None:
        cold_adapter = any(name == "adapter" for name, _ in placed.terms)
        own_tokens = request.prompt_tokens - placed.cached_tokens
        flight = Flight(request, placed.backend, now, own_tokens, placed.cached_tokens, cold_adapter, due_s=now)
        self._flights[lease] = flight
        self._station(placed.backend).book(lease, flight, self._rates, now)
        self._hit_ratio += HIT_GAIN * (placed.cached_tokens / request.prompt_tokens - self._hit_ratio)

    def started(self, lease: int, now: float) -> None:
        flight = self._flights[lease]
        if flight.started_s is not None:
            return
        flight.started_s = now
        self._station(flight.backend).start(lease, flight, self._rates, now)
        # Only now is it sure that the prompt was computed, and where.
        self._index.record(flight.backend, flight.request.prefix)

    def finished(self, lease: int, verdict: Verdict, usage: Usage | None, now: float) -> None:
        flight = self._flights.pop(lease)
        station = self._station(flight.backend)
        station.finish(lease, flight)
        if verdict is not Verdict.SERVED or usage is None:
            return
        if usage.cached_tokens is not None:
            self._index.calibrate(flight.backend, flight.cached_tokens, usage.cached_tokens)
        steps = usage.output_tokens / flight.request.sequences - 1.0
        if flight.request.stream and flight.started_s is not None and steps > 0.0:
            self._rates.streamed(station.step, station.in_flight, (now - flight.started_s) / steps)

    def lost(self, backend: str) -> None:
        self._index.forget(backend)
        # The index forgets its capacity too, which has to be told again.
        self._station(backend).kv_tokens = 0

    def _station(self, backend: str) -> Station:
        station = self._stations.get(backend)
        if station is None:
            station = self._stations[backend] = Station()
        return station
