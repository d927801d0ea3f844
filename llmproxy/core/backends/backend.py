"""What is known of the backends: readings + own debits since + health, frozen into the views that policies see."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from msgspec.structs import replace

from llmproxy.core.backends.batch_limit import BatchLimit
from llmproxy.core.backends.exploration import Exploration
from llmproxy.core.backends.health import Health, Silent
from llmproxy.core.backends.look_ahead import LookAhead
from llmproxy.core.backends.view import View
from llmproxy.core.domain import KnownLimit, Listing, Reading, Request, Trouble, Verdict
from llmproxy.core.settings import CapacitySettings, HealthSettings

GAUGE_LAG_S = 0.03
"""vLLM's gauges are set by engine steps, 10-26 ms after the fact; younger work cannot be in a reading."""
STARTED_AFTER_S = 1.0
"""A request without a stream has no byte until its end; after this long it is taken to be running."""
UNREAD_MAX = 10
"""Polls in good health before a backend whose numbers cannot be read is taken for one that has none."""
RESIDENT_ADAPTERS_MAX = 1_024
"""Bound of the residency list of an engine that does not publish how many adapters it holds."""


@dataclass(slots=True)
class Booking:
    request: Request
    booked_s: float
    started: bool = False


class Backend:
    """Everything the core knows of one vLLM server. Changed only by the scheduler that owns it.

    Own counters come first and scraped numbers correct them: sequences that a reading shows beyond our own are other
    clients' work and count as load; prompts booked after a reading are debited to its KV use.
    """

    def __init__(
        self,
        name: str,
        capacity: CapacitySettings,
        health: HealthSettings,
        max_in_flight: int | None = None,
        ceiling_range: tuple[float, float] = (1.0, 1.0),
        prompt_range: tuple[int, int] | None = None,
    ) -> None:
        self.name = name
        self.health = Health(health)
        self.listing: Listing | None = None
        self.reading: Reading | None = None
        self.bookings: dict[int, Booking] = {}
        self.sequences = 0
        self._drained = False
        self.exploration: Exploration | None = None
        lowest_ceiling, self._highest_ceiling = ceiling_range
        self.limit = BatchLimit(max_in_flight, capacity.start_limit, lowest_ceiling)
        self._look_ahead = LookAhead()
        self._capacity = capacity
        self._prompt_range = prompt_range
        self._kind: tuple[tuple[str, ...], int | None] | None = None
        self._recalled: KnownLimit | None = None
        self._published: int | None = None
        self._served: frozenset[str] = frozenset()
        self._adapters: frozenset[str] = frozenset()
        self._max_model_len: int | None = None
        self._residents: OrderedDict[str, None] = OrderedDict()
        self._debits: dict[int, int] = {}
        self._debit_tokens = 0
        self._high_water = self._left_queue = 0
        self._others_seen = 0
        self._others = 0
        self._unread = False
        self._numberless = 0
        self._view: View | None = None
        self._view_until_s = self._changes_s = -inf

    # --- what those who run it want ------------------------------------------------------------------------------

    @property
    def drained(self) -> bool:
        """Nothing new is to be sent there, by somebody's wish: no failure, and no reason to forget what was learned."""
        return self._drained

    @drained.setter
    def drained(self, drained: bool) -> None:
        self._drained = drained
        self._view = None

    @property
    def up(self) -> bool:
        """It may be given work now or shortly: polls find it well, and nobody wants it empty."""
        return not self.health.down and not self._drained

    def reconfigure(
        self, capacity: CapacitySettings, health: HealthSettings, ceiling_range: tuple[float, float]
    ) -> None:
        """Go by other settings from now on; all that was learned and all that is booked stays."""
        self._capacity = capacity
        self.health.reconfigure(health)
        self.limit.lowest_ceiling, self._highest_ceiling = ceiling_range
        self._view = None

    def meant_for(self, max_in_flight: int | None, prompt_range: tuple[int, int] | None) -> None:
        """Give it no more at once, and prompts of other lengths, from now on."""
        self.limit.cap(max_in_flight)
        self._prompt_range = prompt_range
        self._view = None

    def replaced(self) -> None:
        """Another process goes by this name from now on: nothing read of the old one is true of it.

        What is in flight at the old one runs on, and counts as load until it has ended.
        """
        self.health.replaced()
        self._forget_process()
        self.limit.forget()
        self._kind = self._recalled = self._published = None

    # --- what polls bring ----------------------------------------------------------------------------------------

    def listed(self, listing: Listing) -> None:
        self.listing = listing
        self._served = frozenset(card.name for card in listing.cards)
        self._adapters = frozenset(card.name for card in listing.cards if card.parent is not None)
        lengths = [card.max_model_len for card in listing.cards if card.max_model_len is not None]
        self._max_model_len = max(lengths, default=None)
        bases = tuple(sorted(card.name for card in listing.cards if card.parent is None))
        self._is_of((bases, self._max_model_len))
        for name in [name for name in self._residents if name not in self._adapters]:
            del self._residents[name]
        self._view = None

    def _is_of(self, kind: tuple[tuple[str, ...], int | None]) -> None:
        known, before, self._kind = self._recalled, self._kind, kind
        if before is not None and before != kind:
            self.limit.forget()
        elif before is None and known is not None and kind == (known.models, known.max_model_len):
            self.limit.begin_at(known.limit, settled=known.settled)

    def recall(self, known: KnownLimit) -> None:
        """Start from this batch limit, should the first listing show the engine that it was learned of."""
        self._recalled = known

    def published(self, limit: int) -> None:
        """The engine's own configuration says that it runs so many sequences at once."""
        if self._published not in (None, limit):
            self.limit.forget()
        self._published = limit
        self.limit.begin_at(limit, settled=True)
        self._view = None

    @property
    def known_limit(self) -> KnownLimit | None:
        """What is worth to be told of its batch limit to a later process; None as long as nothing is."""
        known = self.limit.known
        if known is None or self._kind is None or self.reading is None:
            return None
        return KnownLimit(*known, *self._kind)

    def answered(self, now: float) -> None:
        """A poll found the backend in good health, whether or not it publishes numbers."""
        self.health.answered(now)
        if self.reading is None:
            self._numberless += 1
            if not self._unread or self._numberless > UNREAD_MAX:
                self.limit.unpublished(self.sequences)
        self._notice_running(now)
        self._view = None

    def unread(self) -> None:
        """Its numbers could not be read: it may well have some."""
        self._unread = True

    def observe(self, reading: Reading) -> None:
        if self.reading is not None and reading.taken_at_s < self.reading.taken_at_s:
            return
        self.reading, self._left_queue = reading, 0
        visible_s = reading.taken_at_s - GAUGE_LAG_S
        self._settle_debits(visible_s)
        self._notice_started(reading, visible_s)
        # A gauge still counts what we saw finish a moment ago; only sequences beyond the most that we had in flight
        # lately, in two readings running, are somebody else's.
        others = max(0, reading.running + reading.waiting - self._high_water)
        self._others, self._others_seen = min(others, self._others_seen), others
        self._high_water = self.sequences
        if not self._waits_for_adapter(reading):
            proven = self._waits_for_batch(reading, visible_s)
            self.limit.observe(reading.running, reading.waiting, self.in_flight, proven=proven, pool=self.exploration)
        if self.exploration is not None:
            self.exploration.learned(self.limit)
        for adapter in sorted(reading.running_adapters & self._adapters):
            self._touch(adapter)
        self._evict()
        self._view = None

    def troubled(self, trouble: Trouble) -> bool:
        """A poll failed; True when the process is surely gone and its open streams with it."""
        gone = self.health.troubled(trouble)
        if gone:
            self._forget_process()
        self._view = None
        return gone

    @property
    def in_flight(self) -> int:
        """Sequences there, ours and other clients'."""
        return self.sequences + self._others

    def _sure(self) -> int:
        """How many may be there and run without a doubt: what others of its pool run, until it has met its own end."""
        own = self.limit.sure
        if self.limit.settled or self.exploration is None:
            return own
        return min(self.limit.value, max(own, self.exploration.sure))

    def _forget_process(self) -> None:
        self.reading = None
        self._look_ahead = LookAhead()
        self._residents.clear()
        self._others = self._others_seen = self._numberless = 0
        self._unread = False
        self.limit.restarted()
        self._view = None

    def _waits_for_adapter(self, reading: Reading) -> bool:
        # Requests of an adapter that finds no slot wait however small the batch is: that says nothing of its limit.
        if reading.max_adapters is None or len(reading.running_adapters) < reading.max_adapters:
            return False
        return any(
            b.request.adapter not in reading.running_adapters for b in self.bookings.values() if b.request.adapter
        )

    def _waits_for_batch(self, reading: Reading, visible_s: float) -> bool:
        """What waits there waits for a place in the batch: no prompt is being computed, and memory is free for each.

        A step that is full of prompts leaves others waiting beside a small batch, and so does a full KV-cache.
        """
        if self._others or reading.kv_used is None or not reading.kv_tokens:
            return False
        owed = [b.request for b in self.bookings.values() if not b.started and b.booked_s <= visible_s]
        free_tokens = (1.0 - reading.kv_used) * reading.kv_tokens
        return sum(r.sequences for r in owed) <= reading.waiting and all(r.prompt_tokens < free_tokens for r in owed)

    # --- what leases bring ---------------------------------------------------------------------------------------

    def lacks(self, adapter: str | None) -> bool:
        """Whether `adapter` is one that has to be loaded here, as far as is known."""
        return adapter is not None and adapter not in self._residents

    def book(self, lease: int, request: Request, now: float, held_tokens: int = 0) -> None:
        """`request` is on its way under `lease`; `held_tokens` of its prompt need no new room in the KV-cache."""
        self.bookings[lease] = Booking(request, now)
        self.sequences += request.sequences
        self._high_water = max(self._high_water, self.sequences)
        self._debits[lease] = request.prompt_tokens - held_tokens
        self._debit_tokens += request.prompt_tokens - held_tokens
        if request.adapter is not None:
            self._touch(request.adapter)
        self.health.booked(lease)
        self._view = None

    def started(self, lease: int, now: float) -> None:
        self.bookings[lease].started = True
        self.health.spoke(lease, now)
        self._view = None

    def release(self, lease: int, verdict: Verdict, now: float, output_tokens: int = 0) -> None:
        """`output_tokens` are those of the whole answer, 0 where nobody counted them."""
        if verdict is Verdict.BUSY:
            self.limit.refused(self.sequences + self._others)
        if lease in self._last_waiting():
            # The reading still counts it, and those before it do not wait in its place.
            self._left_queue += self.bookings[lease].request.sequences
        booking = self.bookings.pop(lease)
        if output_tokens and verdict is Verdict.SERVED and now > booking.booked_s:
            self._look_ahead.ended(now - booking.booked_s, output_tokens / booking.request.sequences)
        self.sequences -= booking.request.sequences
        self._debit_tokens -= self._debits.pop(lease, 0)
        idle = not self.bookings and (self.reading is None or not self.reading.running)
        self.health.finished(lease, verdict, now, idle=idle)
        self._view = None

    def hangs(self, silent: Silent, now: float) -> bool:
        """It brings nothing; whether it is ejected for that.

        An engine that shows nothing running does not hang: what it has of ours is fetched, tokenised or compiled for
        before it begins, and that may take its time; that of a probe is what a reading is believed for. A reading from
        the first half of the silence proves nothing, because a frozen server sends none after it.
        """
        self._view = None
        reading, silent_s = self.reading, now - silent.since_s
        idle = reading is not None and not reading.running and reading.taken_at_s >= now - 0.5 * silent_s
        if idle and not silent.stopped and not (self.health.ejected and silent_s >= self._capacity.stale_after_s):
            return False
        return self.health.hangs(silent.told(now), now)

    def slowed(self, why: str, now: float) -> bool:
        """It has become slow; whether it is ejected for that."""
        self._view = None
        return self.health.slowed(why, now)

    def paced(self, lease: int, fast: bool, now: float) -> None:
        """See `Health.paced`."""
        self._view = None
        self.health.paced(lease, fast, now)

    def unstarted(self, lease: int) -> bool:
        """Nothing was done for `lease` that anybody saw: its stream has no byte, or the engine has it in its queue.

        Without a stream only the engine's own numbers can prove it: a reading younger than the booking shows sequences
        waiting, all of them ours, and those of this request are among as many that came last.
        """
        booking = self.bookings[lease]
        if booking.started or booking.request.stream:
            return not booking.started
        return not self._others and lease in self._last_waiting()

    def queued(self, now: float) -> Iterator[int]:
        """Leases in the engine's own queue by a reading that is still believed, the newest first."""
        return self._last_waiting() if self.view(now).waiting else iter(())

    def _last_waiting(self) -> Iterator[int]:
        """A queue holds whoever came last: the newest leases that the last reading has seen, up to as many as wait."""
        reading = self.reading
        if reading is None:
            return
        last = self._left_queue
        for lease, booking in reversed(self.bookings.items()):
            if booking.booked_s > reading.taken_at_s - GAUGE_LAG_S:
                continue
            last += booking.request.sequences
            if last > reading.waiting:
                return
            yield lease

    def view_without(self, leases: list[int], now: float) -> View:
        """The view as it will be when `leases` have been given back."""
        view = self.view(now)
        kv_used = view.kv_used
        if view.kv_tokens:
            kv_used -= sum(self._debits.get(lease, 0) for lease in leases) / view.kv_tokens
        freed = sum(self.bookings[lease].request.sequences for lease in leases)
        return replace(view, load=view.load - freed, kv_used=kv_used)

    def _settle_debits(self, before_s: float) -> None:
        for lease in [x for x in self._debits if self.bookings[x].booked_s <= before_s]:
            self._debit_tokens -= self._debits.pop(lease)

    def _notice_running(self, now: float) -> None:
        """Without a stream there is no byte before the end, and not every server publishes counters."""
        for lease, booking in self.bookings.items():
            if not booking.started and not booking.request.stream and now - booking.booked_s >= STARTED_AFTER_S:
                booking.started = True
                self.health.spoke(lease, now)

    def _notice_started(self, reading: Reading, visible_s: float) -> None:
        for lease, booking in self.bookings.items():
            if booking.started or booking.request.stream:
                continue
            if reading.waiting == 0 and reading.running > 0 and booking.booked_s <= visible_s:
                booking.started = True
                self.health.spoke(lease, reading.taken_at_s)

    def _touch(self, adapter: str) -> None:
        self._residents[adapter] = None
        self._residents.move_to_end(adapter)
        self._evict()

    def _evict(self) -> None:
        slots = self.reading.max_adapters if self.reading is not None else None
        while len(self._residents) > (slots or RESIDENT_ADAPTERS_MAX):
            self._residents.popitem(last=False)

    def serves(self, model: str) -> bool:
        """The last listing names `model`."""
        return model in self._served

    # --- what policies see -----------------------------------------------------------------------------------------

    def view(self, now: float) -> View:
        """The frozen view at `now`, reused until an event or the clock makes it untrue."""
        if self._view is None or now >= self._view_until_s:
            self._view = self._make_view(now)
        return self._view

    def changes_at(self, now: float) -> float | None:
        """When room may come up there by the passing of time alone; None when only an event can bring it."""
        if self._view is None or now >= self._view_until_s:
            self.view(now)
        return None if self._changes_s == inf else self._changes_s

    def _make_view(self, now: float) -> View:
        health, capacity, reading = self.health, self._capacity, self.reading
        until_s = health.changes_at(now) or inf
        load, waiting, kv_used = self.sequences, 0, 0.0
        kv_tokens = max_adapters = None
        if reading is not None and now >= reading.taken_at_s + capacity.stale_after_s:
            reading = None
        if reading is not None:
            until_s = min(until_s, reading.taken_at_s + capacity.stale_after_s)
            load += self._others
            waiting, max_adapters = reading.waiting, reading.max_adapters
            kv_used, kv_tokens = reading.kv_used or 0.0, reading.kv_tokens
            if kv_tokens:
                kv_used += self._debit_tokens / kv_tokens
        self._changes_s = until_s
        # Nobody waits for a backend to grow warmer: whoever finds no room elsewhere goes there at once.
        self._view_until_s = min(until_s, health.warmer_at(now) or inf)
        available = health.available(now) and not self._drained
        limit = self.limit.value
        return View(
            backend=self.name,
            available=available,
            served=self._served,
            resident=frozenset(self._residents),
            max_adapters=max_adapters,
            max_model_len=self._max_model_len,
            prompt_range=self._prompt_range,
            limit=limit,
            load=load,
            waiting=waiting,
            kv_used=kv_used,
            kv_tokens=kv_tokens,
            look_ahead=self._look_ahead.requests(limit) if capacity.look_ahead is None else capacity.look_ahead,
            kv_full=capacity.kv_full,
            reading=reading,
            warmth=health.warmth(now),
            highest_ceiling=self._highest_ceiling,
            sure=self._sure(),
            probed=available and health.ejected,
            stream_probe=health.stream_probe,
        )

    def check(self) -> None:
        """Raise AssertionError when a running sum differs from its recomputation."""
        assert self.sequences == sum(b.request.sequences for b in self.bookings.values())
        assert self._debit_tokens == sum(self._debits.values())
        assert self._debits.keys() <= self.bookings.keys()
        assert len(self._residents) <= RESIDENT_ADAPTERS_MAX
