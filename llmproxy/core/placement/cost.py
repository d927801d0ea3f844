"""Where, priced in seconds: the backend on which a request costs everybody the least time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from llmproxy.core.capacity import slots_under
from llmproxy.core.domain import NoCapacity, NoMatch, Placed, Request, Usage, Verdict
from llmproxy.core.fleet import View
from llmproxy.core.placement.policy import NO_CAPACITY, NO_MATCH, NO_MATCH_FOR_MODEL, presets, with_context
from llmproxy.core.placement.rates import TRUSTED_FROM, Rates
from llmproxy.core.prefix import PrefixIndex

LATER = NoMatch(whole_model=False, later=True)
TIE_S = 0.005
"""Prices this close are equal, as no estimate is better than that; the least loaded of the equals is taken."""
GAIN = 0.02
"""Of means over all requests of the pool: the last fifty decide."""
CONGESTED = 0.95
"""Use of a backend beyond which its time gets no dearer: at 1 it would have no price."""
NEVER_S = 3600.0
"""The wait for a slot of a backend that was never seen to release one."""


@dataclass(slots=True)
class _Flight:
    """A lease, and what was expected of it when it was booked.

    `tokens` are to be computed before its first token, those ahead of it included, `own_tokens` of them are its own.
    """

    request: Request
    backend: str
    booked_s: float
    tokens: float
    own_tokens: float
    cached_tokens: float
    cold_adapter: bool
    due_s: float
    started_s: float | None = None


@dataclass(slots=True)
class _Known:
    """What is known of one backend beside its view."""

    rates: Rates = field(default_factory=Rates)
    unstarted: dict[int, _Flight] = field(default_factory=dict)
    to_prefill_tokens: float = 0.0
    spoke_s: float = 0.0
    adapters: Counter[str] = field(default_factory=Counter)
    kv_tokens: int = 0
    in_flight: int = 0


@dataclass(frozen=True, slots=True)
class _Price:
    """Seconds that a request costs on one backend; `terms` add up to it."""

    view: View
    terms: tuple[tuple[str, float], ...]
    cached_tokens: float
    total_s: float
    fits: bool


@presets.register("cost")
class CostPlacement:
    """Least cost in seconds, of the request itself and of those whom it keeps waiting; the terms:

    `queue`: until the backend has computed the prompts that it was given before, more where one of them is overdue.
    `prefill`: the part of the prompt that it has not cached. `eviction`: what that displaces, at the pool's hit ratio.
    `adapter`: loading one that is not resident, or waiting for a slot of one. `harm`: the delay of others, by what is
    computed, dearer the fuller the backend, and by one sequence more in its batch. `memory`: KV-cache taken for as long
    as a request is held, dearer the fuller it is. `slot`: until a backend that is full releases one.

    A backend that is full may thus be the cheapest. Then the request waits for it, while others may take the room that
    there is; those that wait for the same backend before it count. Rates are learned online, per backend, and taken
    from the pool until a backend has shown its own.
    """

    def __init__(self, rng: Random, index: PrefixIndex | None = None) -> None:
        self._rng = rng
        self._index = index or PrefixIndex()
        self._pool = Rates()
        self._known: dict[str, _Known] = {}
        self._flights: dict[int, _Flight] = {}
        self._hit_ratio = 0.0
        self._held_s = 10.0
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
        lightest = min(price.view.saturation for price in fitting)
        chosen = self._rng.choice([price for price in fitting if price.view.saturation == lightest])
        return Placed(chosen.view.backend, chosen.total_s, chosen.terms, len(able), round(chosen.cached_tokens))

    def _matched(self, request: Request, able: Sequence[View]) -> dict[str, int]:
        """Blocks of the prompt by backend, from an index as large as each one's cache."""
        if not request.prefix:
            return {}
        for view in able:
            known = self._known_of(view.backend)
            if view.kv_tokens and view.kv_tokens != known.kv_tokens:
                known.kv_tokens = view.kv_tokens
                self._index.resize(view.backend, int(view.kv_tokens / request.prefix_tokens))
        return self._index.match(request.prefix)

    def _price(self, request: Request, view: View, ceiling: float, blocks: int, now: float) -> _Price:
        known = self._known_of(view.backend)
        rates = self._rates_of(known)
        cached_tokens = min(blocks * request.prefix_tokens, request.prompt_tokens - 1.0)
        new_tokens = request.prompt_tokens - cached_tokens
        prefill_s = new_tokens * rates.first.slope
        used = min(CONGESTED, max(view.saturation, view.kv_used / view.kv_full))
        terms = [
            ("queue", self._queue_s(known, rates, now)),
            ("prefill", prefill_s),
            ("eviction", prefill_s * self._hit_ratio),
            ("harm", view.load * rates.step.slope + prefill_s * used / (1.0 - used)),
        ]
        if request.adapter is not None and request.adapter not in known.adapters:
            if view.max_adapters is not None and len(known.adapters) >= view.max_adapters:
                # Every slot serves somebody: it waits inside the engine until one of them has nobody left.
                terms.append(("adapter", self._held_s))
            elif request.adapter not in view.resident:
                terms.append(("adapter", rates.adapter_s))
        if view.kv_tokens:
            filled = min(CONGESTED, view.kv_used)
            terms.append(("memory", self._held_s * new_tokens / view.kv_tokens * filled / (1.0 - filled)))
        fits = view.has_room(ceiling)
        if not fits:
            slots = min(view.limit, slots_under(view.limit, ceiling, view.look_ahead))
            claims = self._claims.get(view.backend, {})
            waiting = max(0, view.load - slots) + claims.get(request.id, len(claims)) + 1
            release_s = known.rates.next_release_s(now)
            terms.append(("slot", NEVER_S if release_s is None else waiting * release_s))
        return _Price(view, tuple(terms), cached_tokens, sum(seconds for _, seconds in terms), fits)

    def _queue_s(self, known: _Known, rates: Rates, now: float) -> float:
        while (lease := next(iter(known.unstarted), None)) is not None:
            oldest = known.unstarted[lease]
            if oldest.request.stream or now < oldest.due_s:
                break
            # Without a stream there is no byte before the end; by now it is taken to be running.
            self._settle(lease, oldest)
        queue_s = rates.first.at(0.0) + known.to_prefill_tokens * rates.first.slope
        if lease is not None:
            # A part of the oldest is done by now; and what should have begun long ago says more of this backend than
            # all that it did before.
            queue_s -= min(now - max(oldest.booked_s, known.spoke_s), oldest.own_tokens * rates.first.slope)
            queue_s += max(0.0, now - oldest.due_s)
        return queue_s

    # --- what became of choices --------------------------------------------------------------------------------------

    def booked(self, lease: int, request: Request, placed: Placed, now: float) -> None:
        known = self._known_of(placed.backend)
        own_tokens = request.prompt_tokens - placed.cached_tokens
        known.to_prefill_tokens += own_tokens
        known.in_flight += request.sequences
        if request.adapter is not None:
            known.adapters[request.adapter] += 1
        tokens = known.to_prefill_tokens
        self._flights[lease] = known.unstarted[lease] = _Flight(
            request,
            placed.backend,
            booked_s=now,
            tokens=tokens,
            own_tokens=own_tokens,
            cached_tokens=placed.cached_tokens,
            cold_adapter=any(name == "adapter" for name, _ in placed.terms),
            due_s=now + 2.0 * self._rates_of(known).first.at(tokens),
        )
        self._hit_ratio += GAIN * (placed.cached_tokens / request.prompt_tokens - self._hit_ratio)

    def started(self, lease: int, now: float) -> None:
        flight = self._flights[lease]
        if flight.started_s is not None:
            return
        flight.started_s = now
        self._settle(lease, flight)
        known = self._known_of(flight.backend)
        known.spoke_s = now
        # Only now is it sure that the prompt was computed, and where.
        self._index.record(flight.backend, flight.request.prefix)
        if flight.request.stream:
            for rates in (known.rates, self._pool):
                rates.started(flight.tokens, now - flight.booked_s, flight.cold_adapter)

    def finished(self, lease: int, verdict: Verdict, usage: Usage | None, now: float) -> None:
        flight = self._flights.pop(lease)
        self._settle(lease, flight)
        known = self._known_of(flight.backend)
        known.in_flight -= flight.request.sequences
        if flight.request.adapter is not None:
            known.adapters[flight.request.adapter] -= 1
            if not known.adapters[flight.request.adapter]:
                del known.adapters[flight.request.adapter]
        known.rates.released(now, idle=known.in_flight == 0)
        if verdict is not Verdict.SERVED or usage is None:
            return
        self._held_s += GAIN * (now - flight.booked_s - self._held_s)
        if usage.cached_tokens is not None:
            self._index.calibrate(flight.backend, flight.cached_tokens, usage.cached_tokens)
        steps = usage.output_tokens / flight.request.sequences - 1.0
        if flight.request.stream and flight.started_s is not None and steps > 0.0:
            per_token_s = (now - flight.started_s) / steps
            for rates in (known.rates, self._pool):
                rates.streamed(known.in_flight, per_token_s)

    def lost(self, backend: str) -> None:
        self._index.forget(backend)
        # The index forgets its capacity too, which has to be told again.
        self._known_of(backend).kv_tokens = 0

    def _settle(self, lease: int, flight: _Flight) -> None:
        known = self._known_of(flight.backend)
        if known.unstarted.pop(lease, None) is not None:
            known.to_prefill_tokens -= flight.own_tokens

    def _known_of(self, backend: str) -> _Known:
        known = self._known.get(backend)
        if known is None:
            known = self._known[backend] = _Known()
        return known

    def _rates_of(self, known: _Known) -> Rates:
        return known.rates if known.rates.seen >= TRUSTED_FROM else self._pool
