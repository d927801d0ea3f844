"""The requests that this proxy has in flight on one backend, and the adapters that they made resident there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Set

from msgspec import Struct

from llmproxy.core.domain import Reading, Request

GAUGE_LAG_S = 0.03
"""vLLM sets its gauges in engine steps, 10-26 ms late. A reading cannot contain younger work."""
RESIDENT_ADAPTERS_MAX = 1_024
"""Bound of the residency list of an engine that does not publish how many adapters it holds."""


class Booking(Struct, eq=False):
    request: Request
    booked_s: float
    started: bool = False
    begun: bool = False


class Bookings:
    """The leases on one backend in the order of their booking.

    `sequences` is their sum, `high_water` the most since the last reading. `begun` are the
    sequences of streams that have sent a byte. `debit_tokens` are prompt tokens booked
    after the last reading, which its KV use does not contain yet.
    """

    def __init__(self) -> None:
        self.by_lease: dict[int, Booking] = {}
        self.sequences = 0
        self.high_water = 0
        self.begun = 0
        self.debit_tokens = 0
        self._debits: dict[int, int] = {}
        self._left_queue = 0

    def add(self, lease: int, request: Request, debit_tokens: int, now: float) -> None:
        self.by_lease[lease] = Booking(request, now)
        self.sequences += request.sequences
        self.high_water = max(self.high_water, self.sequences)
        self._debits[lease] = debit_tokens
        self.debit_tokens += debit_tokens

    def begin(self, lease: int) -> None:
        """The first byte came."""
        booking = self.by_lease[lease]
        if booking.request.stream and not booking.begun:
            booking.begun = True
            self.begun += booking.request.sequences
        booking.started = True

    def remove(self, lease: int, reading: Reading | None) -> Booking:
        if lease in self.last_waiting(reading):
            # The reading still counts it, and earlier leases do not wait in its place.
            self._left_queue += self.by_lease[lease].request.sequences
        booking = self.by_lease.pop(lease)
        self.sequences -= booking.request.sequences
        self.begun -= booking.request.sequences * booking.begun
        self.debit_tokens -= self._debits.pop(lease, 0)
        return booking

    def observe(self, reading: Reading) -> int:
        """Take in a new reading. Answers how many more sequences it shows than we had in flight lately.

        A gauge still counts what ended a moment ago, so it is compared with the most since the last reading.
        """
        self._left_queue = 0
        for lease in [x for x in self._debits if self.by_lease[x].booked_s <= reading.taken_at_s - GAUGE_LAG_S]:
            self.debit_tokens -= self._debits.pop(lease)
        others = max(0, reading.running + reading.waiting - self.high_water)
        self.high_water = self.sequences
        return others

    def debits_of(self, leases: list[int]) -> int:
        return sum(self._debits.get(lease, 0) for lease in leases)

    def sequences_of(self, leases: list[int]) -> int:
        return sum(self.by_lease[lease].request.sequences for lease in leases)

    def last_waiting(self, reading: Reading | None) -> Iterator[int]:
        """The newest leases that `reading` has seen, up to as many sequences as it shows waiting; the newest first.

        An engine's queue holds what came last.
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
        """Leases without a stream that are not known to have started."""
        return ((x, one) for x, one in self.by_lease.items() if not one.started and not one.request.stream)

    def check(self) -> None:
        assert self.sequences == sum(one.request.sequences for one in self.by_lease.values())
        assert self.begun == sum(one.request.sequences for one in self.by_lease.values() if one.begun)
        assert self.debit_tokens == sum(self._debits.values())
        assert self._debits.keys() <= self.by_lease.keys()


class ResidentAdapters:
    """The adapters that a backend is believed to hold: the least recently used are evicted first."""

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
        """Keep as many as the engine has slots; None where it does not publish that."""
        while len(self._used) > (slots or RESIDENT_ADAPTERS_MAX):
            self._used.popitem(last=False)

    def keep(self, adapters: Set[str]) -> None:
        """Drop those that are not listed any more."""
        for name in [name for name in self._used if name not in adapters]:
            del self._used[name]

    def clear(self) -> None:
        self._used.clear()
