"""What the cost placement knows of one backend beside its view: its speed, and the prompts that it still computes."""

from __future__ import annotations

from math import exp, log

from msgspec import Struct

from llmproxy.core.domain import Request, Usage
from llmproxy.core.estimates.learning import DecayingRate
from llmproxy.core.placement.adapter_demand import Slots
from llmproxy.core.placement.prefix_index import InUse
from llmproxy.core.placement.rates import PoolRates, SpeedFactor

WORK_S = 30.0
"""Window of the share of time that a backend spends on prompts, for the delay of later requests."""

RATION_S = 10.0
"""The same for the bound that the objectives of streams set: about as long as an answer."""
ROUNDING_S = 1e-6
"""A shorter wait is rounding: who comes back at the time that was named must find the backend open."""
MARGIN = 0.9
"""Streams are kept to this part of their objective, because some are slower than the mean."""
SHARE_MIN = 0.05
"""Prompts may always have this share of a backend's time, or nothing would be begun where decoding alone is slow."""
TPOT_MAX_S = 10.0
"""An objective counts as at most this: none beyond can be missed."""
SAME_STEP_S = 0.003
"""First bytes this close come from one engine step, which computed all their prompts."""
WHOLE_EVERY_S = 0.02
"""An answer in one piece that ends sooner after the last one teaches nothing: fifty a second are enough."""
TOGETHER_S = 0.05
"""An idle engine begins requests that come this close in one step."""
STRETCH_PROMPTS = 16
"""On a backend that always has prompts, what so many took is learned as one time. One step computes the end of a prompt
and the beginning of the next, so the time from one first byte to the next belongs to neither."""
WINDOW_STEP_S = 0.01
"""A window counts as kept while it is exceeded by less, so that the same backend is not looked at again at once."""
OVERDUE = 2.0
"""A prompt without a byte is overdue after so many times its expected time."""


class InFlight(Struct, eq=False):
    """A lease, and what was predicted when it was booked.

    `own_tokens` of its prompt were to be computed; `work_tokens` are the same, weighted by attention, which with its
    adapter takes `work_s`. The first token was expected after `ttft_s`, each later one after `tpot_s`. From `due_s` on
    the first byte is overdue. `crowded`: the batch was full, so the prompt had to wait for another request to end.
    `deferred`: all adapter slots were in use, so later requests may be computed first. `begun_at_work_s` is the
    backend's `worked_s` when the first token came. `rations_at` is the objective of its stream, in tokens per second;
    0 where it has none that could be kept. `fetched`: another backend computes the prompt. `fetched_tokens` of it come
    from there; None where they were to come and did not, so that its time says nothing of what was predicted. An answer
    in one piece got its place in the batch at `began_s`, None while it waits for one. Then `begun_at_work_s` was noted,
    and `ahead_tokens`, the weighted tokens of the prompts up to its own.
    """

    request: Request
    backend: str
    backend_load: BackendLoad
    booked_s: float
    own_tokens: float
    cached_tokens: float
    cold_adapter: bool
    ttft_s: float
    tpot_s: float
    fetched: bool
    deferred: bool = False
    crowded: bool = False
    work_tokens: float = 0.0
    work_s: float = 0.0
    due_s: float = 0.0
    started_s: float | None = None
    begun_at_work_s: float = 0.0
    rations_at: float = 0.0
    fetched_tokens: int | None = 0
    began_s: float | None = None
    ahead_tokens: float = 0.0

    @property
    def attended(self) -> float:
        """How many earlier tokens its own ones attend to, in all."""
        return self.own_tokens * (self.cached_tokens + 0.5 * self.own_tokens)


