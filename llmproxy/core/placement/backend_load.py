"""The model of one backend in the placement policy `cost`: its learned speed, and its prompts that are not computed."""

from __future__ import annotations

from math import exp, log

from msgspec import Struct

from llmproxy.core.domain import Request, Usage
from llmproxy.core.estimates.learning import DecayingRate
from llmproxy.core.placement.adapter_demand import Slots
from llmproxy.core.placement.prefix_index import InUse
from llmproxy.core.placement.rates import PoolRates, SpeedFactor

WORK_S = 30.0  # Window of `BackendLoad.busy_share`, which prices the delay of later requests.

RATION_S = 10.0  # Window (about the time of an answer) of the share of time spent on prompts, which objectives bound.
ROUNDING_S = 1e-6  # A shorter wait counts as none, so that a backend opens at its announced time.
MARGIN = 0.9  # The mean stream may use this part of its objective, because some streams are slower than the mean.
SHARE_MIN = 0.05
"""Share of a backend's time that prompts may always use. Without it, no request would start where decoding alone
already misses the objectives."""
TPOT_MAX_S = 10.0  # Upper bound of the objective per output token that rationing considers.
SAME_STEP_S = 0.003  # First bytes this close come from one engine step, which computed all their prompts.
WHOLE_EVERY_S = 0.02  # Minimum interval between two non-streamed answers that are learned from.
TOGETHER_S = 0.05  # An idle engine starts requests that arrive this close together in one step.
STRETCH_PROMPTS = 16
"""Prompts whose time is learned as one observation on a backend that always has prompts. An engine step computes the
end of one prompt and the beginning of the next, so the time between two first bytes belongs to neither prompt."""
WINDOW_STEP_S = 0.01  # Allowed excess of the prompt window, so that the backend is not retried at once.
OVERDUE = 2.0  # A prompt without a first byte is overdue after this multiple of its expected time.


class InFlight(Struct, eq=False):
    """A lease, and the predictions at its grant."""

    request: Request
    backend: str
    backend_load: BackendLoad
    booked_s: float
    own_tokens: float  # Uncached prompt tokens of the request.
    cached_tokens: float
    cold_adapter: bool
    ttft_s: float  # Predicted seconds until the first token.
    tpot_s: float  # Predicted seconds for each later token.
    fetched: bool  # Whether another backend computes the prompt, because the request is a decode stage.
    deferred: bool = False  # All adapter slots were in use, so later requests may be computed first.
    # Whether the batch was full at the grant, so the prompt waits for the end of another request.
    crowded: bool = False
    work_tokens: float = 0.0  # `own_tokens` weighted by attention.
    work_s: float = 0.0  # Predicted seconds for `work_tokens` and the adapter load.
    due_s: float = 0.0  # The first byte is overdue from this time on.
    started_s: float | None = None
    # `BackendLoad.worked_s` at the first token of a stream, or at `began_s` of a non-streamed answer.
    begun_at_work_s: float = 0.0
    rations_at: float = 0.0  # The objective of the stream in tokens per second; 0 without an objective that can be met.
    # Prompt tokens to fetch from the prefill backend; None if the backend computes them itself, which teaches nothing.
    fetched_tokens: int | None = 0
    # Time at which a non-streamed request entered the batch of the engine, as predicted; None before.
    began_s: float | None = None
    ahead_tokens: float = 0.0  # Weighted tokens of the prompts to compute at `began_s`, up to and including its own.

    @property
    def attended(self) -> float:
        """The number of earlier tokens that `own_tokens` attend to, summed over these tokens."""
        return self.own_tokens * (self.cached_tokens + 0.5 * self.own_tokens)


