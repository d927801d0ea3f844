"""What is known of one backend beside its view: its pace, and the prompts that it was given and has not answered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass
from math import exp

from llmproxy.core.domain import Request
from llmproxy.core.placement.rates import Frequency, LoadTimes, Pace, Rates
from llmproxy.core.prefix import InUse

WORK_S = 30.0
"""How far back the share of time that a backend spends on prompts is looked at."""
SAME_STEP_S = 0.003
"""First bytes this close come from one step of the engine, and the time that it took is that of all their prompts."""
ADAPTERS_MAX = 1_024
"""Adapters of which one backend's last use is remembered."""
OVERDUE = 2.0
"""Times its expected time after which a prompt that has no byte says something of its backend."""


@dataclass(slots=True)
class Flight:
    """A lease, and what was expected of it when it was booked; `own_tokens` of its prompt were to be computed.

    Its first token was expected after `ttft_s`, the others each `tpot_s`; at `due_s` it is overdue. A cold adapter was
    of `load_tier`, and expected to be loaded in `load_s`. Where it was `crowded`, the batch was full, and its prompt had
    to wait for somebody's end; where it was `deferred`, all slots of adapters served others, and those behind it pass.
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
    load_tier: int = 0
    load_s: float = 0.0
    deferred: bool = False
    crowded: bool = False
    due_s: float = 0.0
    started_s: float | None = None


class Station:
    """One backend: `adapters` and `in_use` are those of the requests in flight there, `kv_tokens` what the prefix index
    was told of its size, `limit` the sequences and `max_adapters` the adapters that its batch takes, as far as known;
    `turnover` is how often it loads one.
    """

    def __init__(self) -> None:
        self.prefill = Pace()
        self.step = Pace()
        self.adapters: Counter[str] = Counter()
        self.in_use = InUse()
        self.kv_tokens = 0
        self.limit: int | None = None
        self.max_adapters: int | None = None
        self.turnover = Frequency()
        self.in_flight = 0
        self._unstarted: dict[int, Flight] = {}
        self._to_prefill_tokens = 0.0
        self._to_load_s = 0.0
        self._loads = 0
        self._uses = 0
        self._used: dict[str, tuple[int, int]] = {}
        self._spoke_s = -1.0
        self._busy_s = 0.0
        self._work_s = 0.0
        self._work_at_s = 0.0
        self._step_tokens = 0.0
        self._step_took_s = 0.0
        self._step_loads: list[int] = []
        self._step_known = True
        self._mixed = False

    def renew(self, rates: Rates) -> None:
        """Bring both paces up to what the pool knows now."""
        if rates.prefill.seen >= self.prefill.stale_at:
            self.prefill.renew(rates.prefill)
        if rates.step.seen >= self.step.stale_at:
            self.step.renew(rates.step)

    def queue_s(self, rates: Rates, now: float) -> float:
        """Until the backend has computed the prompts that it has, with adapters that it loads for them, and once more
        what every prompt takes at least.
        """
        oldest = self._oldest(now) if self._unstarted else None
        token_s = rates.prefill.slope * self.prefill.factor
        queue_s = rates.prefill.base * self.prefill.factor + self._to_prefill_tokens * token_s + self._to_load_s
        if oldest is not None:
            # A part of the oldest is done by now; and what should have begun long ago says more of this backend than
            # all that it did before.
            own_s = oldest.own_tokens * token_s + oldest.load_s
            queue_s -= min(now - max(oldest.booked_s, self._spoke_s), own_s)
            queue_s += max(0.0, now - oldest.due_s)
        return queue_s

    def busy_share(self, now: float) -> float:
        """The share of its time that lately went into prompts and into loading adapters; more than 1 where it was given
        more than it can do.
        """
        return self._work_s / WORK_S * exp((self._work_at_s - now) / WORK_S)

    def book(self, lease: int, flight: Flight, rates: Rates, now: float) -> None:
        if not self._unstarted:
            self._busy_s = now
            self._mixed = False
        request = flight.request
        if request.adapter is not None:
            if flight.cold_adapter:
                flight.load_tier = self.load_tier(request.adapter)
                flight.load_s = rates.loads.at(flight.load_tier)
                flight.deferred = self.slots_taken
                self._loads += 1
                self.turnover.add(now)
            self.adapters[request.adapter] += 1
            self._touch(request.adapter)
        self._unstarted[lease] = flight
        self._to_prefill_tokens += flight.own_tokens
        self._to_load_s += flight.load_s
        due_s = rates.prefill.at(self._to_prefill_tokens) * self.prefill.factor + self._to_load_s
        flight.due_s = now + OVERDUE * due_s
        work_s = flight.own_tokens * rates.prefill.slope * self.prefill.factor + flight.load_s
        self._work_s = WORK_S * self.busy_share(now) + work_s
        self._work_at_s = now
        self.in_flight += request.sequences
        flight.crowded = self.limit is not None and self.in_flight > self.limit
        self.in_use.add(request.prefix)

    @property
    def waiting(self) -> int:
        """How many wait for a first byte."""
        return len(self._unstarted)

    @property
    def slots_taken(self) -> bool:
        """Every adapter slot serves somebody: one more waits inside the engine until one of them has nobody left."""
        return self.max_adapters is not None and len(self.adapters) >= self.max_adapters

    def load_tier(self, adapter: str) -> int:
        """How cold an adapter is that is not resident."""
        used = self._used.get(adapter)
        return LoadTimes.tier(None if used is None else self._loads - used[1])

    def displaced(self, resident: Set[str]) -> str | None:
        """Which of the residents has to go for another one: the least recently used of those that serve nobody."""
        idle = [name for name in resident if name not in self.adapters]
        return min(idle, key=lambda name: (self._used.get(name, (0, 0)), name), default=None)

    def _touch(self, adapter: str) -> None:
        self._uses += 1
        self._used.pop(adapter, None)
        self._used[adapter] = self._uses, self._loads
        if len(self._used) > ADAPTERS_MAX:
            del self._used[next(iter(self._used))]

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
        if flight.cold_adapter:
            self._step_loads.append(flight.load_tier)
        self._step_known &= not (flight.deferred or flight.crowded or mixed)
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
            self._touch(request.adapter)

    def _oldest(self, now: float) -> Flight | None:
        while (lease := next((x for x, one in self._unstarted.items() if not one.deferred), None)) is not None:
            oldest = self._unstarted[lease]
            if oldest.request.stream or now < oldest.due_s:
                return oldest
            # Without a stream there is no byte before the end; by now it is taken to be running.
            self._settle(lease, oldest)
        return None

    def _end_step(self, rates: Rates) -> None:
        """No more first bytes of the last step will come. Where adapters were loaded, it says nothing of prompts."""
        if self._step_tokens and self._step_known:
            if self._step_loads:
                rates.loaded(self.prefill, self._step_loads, self._step_tokens, self._step_took_s)
            else:
                rates.prefilled(self.prefill, self._step_tokens, self._step_took_s)
        self._step_tokens, self._step_known = 0.0, True
        self._step_loads.clear()

    def _settle(self, lease: int, flight: Flight) -> None:
        if self._unstarted.pop(lease, None) is not None:
            self._to_prefill_tokens -= flight.own_tokens
            self._to_load_s -= flight.load_s
            # Nobody knows how much of the time until the next first byte goes into a prompt that shows none.
            self._mixed = True