class BackendLoad:
    """One backend. `prefill` and `step` are its speed beside its pool.

    `adapters` and `in_use` are the adapters and blocks of the requests in flight. `kv_tokens` is the cache size that
    the prefix index was given. `limit` is the batch limit, None where unknown. `worked_s` are the seconds that went
    into prompts and adapter loads, and `busy_share` is the share of its time that lately was given to them, above 1 if
    that was more than it can do.
    """

    def __init__(self) -> None:
        self.prefill = SpeedFactor()
        self.step = SpeedFactor()
        self.adapters = Slots()
        self.in_use = InUse()
        self.kv_tokens = 0
        self.limit: int | None = None
        self.busy_share = DecayingRate(WORK_S)
        self._prompts = DecayingRate(RATION_S)
        self.worked_s = 0.0
        self.in_flight = 0
        self._learns_at_s = 0.0
        self._rationing: dict[int, tuple[int, float]] = {}
        self._unstarted: dict[int, InFlight] = {}
        self._queued: dict[int, InFlight] = {}
        self._plain = 0
        self._to_prefill_tokens = 0.0
        self._loading: dict[int, int] = {}
        self._spoke_s = -1.0
        self._began_s = 0.0
        self._begun = 0
        self._tokens = self._attended = 0.0
        self._loads: list[int] = []
        self._known = True
        self._mixed = False

    def answered(self, flight: InFlight, usage: Usage, rates: PoolRates, now: float) -> None:
        """Learn from an answer in one piece, unless it waited for an adapter or for an unknown time."""
        steps = usage.output_tokens / flight.request.sequences
        if flight.began_s is None or flight.deferred or flight.cold_adapter or steps < 1.0 or now < self._learns_at_s:
            return
        self._learns_at_s = now + WHOLE_EVERY_S
        tokens = flight.ahead_tokens
        others_s = self.worked_s - flight.begun_at_work_s - tokens * rates.prefill.slope * self.prefill.factor
        if usage.cached_tokens is not None:
            tokens = max(0.0, tokens + flight.cached_tokens - usage.cached_tokens)
        took_s = (flight.started_s or now) - flight.began_s
        rates.answered(self.prefill, self.step, tokens, steps, self.in_flight, took_s, max(0.0, others_s))

    def renew(self, rates: PoolRates, now: float) -> None:
        """Update both speed factors, and learn from adapter loads that just ended."""
        if rates.prefill.seen >= self.prefill.stale_at:
            self.prefill.renew(rates.prefill)
        if rates.step.seen >= self.step.stale_at:
            self.step.renew(rates.step)
        if self._loads and now - self._spoke_s >= SAME_STEP_S:
            # Load times are needed before the next first byte: until then further loads would be begun.
            self._end_stretch(rates)

    def queue_s(self, rates: PoolRates, now: float) -> float:
        """Seconds until the backend has computed its prompts and loaded their adapters, plus the base of one prompt."""
        work_s, overdue_s = self._unfinished_s(rates, now)
        return rates.prefill.base * self.prefill.factor + work_s + overdue_s

    def _unfinished_s(self, rates: PoolRates, now: float) -> tuple[float, float]:
        """Seconds that its prompts and the loads of their adapters still take, and those that the oldest is overdue."""
        token_s = rates.prefill.slope * self.prefill.factor
        oldest = self._oldest(now) if self._unstarted else None
        work_s = self._to_prefill_tokens * token_s
        if oldest is None:
            return work_s, 0.0
        # A part of the oldest prompt is done by now. An overdue one says more of the backend than its history.
        since_s, due_s, own_s = max(oldest.booked_s, self._spoke_s), oldest.due_s, oldest.work_tokens * token_s
        if self._loading:
            # One step loads the adapters of all waiting requests.
            loads_s = sum([rates.loads.at(tier) for tier in self._loading.values()])
            work_s += loads_s
            own_s += loads_s
            due_s = max(due_s, since_s + OVERDUE * loads_s)
        done_s = now - since_s
        return work_s - (done_s if done_s < own_s else own_s), now - due_s if now > due_s else 0.0

    def opens_at(self, rates: PoolRates, band: int, ceiling: float, window_s: float | None, now: float) -> float:
        """When the backend may be given a prompt of `band` again; `now` if it may now.

        It may while it computes its prompts within `window_s`, of which the band may use so much as its `ceiling`
        (0..1] says, and while the objectives of its streams allow it. Only the first bytes of streams show what is
        computed: without any, or with other requests among them, nobody knows what the window holds.

        The base is no part of it, because a further prompt does not prolong it. Neither is what the oldest is overdue:
        one prompt that the engine does not begin would close the backend for all others.
        """
        opens_s = self.rationed_until(rates, band, ceiling, now) if self._rationing else now
        if self._unstarted and window_s is not None and rates.prefill.seen and not self._plain:
            over_s = self._unfinished_s(rates, now)[0] - ceiling * window_s
            if over_s > WINDOW_STEP_S:
                opens_s = max(opens_s, now + over_s)
        return opens_s

    def rationed_until(self, rates: PoolRates, band: int, ceiling: float, now: float) -> float:
        """When the objectives of its streams allow a prompt of `band` again; `now` if they do now.

        Where prompts have a share of the time, a stream takes its decoding time / (1 - share) for each token. So each
        objective bounds the share, and the mean of the bounds counts: that of all streams from the highest band down to
        `band`, or to one between if that is less, so that no band may have more than a higher one. Of that, the band
        may use so much as its `ceiling` (0..1] says.
        """
        share, streams, tokens_s = 1.0, 0, 0.0
        if self._rationing:
            decode_s = rates.decode.at(self.in_flight) * self.step.factor / MARGIN
            for level in sorted(self._rationing, reverse=True):
                if level < band:
                    break
                more, more_s = self._rationing[level]
                streams, tokens_s = streams + more, tokens_s + more_s
                share = min(share, 1.0 - decode_s * tokens_s / streams)
        if not streams:
            return now
        share = ceiling * max(SHARE_MIN, share)
        used = self._prompts.at(now)
        wait_s = RATION_S * log(max(used, share) / share)
        return now + wait_s if wait_s > ROUNDING_S else now

    def book(self, lease: int, flight: InFlight, rates: PoolRates, now: float) -> None:
        if flight.fetched:
            if flight.request.adapter is not None:
                self.adapters.book(flight.request.adapter, flight.cold_adapter, now)
        else:
            self._book_prompt(lease, flight, rates, now)
        self.in_flight += flight.request.sequences
        self._ration(flight, rates)
        flight.crowded = self.limit is not None and self.in_flight > self.limit
        if flight.crowded:
            self._queued[lease] = flight
        else:
            self._begin(flight, self._to_prefill_tokens, now)
        self.in_use.add(flight.request.prefix)

    def _book_prompt(self, lease: int, flight: InFlight, rates: PoolRates, now: float) -> None:
        if not self._unstarted:
            self._end_stretch(rates)
            self._began_s = now
            self._mixed = False
        request, load_s = flight.request, 0.0
        if request.adapter is not None:
            tier = self.adapters.book(request.adapter, flight.cold_adapter, now)
            flight.deferred = request.adapter in self.adapters.deferred
            if tier is not None:
                load_s = rates.loads.at(tier)
                if not flight.deferred:
                    self._loading[lease] = tier
        self._unstarted[lease] = flight
        self._plain += not request.stream
        flight.work_tokens = flight.own_tokens + rates.attention.share * flight.attended
        if not flight.deferred:
            # An engine computes no prompt that waits for an adapter slot, and the others before it.
            self._to_prefill_tokens += flight.work_tokens
        flight.due_s = now + OVERDUE * rates.prefill.at(self._to_prefill_tokens) * self.prefill.factor
        flight.work_s = flight.work_tokens * rates.prefill.slope * self.prefill.factor + load_s
        self.busy_share.add(flight.work_s, now)
        self._prompts.add(flight.work_s, now)

    def loading_s(self, now: float) -> float:
        """How long one load has been running, at least."""
        if not self._loading:
            return 0.0
        booked_s = [self._unstarted[lease].booked_s for lease in self._loading]
        since_s = max(booked_s[0], self._spoke_s)
        return (now - since_s) / sum([one <= since_s + TOGETHER_S for one in booked_s])

    @property
    def waiting(self) -> int:
        """Requests without a first byte."""
        return len(self._unstarted)

    def start(self, lease: int, flight: InFlight, rates: PoolRates, now: float) -> None:
        """The first byte came. Learn what the prompts took since the backend had one, or since they were last learned.

        Steps that load adapters are learned apart.
        """
        if flight.fetched:
            if flight.request.adapter is not None:
                self.adapters.started(flight.request.adapter)
            return
        if not flight.request.stream:
            # Without a stream the first byte comes at the end of the answer.
            self._settle(lease, flight)
            return
        for older, one in list(self._unstarted.items()):
            if older == lease:
                break
            if not one.request.stream:
                # Prompts are computed in order.
                self._settle(older, one)
        unclear, tier = self._mixed or flight.deferred or flight.crowded, self._loading.get(lease)
        self._settle(lease, flight)
        self._mixed = False
        apart = unclear or not self._known or tier is not None or self._loads
        if (apart or self._begun >= STRETCH_PROMPTS) and now - self._spoke_s >= SAME_STEP_S:
            self._end_stretch(rates)
        self._known &= not unclear
        self._spoke_s = now
        self._begun += 1
        self._tokens += flight.own_tokens
        self._attended += flight.attended
        if flight.request.adapter is not None:
            self.adapters.started(flight.request.adapter)
        if tier is not None:
            self._loads.append(tier)
            # The other prompts had to wait for the load.
            due_s = now + OVERDUE * rates.prefill.at(self._to_prefill_tokens) * self.prefill.factor
            for one in self._unstarted.values():
                one.due_s = max(one.due_s, due_s)

    def finish(self, lease: int, flight: InFlight, now: float) -> None:
        if lease in self._unstarted:
            # Its prompt was not computed, or not to the end.
            first = next(iter(self._unstarted)) == lease
            done_s = min(flight.work_s, now - max(flight.booked_s, self._spoke_s)) if first else 0.0
            self._prompts.add((done_s - flight.work_s) * exp((flight.booked_s - now) / RATION_S), now)
        self._settle(lease, flight)
        if self._queued and self._queued.pop(lease, None) is None:
            longest = self._queued.pop(next(iter(self._queued)))
            self._begin(longest, longest.work_tokens, now)
        request = flight.request
        self.in_flight -= request.sequences
        if flight.rations_at:
            streams, tokens_s = self._rationing.pop(request.band)
            if streams > 1:
                self._rationing[request.band] = streams - 1, tokens_s - flight.rations_at
        self.in_use.remove(request.prefix)
        if request.adapter is not None:
            self.adapters.release(request.adapter)

    def _begin(self, flight: InFlight, ahead_tokens: float, now: float) -> None:
        """The batch has a place for it."""
        if not (flight.request.stream or flight.fetched):
            flight.began_s, flight.ahead_tokens, flight.begun_at_work_s = now, ahead_tokens, self.worked_s

    def _ration(self, flight: InFlight, rates: PoolRates) -> None:
        """Let the objective of a stream ration prompts, unless it is missed without any."""
        slo = flight.request.slo
        if slo is None or slo.tpot_s is None or not flight.request.stream:
            return
        if MARGIN * slo.tpot_s > rates.decode.at(self.in_flight) * self.step.factor:
            flight.rations_at = 1.0 / min(TPOT_MAX_S, slo.tpot_s)
            streams, tokens_s = self._rationing.get(flight.request.band, (0, 0.0))
            self._rationing[flight.request.band] = streams + 1, tokens_s + flight.rations_at

    def _oldest(self, now: float) -> InFlight | None:
        while (lease := next((x for x, one in self._unstarted.items() if not one.deferred), None)) is not None:
            oldest = self._unstarted[lease]
            if oldest.request.stream or now < oldest.due_s:
                return oldest
            # Without a stream there is no byte before the end. By now it should be running.
            self._settle(lease, oldest)
        return None

    def _end_stretch(self, rates: PoolRates) -> None:
        """Learn from the time up to the last first byte: prompt times, or load times where adapters were loaded."""
        if not self._begun:
            return
        if self._tokens and self._known:
            took_s = self._spoke_s - self._began_s
            if self._loads:
                tokens = self._tokens + rates.attention.share * self._attended
                rates.loaded(self.prefill, self._loads, tokens, took_s)
            else:
                rates.prefilled(self.prefill, self._tokens, self._attended, took_s)
        self._began_s = self._spoke_s
        self._begun = 0
        self._tokens = self._attended = 0.0
        self._known = True
        self._loads.clear()

    def _settle(self, lease: int, flight: InFlight) -> None:
        if self._unstarted.pop(lease, None) is not None:
            self._plain -= not flight.request.stream
            if not flight.deferred:
                self._to_prefill_tokens -= flight.work_tokens
            self.worked_s += flight.work_s
            self._loading.pop(lease, None)
            # It is unknown how much of the time until the next first byte goes into this prompt.
            self._mixed = True