class BackendLoad:
    """The load of one backend, as the cost placement predicts it."""

    def __init__(self) -> None:
        self.prefill, self.step = SpeedFactor(), SpeedFactor()  # Its speed relative to the pool.
        self.adapters = Slots()
        self.in_use = InUse()  # The prompt blocks of the requests in flight.
        self.kv_tokens = 0  # KV cache size that was passed to the prefix index.
        self.limit: int | None = None  # Batch limit, None if unknown.
        # Seconds of prompts and adapter loads booked per second, lately. Above 1, the backend falls behind.
        self.busy_share = DecayingRate(WORK_S)
        self._prompts = DecayingRate(RATION_S)
        self.worked_s = 0.0  # Predicted seconds of all prompts and adapter loads that have ended.
        self.in_flight = 0  # Sequences in flight.
        # Non-streamed answers that end before this time are not learned from (`WHOLE_EVERY_S`).
        self._learns_at_s = 0.0
        # Band -> (streams with an objective, sum of their objectives in tokens per second).
        self.rationing: dict[int, tuple[int, float]] = {}
        self.unstarted: dict[int, InFlight] = {}  # Lease -> prompts without a first byte, in the order of booking.
        # Lease -> its request, for requests that wait because the batch is full.
        self._queued: dict[int, InFlight] = {}
        self._plain = 0  # Non-streamed requests in `unstarted`.
        self._to_prefill_tokens = 0.0  # Weighted tokens in `unstarted` without the deferred prompts.
        # Lease -> tier of the adapter that the engine must load before it starts the request.
        self._loading: dict[int, int] = {}
        # The current stretch: the prompts computed from `_began_s` to the last first byte, at `_spoke_s`. The other
        # values are their number, their tokens, and the tiers of their adapter loads.
        self._spoke_s = -1.0
        self._began_s = 0.0
        self._begun = 0
        self._tokens = self._attended = 0.0
        self.loads: list[int] = []
        # Whether the time of the stretch can be learned: no prompt was deferred or crowded, and its time is not mixed.
        self._known = True
        # Whether a prompt without a first byte of its own took an unknown part of the time until the next first byte.
        self._mixed = False

    def answered(self, flight: InFlight, usage: Usage, rates: PoolRates, now: float) -> None:
        """Learns from a non-streamed answer. At most one answer per WHOLE_EVERY_S counts.

        An answer does not count if the request had to load its adapter, or if it is unknown how long it waited in the
        engine.
        """
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
        """Updates both speed factors of the backend, and learns from adapter loads that have just ended."""
        if rates.prefill.seen >= self.prefill.stale_at:
            self.prefill.renew(rates.prefill)
        if rates.step.seen >= self.step.stale_at:
            self.step.renew(rates.step)
        if self.loads and now - self._spoke_s >= SAME_STEP_S:
            # Load times are needed at once: more loads may be started before the next first byte.
            self._end_stretch(rates)

    def queue_s(self, rates: PoolRates, now: float) -> float:
        """Returns the seconds until the backend has computed its prompts, with adapter loads and the base time of one
        prompt.
        """
        work_s, overdue_s = self._unfinished_s(rates, now)
        return rates.prefill.base * self.prefill.factor + work_s + overdue_s

    def _unfinished_s(self, rates: PoolRates, now: float) -> tuple[float, float]:
        """Returns (seconds that prompts and adapter loads still take, seconds that the oldest prompt is overdue)."""
        token_s = rates.prefill.slope * self.prefill.factor
        oldest = self._oldest(now) if self.unstarted else None
        work_s = self._to_prefill_tokens * token_s
        if oldest is None:
            return work_s, 0.0
        # A part of the oldest prompt has been computed by now.
        since_s, due_s, own_s = max(oldest.booked_s, self._spoke_s), oldest.due_s, oldest.work_tokens * token_s
        if self._loading:
            # An engine step loads the adapters of all waiting requests.
            loads_s = sum([rates.loads.at(tier) for tier in self._loading.values()])
            work_s += loads_s
            own_s += loads_s
            due_s = max(due_s, since_s + OVERDUE * loads_s)
        done_s = now - since_s
        return work_s - (done_s if done_s < own_s else own_s), now - due_s if now > due_s else 0.0

    def opens_at(self, rates: PoolRates, band: int, ceiling: float, window_s: float | None, now: float) -> float:
        """Returns when the backend takes a prompt of `band` again; `now` if it takes one now.

        The backend takes prompts while its uncomputed prompts would take less than `ceiling` (0..1] times `window_s`,
        and while the objectives of its streams allow another prompt. Only first bytes of streams show how much has been
        computed. So the window is ignored before the first of them, and while non-streamed prompts are among the
        uncomputed prompts.

        The base time of a prompt is not counted, because another prompt does not prolong it. Overdue time is not
        counted either: one prompt that the engine never starts would close the backend for all others.
        """
        opens_s = self.rationed_until(rates, band, ceiling, now) if self.rationing else now
        if self.unstarted and window_s is not None and rates.prefill.seen and not self._plain:
            over_s = self._unfinished_s(rates, now)[0] - ceiling * window_s
            if over_s > WINDOW_STEP_S:
                opens_s = max(opens_s, now + over_s)
        return opens_s

    def rationed_until(self, rates: PoolRates, band: int, ceiling: float, now: float) -> float:
        """Returns when the objectives of the backend's streams allow a prompt of `band` again, at the earliest `now`.

        If prompts take a share of the time, each token of a stream takes its decoding time / (1 - share). So each
        objective bounds the share of prompts. The bound of a band is the mean over its own streams and the streams of
        higher bands. `band` may use `ceiling` (0..1] times the smallest bound of itself and all higher bands, so that
        no band may use more than a higher band.
        """
        share, streams, tokens_s = 1.0, 0, 0.0
        if self.rationing:
            decode_s = rates.decode.at(self.in_flight) * self.step.factor / MARGIN
            for level in sorted(self.rationing, reverse=True):
                if level < band:
                    break
                more, more_s = self.rationing[level]
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
        if flight.request.slo is not None:
            self._ration(flight, rates)
        flight.crowded = self.limit is not None and self.in_flight > self.limit
        if flight.crowded:
            self._queued[lease] = flight
        else:
            self._begin(flight, self._to_prefill_tokens, now)
        if flight.request.prefix:
            self.in_use.add(flight.request.prefix)

    def _book_prompt(self, lease: int, flight: InFlight, rates: PoolRates, now: float) -> None:
        if not self.unstarted:
            if self._begun:
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
        self.unstarted[lease] = flight
        self._plain += not request.stream
        flight.work_tokens = flight.own_tokens + rates.attention.share * flight.attended
        if not flight.deferred:
            # An engine computes other prompts before a prompt that waits for an adapter slot.
            self._to_prefill_tokens += flight.work_tokens
        flight.due_s = now + OVERDUE * rates.prefill.at(self._to_prefill_tokens) * self.prefill.factor
        flight.work_s = flight.work_tokens * rates.prefill.slope * self.prefill.factor + load_s
        self.busy_share.add(flight.work_s, now)
        self._prompts.add(flight.work_s, now)

    def loading_s(self, now: float) -> float:
        """Returns a lower bound in seconds of the time of an adapter load that is running now; 0 without such a load.

        It is the time since the load began, divided by the number of loads that began together.
        """
        if not self._loading:
            return 0.0
        booked_s = [self.unstarted[lease].booked_s for lease in self._loading]
        since_s = max(booked_s[0], self._spoke_s)
        return (now - since_s) / sum([one <= since_s + TOGETHER_S for one in booked_s])

    def start(self, lease: int, flight: InFlight, rates: PoolRates, now: float) -> None:
        """Records the first byte of a lease, and learns the time of the prompts since the last observation."""
        if flight.fetched:
            if flight.request.adapter is not None:
                self.adapters.started(flight.request.adapter)
            return
        if not flight.request.stream:
            # The first byte of a non-streamed answer comes at its end, long after the prompt.
            self._prompt_done(lease, flight)
            return
        for older, one in list(self.unstarted.items()):
            if older == lease:
                break
            if not one.request.stream:
                # Prompts are computed in order, so the older prompt has been computed too.
                self._prompt_done(older, one)
        unclear, tier = self._mixed or flight.deferred or flight.crowded, self._loading.get(lease)
        self._prompt_done(lease, flight)
        self._mixed = False
        apart = unclear or not self._known or tier is not None or self.loads
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
            self.loads.append(tier)
            # The other prompts waited for the adapter load.
            due_s = now + OVERDUE * rates.prefill.at(self._to_prefill_tokens) * self.prefill.factor
            for one in self.unstarted.values():
                one.due_s = max(one.due_s, due_s)

    def finish(self, lease: int, flight: InFlight, now: float) -> None:
        if lease in self.unstarted:
            # The prompt was not computed to its end.
            first = next(iter(self.unstarted)) == lease
            done_s = min(flight.work_s, now - max(flight.booked_s, self._spoke_s)) if first else 0.0
            self._prompts.add((done_s - flight.work_s) * exp((flight.booked_s - now) / RATION_S), now)
            self._prompt_done(lease, flight)
        if self._queued and self._queued.pop(lease, None) is None:
            longest = self._queued.pop(next(iter(self._queued)))
            self._begin(longest, longest.work_tokens, now)
        request = flight.request
        self.in_flight -= request.sequences
        if flight.rations_at:
            streams, tokens_s = self.rationing.pop(request.band)
            if streams > 1:
                self.rationing[request.band] = streams - 1, tokens_s - flight.rations_at
        if request.prefix:
            self.in_use.remove(request.prefix)
        if request.adapter is not None:
            self.adapters.release(request.adapter)

    def _begin(self, flight: InFlight, ahead_tokens: float, now: float) -> None:
        """Notes when the engine begins a non-streamed request. `ahead_tokens`: see `InFlight`.

        Streams and decode stages are not noted.
        """
        if not (flight.request.stream or flight.fetched):
            flight.began_s, flight.ahead_tokens, flight.begun_at_work_s = now, ahead_tokens, self.worked_s

    def _ration(self, flight: InFlight, rates: PoolRates) -> None:
        """Counts the objective of a stream for rationing, unless the stream would miss it even without any prompts."""
        slo = flight.request.slo
        if slo is None or slo.tpot_s is None or not flight.request.stream:
            return
        if MARGIN * slo.tpot_s > rates.decode.at(self.in_flight) * self.step.factor:
            flight.rations_at = 1.0 / min(TPOT_MAX_S, slo.tpot_s)
            streams, tokens_s = self.rationing.get(flight.request.band, (0, 0.0))
            self.rationing[flight.request.band] = streams + 1, tokens_s + flight.rations_at

    def _oldest(self, now: float) -> InFlight | None:
        while (lease := next((x for x, one in self.unstarted.items() if not one.deferred), None)) is not None:
            oldest = self.unstarted[lease]
            if oldest.request.stream or now < oldest.due_s:
                return oldest
            # A non-streamed answer has no byte before its end. When overdue, its prompt counts as computed.
            self._prompt_done(lease, oldest)
        return None

    def _end_stretch(self, rates: PoolRates) -> None:
        """Ends the stretch and learns from its length: load times if adapters were loaded, else prompt times."""
        if not self._begun:
            return
        if self._tokens and self._known:
            took_s = self._spoke_s - self._began_s
            if self.loads:
                tokens = self._tokens + rates.attention.share * self._attended
                rates.loaded(self.prefill, self.loads, tokens, took_s)
            else:
                rates.prefilled(self.prefill, self._tokens, self._attended, took_s)
        self._began_s = self._spoke_s
        self._begun = 0
        self._tokens = self._attended = 0.0
        self._known = True
        self.loads.clear()

    def _prompt_done(self, lease: int, flight: InFlight) -> None:
        if self.unstarted.pop(lease, None) is not None:
            self._plain -= not flight.request.stream
            if not flight.deferred:
                self._to_prefill_tokens -= flight.work_tokens
            self.worked_s += flight.work_s
            self._loading.pop(lease, None)
            # This prompt took an unknown part of the time until the next first byte. `start` resets the flag.
            self._mixed = True
