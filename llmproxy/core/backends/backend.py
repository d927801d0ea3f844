"""What is known of one backend: readings, own work since then, and health, frozen into the view that policies see."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from msgspec.structs import replace

from llmproxy.core.backends.batch_limit import BatchLimit, Exploration
from llmproxy.core.backends.bookings import GAUGE_LAG_S, Bookings, ResidentAdapters
from llmproxy.core.backends.health import Hang, Health
from llmproxy.core.backends.look_ahead import LookAhead
from llmproxy.core.backends.outlier_detection import OutlierDetection
from llmproxy.core.backends.view import View
from llmproxy.core.domain import DECODE, KnownLimit, Listing, Reading, Request, Role, Trouble, Verdict
from llmproxy.core.settings import CapacitySettings, HealthSettings

STARTED_AFTER_S = 1.0
"""A request without a stream has no byte until its end. After this long it is assumed to be running."""
UNREAD_MAX = 10
"""Successful polls without readable numbers after which a backend is assumed to publish none."""


class Backend:
    """Everything that the core knows of one vLLM server. Changed only by the scheduler that owns it.

    Own counters come first and readings correct them. Sequences that a reading shows beyond our own are other clients'
    work and count as load. Prompts booked after a reading are added to its KV use.
    """

    def __init__(
        self,
        name: str,
        capacity: CapacitySettings,
        health: HealthSettings,
        max_in_flight: int | None = None,
        ceiling_range: tuple[float, float] = (1.0, 1.0),
        prompt_range: tuple[int, int] | None = None,
        role: Role = Role.BOTH,
    ) -> None:
        self.name = name
        self.health = Health(health)
        self.listing: Listing | None = None
        self.reading: Reading | None = None
        self._own = Bookings()
        self.bookings = self._own.by_lease
        self._kept = 0
        self._keeps_for: dict[str, float] = {}
        self._parts = 1
        self.processes = 1
        """How many processes have had this name, as far as is known."""
        self.exploration: Exploration | None = None
        self.outliers: OutlierDetection | None = None
        lowest_ceiling, self._highest_ceiling = ceiling_range
        self.limit = BatchLimit(max_in_flight, capacity.start_limit, lowest_ceiling)
        self._look_ahead = LookAhead()
        self._capacity = capacity
        self._prompt_range = prompt_range
        self._role = role
        self._kind: tuple[tuple[str, ...], int | None] | None = None
        self._restored: KnownLimit | None = None
        self._published: int | None = None
        self._served: frozenset[str] = frozenset()
        self._adapters: frozenset[str] = frozenset()
        self._max_model_len: int | None = None
        self._resident = ResidentAdapters()
        self._others_seen = 0
        self._others = 0
        self._unread = False
        self._generates = True
        self._numberless_polls = 0
        self._view: View | None = None
        self._outline: View | None = None
        self._view_until_s = self._changes_s = -inf

    # --- configuration -------------------------------------------------------------------------------------------

    @property
    def drained(self) -> bool:
        """An operator wants no new requests there. It is no failure, and what was learned stays."""
        return self.health.drained

    @drained.setter
    def drained(self, drained: bool) -> None:
        self.health.drained = drained
        self._changed()

    @property
    def parts(self) -> int:
        """Of how many processes that decide without each other this is one. Each may use a part of the limit."""
        return self._parts

    @parts.setter
    def parts(self, parts: int) -> None:
        self._parts = parts
        self._changed()

    @property
    def up(self) -> bool:
        """It may be given work now or shortly: polls find it healthy, and it is not drained."""
        return not self.health.down and not self.health.drained

    def reconfigure(
        self, capacity: CapacitySettings, health: HealthSettings, ceiling_range: tuple[float, float]
    ) -> None:
        """Use other settings from now on; what was learned and what is booked stays."""
        self._capacity = capacity
        self.health.settings = health
        self.limit.lowest_ceiling, self._highest_ceiling = ceiling_range
        self._changed()

    def meant_for(
        self, max_in_flight: int | None, prompt_range: tuple[int, int] | None = None, role: Role = Role.BOTH
    ) -> None:
        """Set the configured limit, prompt lengths and role."""
        self.limit.cap(max_in_flight)
        self._prompt_range = prompt_range
        self._role = role
        self._changed()

    def replaced(self) -> None:
        """Another process has this name from now on, and nothing read of the old one is true of it.

        What is in flight on the old process runs on, and counts as load until it ends.
        """
        # Until a poll succeeds, which clears the record.
        self.health.down = True
        self._forget_process()
        self.limit.forget()
        self._kind = self._restored = self._published = None

    # --- events of polls -----------------------------------------------------------------------------------------

    def listed(self, listing: Listing) -> None:
        self.listing = listing
        self._served = frozenset(card.name for card in listing.cards)
        self._adapters = frozenset(card.name for card in listing.cards if card.parent is not None)
        lengths = [card.max_model_len for card in listing.cards if card.max_model_len is not None]
        self._max_model_len = max(lengths, default=None)
        bases = tuple(sorted(card.name for card in listing.cards if card.parent is None))
        self.health.models = frozenset(bases)
        self._set_kind((bases, self._max_model_len))
        self._resident.keep(self._adapters)
        self._changed()

    def _set_kind(self, kind: tuple[tuple[str, ...], int | None]) -> None:
        before, self._kind = self._kind, kind
        if before is not None and before != kind:
            self.limit.forget()
        elif before is None:
            self._begin()

    def _begin(self) -> None:
        known = self._restored
        if known is not None and self._kind == (known.models, known.max_model_len):
            self.limit.begin_at(known.limit, settled=known.settled)

    def restore(self, known: KnownLimit) -> None:
        """Start from this batch limit if the first listing shows, or has shown, the engine for which it was learned."""
        self._restored = known
        self._begin()
        self._changed()

    def published(self, limit: int) -> None:
        """The engine's own configuration says that it runs so many sequences at once."""
        if self._published not in (None, limit):
            self.limit.forget()
        self._published = limit
        self.limit.begin_at(limit, settled=True)
        self._changed()

    @property
    def known_limit(self) -> KnownLimit | None:
        """What a later process should know of the batch limit; None where nothing was learned."""
        known = self.limit.known
        if known is None or self._kind is None or self.reading is None:
            return None
        return KnownLimit(*known, *self._kind)

    def answered(self, now: float) -> None:
        """A poll found the backend healthy, whether or not it publishes numbers."""
        self.health.poll_succeeded(now)
        if self.reading is None:
            self._numberless_polls += 1
            if not self._unread or self._numberless_polls > UNREAD_MAX:
                self.limit.unpublished(self._seen)
        # Without a stream there is no byte before the end, and not every server publishes counters.
        works = self.reading is None or (self.reading.running > 0 and self._generates)
        for lease, booking in self._own.unstarted_answers() if works else ():
            if now - booking.booked_s >= STARTED_AFTER_S:
                booking.started = True
                self.health.first_byte(lease, now)
        self._changed()

    def timed_out(self, now: float) -> None:
        """A question of a poll was not answered in time."""
        self.health.poll_timed_out(now)
        self._changed()

    def unread(self) -> None:
        """Its numbers could not be read, but it may publish some."""
        self._unread = True

    def observe(self, reading: Reading) -> None:
        if self.reading is not None and reading.taken_at_s < self.reading.taken_at_s:
            return
        before, self.reading = self.reading, reading
        self._generates = before is None or reading.generated is None or reading.generated != before.generated
        others = self._own.observe(reading)
        visible_s = reading.taken_at_s - GAUGE_LAG_S
        if reading.waiting == 0 and reading.running > 0 and self._generates:
            for lease, booking in self._own.unstarted_answers():
                if booking.booked_s <= visible_s:
                    booking.started = True
                    self.health.first_byte(lease, reading.taken_at_s)
        # Other clients' work must show in two readings running: one may count what ended a moment ago.
        self._others, self._others_seen = min(others, self._others_seen), others
        if not self._waits_for_adapter(reading):
            proven = self._waits_for_batch(reading, visible_s)
            # A stream that has begun was run, also where the reading is of a time before.
            waiting = reading.waiting - self._fetching(reading)
            running = reading.running if waiting else max(reading.running, self._own.begun)
            self.limit.observe(running, waiting, self.in_flight, proven=proven, pool=self.exploration)
        load = self._own.sequences
        if self.limit.settled and load >= self.limit.value and not self._others:
            self._look_ahead.observe(load, load - reading.running - reading.waiting)
        if self.exploration is not None:
            self.exploration.learned(self.limit)
        for adapter in sorted(reading.running_adapters & self._adapters):
            self._resident.touch(adapter, reading.max_adapters)
        self._resident.evict(reading.max_adapters)
        self._changed()
        if self.outliers is not None:
            fast = self.outliers.read(self.name, reading, self._own.sequences)
            if fast is not None and self.health.slow:
                self.measured(None, fast, reading.taken_at_s)

    def troubled(self, trouble: Trouble) -> bool:
        """A poll failed. True when the process is surely gone, and with it its open streams."""
        gone = self.health.poll_failed(trouble)
        if gone:
            self._forget_process()
        self._changed()
        return gone

    @property
    def sequences(self) -> int:
        """Our sequences in flight there."""
        return self._own.sequences

    @property
    def _counted(self) -> bool:
        """Whether the engine publishes how many tokens it has generated."""
        return self.reading is not None and self.reading.generated is not None

    @property
    def in_flight(self) -> int:
        """Sequences in flight there, ours and other clients'."""
        return self._own.sequences + self._others

    @property
    def _seen(self) -> int:
        """The same as far as is known: without a reading, others that decide are taken to have as many each."""
        return self.in_flight if self.reading is not None else self._own.sequences * self._parts

    def _sure(self) -> int:
        """How many sequences surely run there at once: what its pool has run, until it has met its own limit."""
        own = self.limit.sure
        if self.limit.settled or self.exploration is None:
            return own
        return min(self.limit.value, max(own, self.exploration.sure))

    def _forget_process(self) -> None:
        self.processes += 1
        self.reading = None
        self._look_ahead = LookAhead()
        self._keeps_for.clear()
        self._resident.clear()
        self._others = self._others_seen = self._numberless_polls = 0
        self._unread = False
        self.limit.restarted()
        self._changed()

    def _waits_for_adapter(self, reading: Reading) -> bool:
        """Whether requests may wait for an adapter slot, which says nothing of the batch limit."""
        if reading.max_adapters is None or len(reading.running_adapters) < reading.max_adapters:
            return False
        return any(
            b.request.adapter not in reading.running_adapters for b in self.bookings.values() if b.request.adapter
        )

    def _fetching(self, reading: Reading) -> int:
        """Sequences in the engine's queue that wait for no place, but for what another backend has computed."""
        if not reading.deferred:
            return 0
        unstarted = (one.request for one in self.bookings.values() if not one.started)
        answers = sum(request.sequences for request in unstarted if request.stage is DECODE)
        return min(answers, reading.deferred, reading.waiting)

    def _waits_for_batch(self, reading: Reading, visible_s: float) -> bool:
        """Whether the engine's queue can wait only for places in the batch.

        No prompt is being computed then, and memory is free for each. A step full of prompts leaves others waiting
        beside a small batch, and so does a full KV-cache.
        """
        if self._others or reading.kv_used is None or not reading.kv_tokens:
            return False
        unstarted = [b.request for b in self.bookings.values() if not b.started and b.booked_s <= visible_s]
        free_tokens = (1.0 - reading.kv_used) * reading.kv_tokens
        fits = all(request.prompt_tokens < free_tokens for request in unstarted)
        return fits and sum(request.sequences for request in unstarted) <= reading.waiting

    # --- events of leases ----------------------------------------------------------------------------------------

    def lacks(self, adapter: str | None) -> bool:
        """Whether `adapter` probably has to be loaded here."""
        return adapter is not None and adapter not in self._resident

    def book(self, lease: int, request: Request, now: float, held_tokens: int = 0) -> None:
        """`request` is sent under `lease`; `held_tokens` of its prompt need no new room in the KV-cache."""
        self._own.add(lease, request, request.prompt_tokens - held_tokens, now)
        if request.adapter is not None:
            self._resident.touch(request.adapter, self.reading.max_adapters if self.reading is not None else None)
        self._load_changed(alone=request.adapter is None)
        self.health.booked(lease)

    @property
    def kept(self) -> int:
        """Places that are kept for sequences whose prompts other backends compute."""
        return self._kept

    def keep_place(self, sequences: int) -> None:
        """Keep places for so many sequences whose prompts another backend computes; fewer where it is negative."""
        self._kept += sequences
        self._load_changed()

    def keep_for(self, request_id: str, until_s: float, now: float) -> None:
        """The prompt of a request was computed, and stays until another backend has fetched it, or until then."""
        self.keeps_until_s(now)
        self._keeps_for[request_id] = until_s

    def fetched(self, request_id: str) -> None:
        """The prompt of a request was fetched, or never will be."""
        self._keeps_for.pop(request_id, None)

    def keeps_until_s(self, now: float) -> float | None:
        """When the first of the kept prompts may go although nobody fetched it; None where none is kept."""
        while (first := next(iter(self._keeps_for), None)) is not None:
            if self._keeps_for[first] > now:
                return self._keeps_for[first]
            del self._keeps_for[first]
        return None

    def started(self, lease: int, now: float) -> None:
        self._own.begin(lease)
        self._load_changed()
        self.health.first_byte(lease, now)

    def release(self, lease: int, verdict: Verdict, now: float, *, excused: bool = False) -> None:
        """The lease ended; for `excused` see `Health.finished`."""
        if verdict is Verdict.BUSY:
            self.limit.refused(self._seen - self.bookings[lease].request.sequences)
        self._own.remove(lease, self.reading)
        idle = not self.bookings and (self.reading is None or not self.reading.running)
        self._load_changed(alone=verdict is Verdict.SERVED)
        self.health.finished(
            lease, verdict, now, idle=idle, counted=self.health.slow and self._counted, excused=excused
        )

    def at_work(self, now: float) -> bool:
        """Whether a fresh reading shows sequences that run."""
        reading = self.reading
        return reading is not None and reading.running > 0 and now < reading.taken_at_s + self._capacity.stale_after_s

    def forgive(self, verdict: Verdict, now: float) -> None:
        """See `Health.forgive`."""
        self._changed()
        self.health.forgive(verdict, now)

    def to_blame(self, verdict: Verdict, now: float) -> None:
        """See `Health.to_blame`."""
        self._changed()
        self.health.to_blame(verdict, now)

    def hangs(self, hang: Hang, now: float) -> bool:
        """There is evidence that the backend hangs. Answers whether it was ejected."""
        self._changed()
        return self.health.hangs(hang, now)

    def slowed(self, why: str, now: float) -> bool:
        """The backend has become slow. Answers whether it was ejected."""
        self._changed()
        return self.health.slowed(why, now)

    def missed(self, now: float) -> None:
        """See `Health.missed`."""
        if self.health.missed(now):
            self._changed()

    def measured(self, lease: int | None, fast: bool, now: float) -> None:
        """See `Health.measured`."""
        self._changed()
        self.health.measured(lease, fast, now)

    def unstarted(self, lease: int) -> bool:
        """Nothing visible was done for `lease`: its stream has no byte, or it is in the engine's own queue.

        Without a stream only a reading can prove it: one younger than the booking that shows sequences waiting, all of
        them ours, with this request among as many as came last.
        """
        booking = self.bookings[lease]
        if booking.started or booking.request.stream:
            return not booking.started
        return not self._others and lease in self._own.last_waiting(self.reading)

    def queued(self, now: float) -> Iterator[int]:
        """The leases in the engine's own queue by the last reading, if it is fresh; the newest first."""
        return self._own.last_waiting(self.reading) if self.view(now).waiting else iter(())

    def view_without(self, leases: list[int], now: float) -> View:
        """The view as it will be when `leases` have been given back."""
        view = self.view(now)
        kv_used = view.kv_used
        if view.kv_tokens:
            kv_used -= self._own.debits_of(leases) / view.kv_tokens
        return replace(view, load=view.load - self._own.sequences_of(leases), kv_used=kv_used)

    def serves(self, model: str) -> bool:
        """Whether the last listing names `model`."""
        return model in self._served

    # --- the view ------------------------------------------------------------------------------------------------

    def view(self, now: float) -> View:
        """The frozen view at `now`, reused until an event or the clock makes it untrue."""
        if self._view is None or now >= self._view_until_s:
            self._view = self._make_view(now)
        return self._view

    def changes_at(self, now: float) -> float | None:
        """When room may appear there by time alone; None when only an event can bring it."""
        if self._view is None or now >= self._view_until_s:
            self.view(now)
        return None if self._changes_s == inf else self._changes_s

    def _changed(self) -> None:
        """The view is untrue."""
        self._view = self._outline = None

    def _load_changed(self, *, alone: bool = True) -> None:
        """Only the load of the view is untrue, if it changed `alone`."""
        self._view = None
        if not (alone and self._steady):
            self._outline = None

    @property
    def _steady(self) -> bool:
        """Leases that come and go in order change nothing of the view but its load."""
        return not self.health.ejected and (self.reading is None or not self.reading.deferred)

    def _make_view(self, now: float) -> View:
        outline = self._outline
        if outline is None or now >= self._view_until_s:
            outline = self._outline = self._make_outline(now)
        own, limit, kv_used = self._own, outline.limit, outline.kv_used
        if outline.kv_tokens:
            kv_used += own.debit_tokens / outline.kv_tokens
        look_ahead = self._capacity.look_ahead
        return replace(
            outline,
            load=outline.load + own.sequences + self._kept,
            kv_used=kv_used,
            look_ahead=self._look_ahead.requests(limit) if look_ahead is None else look_ahead,
            sure=min(limit, self._sure()),
        )

    def _make_outline(self, now: float) -> View:
        """The view without our own load. It is true for longer, and takes most of the time."""
        health, capacity, reading = self.health, self._capacity, self.reading
        until_s = health.changes_at(now) or inf
        others, waiting, kv_used = 0, 0, 0.0
        kv_tokens = max_adapters = None
        if reading is not None and now >= reading.taken_at_s + capacity.stale_after_s:
            reading = None
        if reading is not None:
            until_s = min(until_s, reading.taken_at_s + capacity.stale_after_s)
            others = self._others
            waiting, max_adapters = reading.waiting - self._fetching(reading), reading.max_adapters
            kv_used, kv_tokens = reading.kv_used or 0.0, reading.kv_tokens
        self._changes_s = until_s
        # No request waits for slow start: one that finds no room elsewhere is sent there at once.
        self._view_until_s = min(until_s, health.warmer_at(now) or inf)
        available = health.available(now) and not self.health.drained
        # What others have there takes of the part of this process where it is more than their parts.
        limit = max(1, self.limit.value // self._parts)
        return View(
            backend=self.name,
            available=available,
            served=self._served,
            resident=self._resident.names(),
            max_adapters=max_adapters,
            max_model_len=self._max_model_len,
            prompt_range=self._prompt_range,
            limit=limit,
            load=max(0, others - (self.limit.value - limit)),
            waiting=waiting,
            kv_used=kv_used,
            kv_tokens=kv_tokens,
            look_ahead=0,
            kv_full=capacity.kv_full,
            reading=reading,
            warmth=health.warmth(now),
            highest_ceiling=self._highest_ceiling,
            prompt_window_s=capacity.prompt_window_s,
            probed=available and health.ejected,
            stream_probe=health.stream_probe and reading is None,
            role=self._role,
        )

    def check(self) -> None:
        self._own.check()
        assert self._kept >= 0
