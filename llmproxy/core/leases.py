"""The leases of one pool. A lease gives a request a slot on a backend from the grant to the end of the attempt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from msgspec import Struct

from llmproxy.core.backends.backend import Backend
from llmproxy.core.domain import WHOLE, Placed, Request, Revoke, Verdict
from llmproxy.core.lease_events import Committed, LeaseEvent, Progress, Recomputing, Returned, Started


class LeaseRecord(Struct, eq=False):
    """The slot of a request on a backend."""

    number: int
    request: Request
    placed: Placed
    backend: Backend
    at_s: float
    guaranteed: bool  # Whether the grant was due to the minimum share of the band.
    cold: bool  # Whether the adapter probably had to be loaded.
    # For a prefill stage, the backend with the reserved slot for the decode stage; else None.
    answers_on: Backend | None = None
    # For a decode stage, the backend from which the KV blocks are fetched; else None.
    prefilled_on: Backend | None = None
    started: bool = False  # Whether the event `Started` came.
    # Whether the lease runs on a replaced process, so it does not end with the new process.
    on_old_process: bool = False


class LeaseObserver:
    """Observes the leases of one pool. A subclass overrides the methods that it needs."""

    only_stages = False  # Whether it observes only the stages of split requests.
    only_limited = False  # Whether it observes only requests with usage limits.

    def booked(self, lease: LeaseRecord, now: float) -> None:
        """Called when a request was granted a slot, and its lease begins."""

    def started(self, lease: LeaseRecord, event: Started, now: float) -> None:
        """Called when the first token of a stream, or the first bytes of another answer, arrived."""

    def committed(self, lease: LeaseRecord, event: Committed, now: float) -> None:
        """Called when the first byte of a stream was sent to the client. Another backend can only generate the rest."""

    def progress(self, lease: LeaseRecord, event: Progress, now: float) -> None:
        """Called when more tokens of the answer arrived."""

    def recomputing(self, lease: LeaseRecord, event: Recomputing, now: float) -> None:
        """Called when a decode stage computes the prompt instead of fetching the KV blocks."""

    def returned(self, lease: LeaseRecord, event: Returned, now: float) -> None:
        """Called when the attempt ended, after the lease was closed."""

    def excuses(self, lease: LeaseRecord, verdict: Verdict, now: float) -> bool:  # noqa: ARG002
        """Returns whether the backend is not to blame for a lease that did not end with SERVED.

        Called before `returned`, until an observer returns True.
        """
        return False

    def process_gone(self, backend: str) -> None:
        """Called when the process behind `backend` is gone or replaced, or the backend left the pool.

        Leases on the backend may continue.
        """


METHODS: Mapping[type[LeaseEvent], Callable[..., None]] = {
    Progress: LeaseObserver.progress,
    Started: LeaseObserver.started,
    Committed: LeaseObserver.committed,
    Returned: LeaseObserver.returned,
    Recomputing: LeaseObserver.recomputing,
}
"""The method of an observer for each event."""


class _Observers(NamedTuple):
    """The methods to call for one kind of lease."""

    booked: list[Callable[[LeaseRecord, float], None]]
    events: dict[type[LeaseEvent], list[Callable[[LeaseRecord, Any, float], None]]]


class Leases:
    """The open leases of one pool. Passes each event of a lease to its backend and to the observers.

    Observers are called in their order, each only if it overrides the method. `serial` numbers the leases of all pools
    in the order of their grants.
    """

    def __init__(self, serial: Iterator[int], observers: Sequence[LeaseObserver]) -> None:
        self._serial = serial
        # (whole request, no usage limits) -> the observers of such a lease.
        self._observers: dict[tuple[bool, bool], _Observers] = {}
        for whole, unlimited in product((False, True), repeat=2):
            called = [one for one in observers if not ((one.only_stages and whole) or (one.only_limited and unlimited))]
            events = {event: _overriding(called, method) for event, method in METHODS.items()}
            self._observers[whole, unlimited] = _Observers(_overriding(called, LeaseObserver.booked), events)
        self._on_excuses = _overriding(observers, LeaseObserver.excuses)
        self._on_process_gone = _overriding(observers, LeaseObserver.process_gone)
        self._open: dict[int, LeaseRecord] = {}
        # Numbers of the leases for the next `take_revoked`, each with whether its backend hangs.
        self.revoked: list[tuple[int, bool]] = []
        self._newest = 0
        self._newest_of_old: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._open)

    # --- backends, and the processes behind them -----------------------------------------------------------------

    def attach(self, backend: str) -> None:
        """Adds a backend to the pool. Leases on this backend in other pools stay there."""
        self._newest_of_old[backend] = self._newest

    def detach(self, backend: str) -> None:
        """Removes a backend from the pool. Its leases continue."""
        del self._newest_of_old[backend]
        self._notify_process_gone(backend)

    def restarted(self, backend: Backend) -> None:
        """Notes that the process of a backend is gone, and revokes no lease."""
        # Lease numbers increase, so all numbers up to the newest belong to the process that is gone.
        if backend.name in self._newest_of_old:
            self._newest_of_old[backend.name] = self._newest
        self._notify_process_gone(backend.name)

    def lost(self, backend: Backend) -> None:
        """Revokes the leases of a backend whose process is gone."""
        self.restarted(backend)
        self.revoke(x for x, lease in self._open.items() if lease.backend is backend and not lease.on_old_process)

    def replaced(self, backend: Backend) -> None:
        """Notes that a new process has the name of a backend. Leases on the old process continue independently."""
        self.restarted(backend)
        for lease in self._open.values():
            lease.on_old_process = lease.on_old_process or lease.backend is backend

    def revoke(self, leases: Iterable[int], *, hung: bool = False) -> None:
        """Marks leases for `take_revoked`, because their backend is gone or hangs."""
        self.revoked += [(lease, hung) for lease in leases]

    def take_revoked(self) -> list[Revoke]:
        """Returns the open leases that were revoked since the last call."""
        if not self.revoked:
            return []
        revoked, self.revoked = self.revoked, []
        leases = [(self._open[number], hung) for number, hung in revoked if number in self._open]
        return [Revoke(lease.number, lease.request, lease.backend.name, hung) for lease, hung in leases]

    def is_on_current_process(self, lease: int, backend: str) -> bool:
        """Returns whether a lease, open or ended, was granted in this pool on the current process of `backend`."""
        return backend in self._newest_of_old and lease > self._newest_of_old[backend]

    def _notify_process_gone(self, backend: str) -> None:
        for process_gone in self._on_process_gone:
            process_gone(backend)

    # --- the life of a lease -------------------------------------------------------------------------------------

    def book(
        self,
        request: Request,
        placed: Placed,
        backend: Backend,
        now: float,
        *,
        guaranteed: bool = False,
        answers_on: Backend | None = None,
        prefilled_on: Backend | None = None,
    ) -> int:
        """Opens a lease for a granted request and returns the number of the lease.

        Adds the request to the load of `backend`, and calls the observers. The keyword arguments are fields of
        `LeaseRecord`.
        """
        number = self._newest = next(self._serial)
        cold = request.adapter is not None and backend.needs_load(request.adapter)
        backend.book(number, request, now, placed.held_tokens)
        lease = self._open[number] = LeaseRecord(
            number, request, placed, backend, now, guaranteed, cold, answers_on, prefilled_on
        )
        for booked in self._observers[request.stage is WHOLE, not request.limits].booked:
            booked(lease, now)
        return number

    def apply(self, event: LeaseEvent, now: float) -> None:
        """Applies an event of an open lease. `Returned` closes the lease."""
        lease = self._open[event.lease]
        request = lease.request
        match event:
            # The cases are tried in this order: the frequent ones come first.
            case Progress() | Committed():
                pass
            case Started():
                lease.started = True
                lease.backend.started(lease.number, now)
            case Returned(number, verdict):
                del self._open[number]
                excused = verdict is not Verdict.SERVED and any(x(lease, verdict, now) for x in self._on_excuses)
                lease.backend.release(number, verdict, now, excused=excused)
            case Recomputing():
                if lease.prefilled_on is not None:
                    lease.prefilled_on.unpin_kv(request.id)
                    lease.prefilled_on = None
        for observe in self._observers[request.stage is WHOLE, not request.limits].events[type(event)]:
            observe(lease, event, now)

    def check(self) -> None:
        for backend in {id(lease.backend): lease.backend for lease in self._open.values()}.values():
            backend.check()
            mine = {number for number, lease in self._open.items() if lease.backend is backend}
            assert mine <= backend.bookings.keys(), "a lease is not booked on its backend"


def _overriding(observers: Iterable[LeaseObserver], method: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Returns the bound `method` of each observer that overrides this method of `LeaseObserver`."""
    name = method.__name__
    return [getattr(one, name) for one in observers if getattr(type(one), name) is not method]
