"""The requests that this proxy has in flight on one backend, and the adapters that the backend has loaded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Set

from msgspec import Struct

from llmproxy.core.domain import DECODE, Reading, Request

GAUGE_LAG_S = 0.03  # A reading may omit younger requests: vLLM updates its gauges once per step, 10-26 ms late.
RESIDENT_ADAPTERS_MAX = 1_024  # Maximum of resident adapters for an engine that does not publish its slots.


class Booking(Struct, eq=False):
    request: Request
    booked_s: float
    started: bool = False  # Whether the engine runs the request, as a byte of the answer or a reading showed.
    begun: bool = False  # Whether the request is a stream that has sent a byte.


class Bookings:
    """The leases on one backend in the order of their grants."""

    def __init__(self) -> None:
        self.by_lease: dict[int, Booking] = {}
        self.sequences = 0  # Sequences in flight.
        self.high_water = 0  # Maximum of `sequences` since the last reading.
        self.begun = 0  # Sequences of streams that have sent a byte.
        self.debit_tokens = 0  # Prompt tokens booked after the last reading, which its KV usage does not include.
        self._debits: dict[int, int] = {}
        self._left_queue = 0

    def add(self, lease: int, request: Request, debit_tokens: int, now: float) -> None:
        self.by_lease[lease] = Booking(request, now)
        self.sequences += request.sequences
        self.high_water = max(self.high_water, self.sequences)
        self._debits[lease] = debit_tokens
        self.debit_tokens += debit_tokens

    def begin(self, lease: int) -> None:
        """Records that the engine has started a lease: a stream has sent its first byte, or an answer arrived."""
        booking = self.by_lease[lease]
        if booking.request.stream and not booking.begun:
            booking.begun = True
            self.begun += booking.request.sequences
        booking.started = True

    def remove(self, lease: int, reading: Reading | None) -> Booking:
        if reading is not None and reading.waiting and lease in self.last_waiting(reading):
            # The reading still counts the lease as waiting, and no earlier lease takes its place.
            self._left_queue += self.by_lease[lease].request.sequences
        booking = self.by_lease.pop(lease)
        self.sequences -= booking.request.sequences
        self.begun -= booking.request.sequences * booking.begun
        self.debit_tokens -= self._debits.pop(lease, 0)
        return booking

    def observe(self, reading: Reading) -> int:
        """Applies a new scrape. Returns how many sequences of other clients the scrape shows.

        The metrics may still count sequences that ended a moment ago. So the number shown is compared with the maximum
        of own sequences since the last scrape.
        """
        self._left_queue = 0
        for lease in [x for x in self._debits if self.by_lease[x].booked_s <= reading.taken_at_s - GAUGE_LAG_S]:
            self.debit_tokens -= self._debits.pop(lease)
        others = max(0, reading.running + reading.waiting - self.high_water)
        self.high_water = self.sequences
        return others

    def sum_debits(self, leases: list[int]) -> int:
        return sum(self._debits.get(lease, 0) for lease in leases)

    def last_waiting(self, reading: Reading | None) -> Iterator[int]:
        """Yields the leases that wait in the engine according to `reading`, the newest first.

        If the scrape shows `n` waiting sequences, these are the newest leases with up to `n` sequences, because the
        last requests to arrive are the last in an engine's queue.
        """
        if reading is None:
            return
        last = self._left_queue
        for lease, booking in reversed(self.by_lease.items()):
            if booking.booked_s > reading.taken_at_s - GAUGE_LAG_S:
                continue
            last += booking.request.sequences
            if last > reading.waiting:
                return
            yield lease

    def unstarted_answers(self) -> Iterator[tuple[int, Booking]]:
        """Returns the leases of non-streamed requests that are not known to have started."""
        return ((x, one) for x, one in self.by_lease.items() if not one.started and not one.request.stream)

    def waits_for_adapter(self, reading: Reading) -> bool:
        """Returns whether the engine's queue may be due to a lack of adapter slots. If so, the queue does not show the
        batch limit.
        """
        if reading.max_adapters is None or len(reading.running_adapters) < reading.max_adapters:
            return False
        adapters = {one.request.adapter for one in self.by_lease.values()} - {None}
        return not adapters <= reading.running_adapters

    def fetching(self, reading: Reading) -> int:
        """Returns how many sequences in the engine's queue wait for KV blocks of another backend."""
        if not reading.deferred:
            return 0
        unstarted = (one.request for one in self.by_lease.values() if not one.started)
        answers = sum(request.sequences for request in unstarted if request.stage is DECODE)
        return min(answers, reading.deferred, reading.waiting)

    def waits_for_batch(self, reading: Reading) -> bool:
        """Returns whether the requests in the engine's queue can only wait for batch slots, if no other client uses the
        engine.

        Returns True only if no prompt is in prefill and the KV cache has free blocks for each waiting prompt.
        Otherwise a step full of prompts or a full KV cache may be the cause of the queue.
        """
        return self.has_kv_room(reading) and sum(x.sequences for x in self._unstarted(reading)) <= reading.waiting

    def has_kv_room(self, reading: Reading) -> bool:
        """Returns whether the KV cache has free blocks for each waiting prompt. False if this is unknown."""
        if reading.kv_used is None or not reading.kv_tokens:
            return False
        free_tokens = (1.0 - reading.kv_used) * reading.kv_tokens
        return all(request.prompt_tokens < free_tokens for request in self._unstarted(reading))

    def _unstarted(self, reading: Reading) -> list[Request]:
        """Returns the requests that the reading shows, and that have no byte of an answer."""
        visible_s = reading.taken_at_s - GAUGE_LAG_S
        return [one.request for one in self.by_lease.values() if not one.started and one.booked_s <= visible_s]

    def check(self) -> None:
        assert self.sequences == sum(one.request.sequences for one in self.by_lease.values())
        assert self.begun == sum(one.request.sequences for one in self.by_lease.values() if one.begun)
        assert self.debit_tokens == sum(self._debits.values())
        assert self._debits.keys() <= self.by_lease.keys()


class ResidentAdapters:
    """The adapters that a backend probably has loaded. The least recently used adapter is evicted first."""

    def __init__(self) -> None:
        self._used: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, adapter: str) -> bool:
        return adapter in self._used

    def names(self) -> frozenset[str]:
        return frozenset(self._used)

    def touch(self, adapter: str, slots: int | None) -> None:
        self._used[adapter] = None
        self._used.move_to_end(adapter)
        self.evict(slots)

    def evict(self, slots: int | None) -> None:
        """Removes adapters beyond the engine's `slots`. `slots` is None if the engine does not publish the number."""
        while len(self._used) > (slots or RESIDENT_ADAPTERS_MAX):
            self._used.popitem(last=False)

    def keep(self, adapters: Set[str]) -> None:
        """Removes all adapters that are not in `adapters`."""
        for name in [name for name in self._used if name not in adapters]:
            del self._used[name]

    def clear(self) -> None:
        self._used.clear()
