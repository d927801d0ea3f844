"""The leases of one pool: which request has a place on which backend, from the grant to the end of the attempt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from msgspec import Struct

from llmproxy.core.backends.backend import Backend
from llmproxy.core.domain import Placed, Request, Revoke, Usage, Verdict


class LeaseRecord(Struct, eq=False):
    """`request` has a place on `backend` since `at_s`.

    `guaranteed`: it was granted by the minimum share of its band. `cold`: its adapter was not believed to be resident.
    `answers_on` keeps a place for the answer, where the lease is for the prompt alone. `prefilled_on` is the backend
    that computed the prompt, where the lease is for the answer alone and fetches it.
    `started`: the first token of its answer arrived.
    `on_old_process`: it runs on a process that another one has replaced, so that it does not end with the new one.
    """

    number: int
    request: Request
    placed: Placed
    backend: Backend
    at_s: float
    guaranteed: bool
    cold: bool
    answers_on: Backend | None = None
    prefilled_on: Backend | None = None
    started: bool = False
    on_old_process: bool = False


class LeaseObserver:
    """Is notified of what happens to the leases of one pool. Each method is an event that an observer may ignore."""

    def booked(self, lease: LeaseRecord, now: float) -> None:
        """The lease was granted."""

    def recomputing(self, lease: LeaseRecord) -> None:
        """What another backend computed for this answer is fetched by nobody."""

    def started(self, lease: LeaseRecord, now: float) -> None:
        """The first token of the answer arrived."""

    def committed(self, lease: LeaseRecord, now: float) -> None:
        """A first byte was sent to the client, so that the request cannot move to another backend any more."""

    def progress(self, lease: LeaseRecord, output_tokens: int, now: float) -> None:
        """The answer has about `output_tokens` so far."""

    def excuses(self, lease: LeaseRecord, verdict: Verdict, now: float) -> bool:  # noqa: ARG002
        """Whether the backend is not to blame for the end of a lease, asked before it is `finished`."""
        return False

    def finished(self, lease: LeaseRecord, verdict: Verdict, usage: Usage | None, now: float) -> None:
        """The lease is over. `usage` is None where nothing is known of its tokens."""

    def process_gone(self, backend: str) -> None:
        """The process behind `backend` is gone or was replaced, or the backend left the pool; leases may run on."""


class Leases:
    """Every lease of one pool by its number, and the one place that notifies its backend and the `observers`.

    `serial` numbers the leases of all pools in the order in which they are granted. Observers are called in their
    order, each only for the events that it overrides.
    """

    def __init__(self, serial: Iterator[int], observers: Sequence[LeaseObserver]) -> None:
        self._serial = serial
        self._on_booked = _overriding(observers, "booked")
        self._on_recomputing = _overriding(observers, "recomputing")
        self._on_started = _overriding(observers, "started")
        self._on_committed = _overriding(observers, "committed")
        self._on_progress = _overriding(observers, "progress")
        self._on_excuses = _overriding(observers, "excuses")
        self._on_finished = _overriding(observers, "finished")
        self._on_process_gone = _overriding(observers, "process_gone")
        self._held: dict[int, LeaseRecord] = {}
        self._revoked: list[int] = []
        self._newest = 0
        self._newest_of_old: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._held)

    # --- backends, and the processes behind them -----------------------------------------------------------------

    def attach(self, backend: str) -> None:
        """A backend came into the pool; leases that it has in other pools are not of this one."""
        self._newest_of_old[backend] = self._newest

    def detach(self, backend: str) -> None:
        """A backend left the pool; its leases run on."""
        del self._newest_of_old[backend]
        self._tell_process_gone(backend)

    def lost(self, backend: Backend) -> None:
        """The process behind a backend is gone: its leases are revoked."""
        self._end_process(backend)
        self.revoke(x for x, lease in self._held.items() if lease.backend is backend and not lease.on_old_process)

    def replaced(self, backend: Backend) -> None:
        """A new process has the name of a backend; leases on the old one run on, whatever the new one does."""
        self._end_process(backend)
        for lease in self._held.values():
            lease.on_old_process = lease.on_old_process or lease.backend is backend

    def revoke(self, leases: Iterable[int]) -> None:
        """These leases are to end at once, because their backend brings nothing any more."""
        self._revoked += leases

    def take_revoked(self) -> list[Revoke]:
        """The leases revoked since the last call that have not ended meanwhile."""
        if not self._revoked:
            return []
        numbers, self._revoked = self._revoked, []
        known = [self._held[number] for number in numbers if number in self._held]
        return [Revoke(lease.number, lease.request, lease.backend.name) for lease in known]

    def is_of_process(self, lease: int, backend: str) -> bool:
        """Whether a lease, perhaps ended, was granted on the process that is behind `backend` now, in this pool."""
        return backend in self._newest_of_old and lease > self._newest_of_old[backend]

    def _end_process(self, backend: Backend) -> None:
        # Lease numbers rise: all up to the newest one were granted on the process that is gone.
        if backend.name in self._newest_of_old:
            self._newest_of_old[backend.name] = self._newest
        self._tell_process_gone(backend.name)

    def _tell_process_gone(self, backend: str) -> None:
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
        """Open a lease and return its number. `guaranteed`: its band has it by its minimum share."""
        number = self._newest = next(self._serial)
        cold = backend.lacks(request.adapter)
        backend.book(number, request, now, placed.held_tokens)
        lease = self._held[number] = LeaseRecord(
            number, request, placed, backend, now, guaranteed, cold, answers_on, prefilled_on
        )
        for booked in self._on_booked:
            booked(lease, now)
        return number

    def recomputing(self, number: int) -> None:
        """What another backend computed for this answer is fetched by nobody, which proves nothing of that backend."""
        lease = self._held[number]
        if lease.prefilled_on is not None:
            lease.prefilled_on.fetched(lease.request.id)
            lease.prefilled_on = None
        for recomputing in self._on_recomputing:
            recomputing(lease)

    def started(self, number: int, now: float) -> None:
        """The first token of the answer arrived."""
        lease = self._held[number]
        lease.started = True
        lease.backend.started(number, now)
        for started in self._on_started:
            started(lease, now)

    def committed(self, number: int, now: float) -> None:
        """A byte went to the client, be it a token or not: the request stays where it is from now on."""
        lease = self._held[number]
        for committed in self._on_committed:
            committed(lease, now)

    def progress(self, number: int, output_tokens: int, now: float) -> None:
        """The answer has about so many tokens by now."""
        lease = self._held[number]
        for progress in self._on_progress:
            progress(lease, output_tokens, now)

    def finish(self, number: int, verdict: Verdict, now: float, usage: Usage | None = None) -> None:
        """Return a lease. `usage` is what the engine counted, or the tokens seen so far when it was cut short."""
        lease = self._held.pop(number)
        excused = verdict is not Verdict.SERVED and any(x(lease, verdict, now) for x in self._on_excuses)
        lease.backend.release(number, verdict, now, excused=excused)
        for finished in self._on_finished:
            finished(lease, verdict, usage, now)

    def check(self) -> None:
        for backend in {id(lease.backend): lease.backend for lease in self._held.values()}.values():
            backend.check()
            mine = {number for number, lease in self._held.items() if lease.backend is backend}
            assert mine <= backend.bookings.keys(), "a lease is not booked on its backend"


def _overriding(observers: Iterable[LeaseObserver], event: str) -> list[Callable[..., Any]]:
    """The methods for `event` of those observers that do not ignore it."""
    ignored = getattr(LeaseObserver, event)
    return [getattr(one, event) for one in observers if getattr(type(one), event) is not ignored]
