"""The state of one backend: metrics, own requests and health, combined into the `View` that policies see."""

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
from llmproxy.core.domain import KnownLimit, Listing, Reading, Request, Role, Trouble, Verdict
from llmproxy.core.settings import CapacitySettings, External, HealthSettings

STARTED_AFTER_S = 1.0  # A non-streamed request, which sends no byte before its end, is assumed to run after this time.
UNREAD_MAX = 10  # Successful polls without readable metrics after which a backend is assumed to publish none.


class Backend:
    """The core's state of one vLLM server.

    The proxy's own requests in flight are counted here, and scrapes correct the counts. Sequences that a scrape shows
    beyond the own requests belong to other clients, and count as load. The KV cache usage of a scrape is increased by
    the prompts that were sent after it.
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
        self.external: External | None = None  # Set for an external backend, which no poll reads.
        self.health = Health(health)
        self.listing: Listing | None = None
        self.reading: Reading | None = None
        self._own = Bookings()
        self.bookings = self._own.by_lease
        self.reserved = 0  # Slots reserved for decode stages whose prompts other backends compute.
        # Request id -> when the engine drops the KV blocks of a prefilled prompt that was not fetched.
        self._pinned_until_s: dict[str, float] = {}
        self.processes = 1  # Number of processes that were seen under this name.
        self.exploration: Exploration | None = None
        self.outliers: OutlierDetection | None = None
        lowest_ceiling, self._highest_ceiling = ceiling_range
        self.limit = BatchLimit(max_in_flight, capacity.initial_batch_limit, lowest_ceiling)
        self._look_ahead = LookAhead()
        self._capacity = capacity
        self._prompt_range = prompt_range
        self._role = role
        self._kind: tuple[tuple[str, ...], int | None] | None = None
        self._restored: KnownLimit | None = None
        self._published: int | None = None
        self.served: frozenset[str] = frozenset()  # The model names in the last `/v1/models` of the backend.
        self._adapters: frozenset[str] = frozenset()
        self._max_model_len: int | None = None
        self._resident = ResidentAdapters()
        self._others_seen = 0
        self._others = 0
        self._unread = False
        self._generates = True
        self._numberless_polls = 0
        self.cached_view: View | None = None
        # The view without the proxy's own load. A lease that begins or ends normally changes it only if `_unsteady`.
        self._outline: View | None = None
        self._unsteady = False
        self.view_until_s = self._changes_s = -inf

    # --- configuration -------------------------------------------------------------------------------------------

    @property
    def drained(self) -> bool:
        """Whether an operator drained the backend, or the backend leaves or is not ready. Learned values are kept."""
        return self.health.drained

    @drained.setter
    def drained(self, drained: bool) -> None:
        self.health.drained = drained
        self._changed()

    @property
    def up(self) -> bool:
        """Whether polls find the backend healthy and it is not drained. The backend may be ejected or full."""
        return not self.health.down and not self.health.drained

    def reconfigure(
        self, capacity: CapacitySettings, health: HealthSettings, ceiling_range: tuple[float, float]
    ) -> None:
        """Applies new settings. Learned values and requests in flight are kept."""
        self._capacity = capacity
        self.health.settings = health
        self.limit.lowest_ceiling, self._highest_ceiling = ceiling_range
        self.limit.start_at(capacity.initial_batch_limit)
        if self.exploration is not None:
            self.exploration.learned(self.limit)
        self._changed()

    def set_limits_and_role(
        self, max_in_flight: int | None, prompt_range: tuple[int, int] | None = None, role: Role = Role.BOTH
    ) -> None:
        """Sets the configured batch limit (None: learned), range of prompt lengths in tokens (None: any) and role."""
        self.limit.cap(max_in_flight)
        self._prompt_range = prompt_range
        self._role = role
        self._changed()

    def set_external(self, external: External) -> None:
        """Makes this an external backend. It is up without polls, and only failed requests eject it."""
        self.external, self.served = external, external.models
        self.health.down = False
        self._changed()

    def replaced(self) -> None:
        """Discards metrics, batch limit and resident adapters, because a new process has the backend's name.

        The model list stays until the next one. The requests in flight of the old process count as load until they end.
        """
        # A replica is down until a poll succeeds.
        self.health.down = self.external is None
        self._forget_process()
        self.limit.forget()
        self._kind = self._restored = self._published = None

    # --- events of polls -----------------------------------------------------------------------------------------

    def listed(self, listing: Listing) -> None:
        self.listing = listing
        self.served = frozenset(card.name for card in listing.cards)
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
            self.limit.begin_at(known.limit, converged=known.settled)

    def restore(self, known: KnownLimit) -> None:
        """Sets a batch limit that an earlier proxy process learned, if the first model list shows the same engine."""
        self._restored = known
        self._begin()
        self._changed()

    def published(self, limit: int) -> None:
        """Sets the batch limit that the engine publishes. A change discards all that was learned about the limit."""
        if self._published not in (None, limit):
            self.limit.forget()
        self._published = limit
        self.limit.begin_at(limit, converged=True)
        self._changed()

    @property
    def known_limit(self) -> KnownLimit | None:
        """Returns the learned batch limit for `restore` in the next proxy process; None if nothing was learned."""
        known = self.limit.known
        if known is None or self._kind is None or self.reading is None:
            return None
        return KnownLimit(*known, *self._kind)

    def answered(self, now: float) -> None:
        """Records a successful poll, with or without metrics."""
        self.health.poll_succeeded(now)
        if self.reading is None:
            self._numberless_polls += 1
            if not self._unread or self._numberless_polls > UNREAD_MAX:
                self.limit.unpublished(self.in_flight)
        # A non-streamed answer sends no byte before its end, and not every server publishes counters.
        works = self.reading is None or (self.reading.running > 0 and self._generates)
        for lease, booking in self._own.unstarted_answers() if works else ():
            if now - booking.booked_s >= STARTED_AFTER_S:
                booking.started = True
                self.health.first_byte(lease, now)
        self._changed()

    def timed_out(self, now: float) -> None:
        """Records that the backend did not answer a request of a poll within `poll.timeout_s`."""
        self.health.poll_timed_out(now)
        self._changed()

    def unread(self) -> None:
        """Records that the metrics could not be read, although the backend may publish some."""
        self._unread = True

    def observe(self, reading: Reading) -> bool:
        """Learns the load, the batch limit and the health of the engine from a scrape of its metrics.

        A reading that is older than the last one is ignored. Returns whether a new process answers.
        """
        if self.reading is not None and reading.taken_at_s < self.reading.taken_at_s:
            return False
        new_process = self.reading is not None and reading.of_new_process(self.reading)
        if new_process:
            self._forget_process()
        before, self.reading = self.reading, reading
        self._generates = before is None or reading.generated is None or reading.generated != before.generated
        others = self._own.observe(reading)
        visible_s = reading.taken_at_s - GAUGE_LAG_S
        if reading.waiting == 0 and reading.running > 0 and self._generates:
            for lease, booking in self._own.unstarted_answers():
                if booking.booked_s <= visible_s:
                    booking.started = True
                    self.health.first_byte(lease, reading.taken_at_s)
        # Work of other clients must show in two consecutive readings, because a gauge may include ended requests.
        self._others, self._others_seen = min(others, self._others_seen), others
        if not self._own.waits_for_adapter(reading):
            proven = not self._others and self._own.waits_for_batch(reading)
            # A stream that has sent a byte was running, even if the reading is older.
            waiting = reading.waiting - self._own.fetching(reading)
            running = reading.running if waiting else max(reading.running, self._own.begun)
            kv_room = self._own.has_kv_room(reading)
            self.limit.observe(running, waiting, self.in_flight, proven=proven, kv_room=kv_room, pool=self.exploration)
        load = self._own.sequences
        if self.limit.converged and load >= self.limit.value and not self._others:
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
        return new_process

    def troubled(self, trouble: Trouble) -> bool:
        """Records a failed poll. Returns whether the process is certainly gone, and its open streams with it."""
        gone = self.health.poll_failed(trouble)
        if gone:
            self._forget_process()
        self._changed()
        return gone

    @property
    def own_in_flight(self) -> int:
        """The sequences in flight that this proxy sent."""
        return self._own.sequences

    @property
    def _counted(self) -> bool:
        """Whether the engine publishes the number of tokens that it has generated."""
        return self.reading is not None and self.reading.generated is not None

    @property
    def in_flight(self) -> int:
        """The sequences in flight, including those of other clients."""
        return self._own.sequences + self._others

    def _forget_process(self) -> None:
        self.processes += 1
        self.reading = None
        self._look_ahead = LookAhead()
        self._pinned_until_s.clear()
        self._resident.clear()
        self._others = self._others_seen = self._numberless_polls = 0
        self._unread = False
        self.limit.restarted()
        self._changed()

    # --- events of leases ----------------------------------------------------------------------------------------

    def needs_load(self, adapter: str | None) -> bool:
        """Returns whether the engine probably has to load `adapter`."""
        return adapter is not None and adapter not in self._resident

    def book(self, lease: int, request: Request, now: float, held_tokens: int = 0) -> None:
        """Adds a granted request. `held_tokens` of its prompt are in blocks that other requests use."""
        self._own.add(lease, request, request.prompt_tokens - held_tokens, now)
        self.cached_view = None
        if request.adapter is not None:
            self._resident.touch(request.adapter, self.reading.max_adapters if self.reading is not None else None)
            self._outline = None
        if self.health.ejected:
            self._outline = None
            self.health.booked(lease)
        elif self._unsteady:
            self._outline = None

    def reserve_slots(self, sequences: int) -> None:
        """Reserves slots for a decode stage during its prefill elsewhere. A negative number releases slots."""
        self.reserved += sequences
        self._changed()

    def pin_kv(self, request_id: str, until_s: float, now: float) -> None:
        """Records that the engine pins the KV blocks of a prefilled prompt until a fetch, or until `until_s`."""
        self.kv_pinned_until_s(now)
        self._pinned_until_s[request_id] = until_s

    def unpin_kv(self, request_id: str) -> None:
        """Records that the pinned KV blocks of a request were fetched, or will never be fetched."""
        self._pinned_until_s.pop(request_id, None)

    def kv_pinned_until_s(self, now: float) -> float | None:
        """Returns when the first pinned KV blocks expire without a fetch; None if none are pinned."""
        while (first := next(iter(self._pinned_until_s), None)) is not None:
            if self._pinned_until_s[first] > now:
                return self._pinned_until_s[first]
            del self._pinned_until_s[first]
        return None

    def started(self, lease: int, now: float) -> None:
        self._own.begin(lease)
        self.cached_view = None
        if self._unsteady:
            self._outline = None
        self.health.first_byte(lease, now)

    def release(self, lease: int, verdict: Verdict, now: float, *, excused: bool = False) -> None:
        """Removes a lease that ended. `excused`: the backend is not to blame for a failure."""
        if verdict is Verdict.BUSY and self.external is None:
            self.limit.refused(self.in_flight - self.bookings[lease].request.sequences)
        self._own.remove(lease, self.reading)
        idle = not self.bookings and (self.reading is None or not self.reading.running)
        self.cached_view = None
        if self._unsteady or verdict is not Verdict.SERVED:
            self._outline = None
        self.health.finished(
            lease, verdict, now, idle=idle, counted=self.health.slow and self._counted, excused=excused
        )

    def at_work(self, now: float) -> bool:
        """Returns whether a fresh scrape shows running sequences."""
        reading = self.reading
        return reading is not None and reading.running > 0 and now < reading.taken_at_s + self._capacity.stale_after_s

    def forgive(self, verdict: Verdict, now: float) -> None:
        """Reverts a failure with this verdict, because the request failed in the same way on another backend."""
        self._changed()
        self.health.forgive(verdict, now)

    def blame(self, verdict: Verdict, now: float) -> None:
        """Blames the backend for a refusal with this verdict, because another backend served the same request."""
        self._changed()
        self.health.blame(verdict, now)

    def eject_hung(self, hang: Hang, now: float) -> bool:
        """Ejects the backend as hung, if `Peers` allows it. Returns whether it is ejected."""
        self._changed()
        return self.health.eject_hung(hang, now)

    def eject_slow(self, why: str, now: float) -> bool:
        """Ejects the backend as slow, if `Peers` allows it. Returns whether it is ejected."""
        self._changed()
        return self.health.eject_slow(why, now)

    def shorten_ejection(self, now: float) -> None:
        """Shortens the pause of an ejection, because requests wait for a slot."""
        if self.health.shorten_ejection(now):
            self._changed()

    def measured(self, lease: int | None, fast: bool, now: float) -> None:
        """Records whether a backend that was ejected as slow is `fast` again.

        The stream of `lease` was measured, or, if `lease` is None, the engine's counter of generated tokens.
        """
        self._changed()
        self.health.measured(lease, fast, now)

    def unstarted(self, lease: int) -> bool:
        """Returns whether `lease` has no token yet: its stream has no byte, or its request waits in the engine.

        A non-streamed request waits in the engine if a scrape after its grant shows `n` waiting sequences, all sent by
        this proxy, and the request is among the newest `n`.
        """
        booking = self.bookings[lease]
        if booking.started or booking.request.stream:
            return not booking.started
        return not self._others and lease in self._own.last_waiting(self.reading)

    def queued(self, now: float) -> Iterator[int]:
        """Yields the leases that waited in the engine at the last fresh scrape, the newest first."""
        return self._own.last_waiting(self.reading) if self.view(now).waiting else iter(())

    def view_without(self, leases: list[int], now: float) -> View:
        """Returns the view that the backend would have without `leases`."""
        view = self.view(now)
        kv_used = view.kv_used
        if view.kv_tokens:
            kv_used -= self._own.sum_debits(leases) / view.kv_tokens
        sequences = sum(self.bookings[lease].request.sequences for lease in leases)
        return replace(view, load=view.load - sequences, kv_used=kv_used)

    # --- the view ------------------------------------------------------------------------------------------------

    def view(self, now: float) -> View:
        """Returns the view at `now`. The view is cached until an event or the clock changes it."""
        view = self.cached_view
        return self.make_view(now) if view is None or now >= self.view_until_s else view

    def changes_at(self, now: float) -> float | None:
        """Returns when a slot may become free without an event; None if only an event can free one."""
        if self.cached_view is None or now >= self.view_until_s:
            self.make_view(now)
        return None if self._changes_s == inf else self._changes_s

    def _changed(self) -> None:
        self.cached_view = self._outline = None

    def make_view(self, now: float) -> View:
        """Replaces the cached view by the state at `now`."""
        outline = self._outline
        if outline is None or now >= self.view_until_s:
            outline = self._outline = self._make_outline(now)
        own, limit, kv_used = self._own, outline.limit, outline.kv_used
        if outline.kv_tokens:
            kv_used += own.debit_tokens / outline.kv_tokens
        look_ahead = self._capacity.look_ahead
        elsewhere = 0 if self.exploration is None else self.exploration.proven_load
        view = self.cached_view = replace(
            outline,
            load=outline.load + own.sequences + self.reserved,
            kv_used=kv_used,
            look_ahead=self._look_ahead.requests(limit) if look_ahead is None else look_ahead,
            proven_load=min(limit, self.limit.proven_with(elsewhere)),
        )
        return view

    def _make_outline(self, now: float) -> View:
        """Returns the view without the proxy's own load. The parts of this view are expensive and change rarely."""
        health, capacity, reading = self.health, self._capacity, self.reading
        self._unsteady = health.ejected or (reading is not None and reading.deferred > 0)
        until_s = health.changes_at(now) or inf
        others, waiting, kv_used = 0, 0, 0.0
        kv_tokens = max_adapters = None
        if reading is not None and now >= reading.taken_at_s + capacity.stale_after_s:
            reading = None
        if reading is not None:
            until_s = min(until_s, reading.taken_at_s + capacity.stale_after_s)
            others = self._others
            waiting, max_adapters = reading.waiting - self._own.fetching(reading), reading.max_adapters
            kv_used, kv_tokens = reading.kv_used or 0.0, reading.kv_tokens
        self._changes_s = until_s
        # No request waits for slow start: a request that finds no room elsewhere is sent here at once.
        self.view_until_s = min(until_s, health.warmer_at(now) or inf)
        available = health.available(now) and not self.health.drained
        return View(
            backend=self.name,
            available=available,
            served=self.served,
            resident=self._resident.names(),
            max_adapters=max_adapters,
            max_model_len=self._max_model_len,
            prompt_range=self._prompt_range,
            limit=self.limit.value,
            load=others,
            waiting=waiting,
            kv_used=kv_used,
            kv_tokens=kv_tokens,
            look_ahead=0,
            kv_full_ratio=capacity.kv_full_ratio,
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
        assert self.reserved >= 0
