"""What is known of one backend beside its view: its pace, and the prompts that it was given and has not answered."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import exp

from llmproxy.core.domain import Request
from llmproxy.core.placement.rates import Pace, Rates
from llmproxy.core.prefix import InUse

WORK_S = 30.0
"""How far back the share of time that a backend spends on prompts is looked at."""
SAME_STEP_S = 0.003
"""First bytes this close come from one step of the engine, and the time that it took is that of all their prompts."""
OVERDUE = 2.0
"""Times its expected time after which a prompt that has no byte says something of its backend."""


@dataclass(slots=True)
class Flight:
    """A lease, and what was expected of it when it was booked; `own_tokens` of its prompt were to be computed.

    Its first token was expected after `ttft_s`, the others each `tpot_s`; at `due_s` it is overdue. Where it was
    `crowded`, the batch was full, and its prompt had to wait for somebody's end.
    """

    request: Request
    backend: str
    station: Station
    booked_s: float
    own_tokens: float
    cached_tokens: float
    cold_adapter: bool
    ttft_s: float
    tpot_s: float
    crowded: bool = False
    due_s: float = 0.0
    started_s: float | None = None


class Station:
    """One backend: `adapters` and `in_use` are those of the requests in flight there, `kv_tokens` what the prefix index
    was told of its size, `limit` the sequences that its batch takes, as
    far as known.
    """

    def __init__(self) -> None:
        self.prefill = Pace()
        self.step = Pace()
        self.adapters: Counter[str] = Counter()
        self.in_use = InUse()
        self.kv_tokens = 0
        self.limit: int | None = None
        self.in_flight = 0
        self._unstarted: dict[int, Flight] = {}
        self._to_prefill_tokens = 0.0
        self._spoke_s = -1.0
        self._busy_s = 0.0
        self._work_s = 0.0
        self._work_at_s = 0.0
        self._step_tokens = 0.0
        self._step_took_s = 0.0
        self._step_known = True
        self._mixed = False

    def renew(self, rates: Rates) -> None:
        """Bring both paces up to what the pool knows now."""
        if rates.prefill.seen >= self.prefill.stale_at:
            self.prefill.renew(rates.prefill)
        if rates.step.seen >= self.step.stale_at:
            self.step.renew(rates.step)

    def queue_s(self, rates: Rates, now: float) -> float:
        """Until the backend has computed the prompts that it has, and once more what every prompt takes at least."""
        oldest = self._oldest(now) if self._unstarted else None
        token_s = rates.prefill.slope * self.prefill.factor
        queue_s = rates.prefill.base * self.prefill.factor + self._to_prefill_tokens * token_s
        if oldest is not None:
            # A part of the oldest is done by now; and what should have begun long ago says more of this backend than
            # all that it did before.
            queue_s -= min(now - max(oldest.booked_s, self._spoke_s), oldest.own_tokens * token_s)
            queue_s += max(0.0, now - oldest.due_s)
        return queue_s

    def busy_share(self, now: float) -> float:
        """The share of its time that lately went into prompts; more than 1 where it was given more than it can do."""
        return self._work_s / WORK_S * exp((self._work_at_s - now) / WORK_S)

    def book(self, lease: int, flight: Flight, rates: Rates, now: float) -> None:
        if not self._unstarted:
            self._busy_s = now
            self._mixed = False
        self._unstarted[lease] = flight
        self._to_prefill_tokens += flight.own_tokens
        flight.due_s = now + OVERDUE * rates.prefill.at(self._to_prefill_tokens) * self.prefill.factor
        work_s = flight.own_tokens * rates.prefill.slope * self.prefill.factor
        self._work_s = WORK_S * self.busy_share(now) + work_s
        self._work_at_s = now
        request = flight.request
        self.in_flight += request.sequences
        flight.crowded = self.limit is not None and self.in_flight > self.limit
        self.in_use.add(request.prefix)
        if request.adapter is not None:
            self.adapters[request.adapter] += 1

    def start(self, lease: int, flight: Flight, rates: Rates, now: float) -> None:
        """Its first byte came: learn from the time since the one before, or since there was something to compute."""
        if not flight.request.stream:
            # This byte is one of its last, and says nothing of when its prompt was computed.
            self._settle(lease, flight)
            return
        for older, one in list(self._unstarted.items()):
            if older == lease:
                break
            if not one.request.stream:
                # Prompts are computed in their order.
                self._settle(older, one)
        mixed = self._mixed
        self._settle(lease, flight)
        if now - self._spoke_s >= SAME_STEP_S:
            self._end_step(rates)
            self._step_took_s = now - max(self._spoke_s, self._busy_s)
        self._spoke_s = now
        self._step_tokens += flight.own_tokens
        if flight.cold_adapter and not mixed:
            rates.loaded(self.prefill, self._step_tokens, self._step_took_s)
        self._step_known &= not (flight.cold_adapter or flight.crowded or mixed)
        self._mixed = False

    def finish(self, lease: int, flight: Flight) -> None:
        self._settle(lease, flight)
        request = flight.request
        self.in_flight -= request.sequences
        self.in_use.remove(request.prefix)
        if request.adapter is not None:
            self.adapters[request.adapter] -= 1
            if not self.adapters[request.adapter]:
                del self.adapters[request.adapter]

    def _oldest(self, now: float) -> Flight | None:
        while (lease := next(iter(self._unstarted), None)) is not None:
            oldest = self._unstarted[lease]
            if oldest.request.stream or now < oldest.due_s:
                return oldest
            # Without a stream there is no byte before the end; by now it is taken to be running.
            self._settle(lease, oldest)
        return None

    def _end_step(self, rates: Rates) -> None:
        """No more first bytes of the last step will come. Where an adapter was loaded, it says nothing of prompts."""
        if self._step_tokens and self._step_known:
            rates.prefilled(self.prefill, self._step_tokens, self._step_took_s)
        self._step_tokens, self._step_known = 0.0, True

    def _settle(self, lease: int, flight: Flight) -> None:
        if self._unstarted.pop(lease, None) is not None:
            self._to_prefill_tokens -= flight.own_tokens
            # Nobody knows how much of the time until the next first byte goes into a prompt that shows none.
            self._mixed = True
