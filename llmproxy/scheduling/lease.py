"""Leases: the right to use a backend for an attempt, and the interfaces of the objects that grant them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from msgspec import Struct

from llmproxy.core.backends.catalogue import Target
from llmproxy.core.domain import AdmissionKind, Grant, Request, Usage, Verdict
from llmproxy.core.lease_events import LeaseEvent, Returned


class Lender(Protocol):
    """Grants leases."""

    async def wait(self, request: Request, excluded: frozenset[str], entry: AdmissionKind) -> Lease: ...


class Leasing(Protocol):
    """The part of `Dispatcher` that requests use. The dispatcher may be in another process."""

    def admit(
        self, request: Request, excluded: frozenset[str] = frozenset(), entry: AdmissionKind = AdmissionKind.NEW
    ) -> Admitted: ...

    async def resolve(
        self, name: str | None, no_backend_wait_s: float, body_bytes: int, key: str = "", beside: str | None = None
    ) -> Target: ...

    def direct(self, backend: str, cut: Callable[[], None]) -> AbstractContextManager[None]: ...

    def ended(self, request: Request, met: bool | None) -> None: ...

    def cached(self, grant: Grant, hashes: Sequence[int]) -> None: ...

    @property
    def draining(self) -> bool: ...

    @property
    def granting(self) -> bool: ...


class Lease(Struct, eq=False):
    """The right to use one backend for one attempt. The lease is given back exactly once, at the end of its block."""

    grant: Grant
    # Reports an event of this lease to its lender. The time is on the clock of the loop.
    apply: Callable[[LeaseEvent, float], None]
    # The holder sets `verdict` and `usage` before the end.
    verdict: Verdict = Verdict.CLIENT_GONE
    usage: Usage | None = None
    # Called when the attempt must end at once, after a flag below was set.
    on_cut: Callable[[], None] | None = None
    # The backend is gone or hangs, so no answer will come.
    revoked: bool = False
    # A request of a higher band needs the place. The holder may ignore this if its answer has begun.
    preempted: bool = False

    @property
    def backend(self) -> str:
        return self.grant.placed.backend

    def cut(self, *, revoked: bool) -> None:
        """Asks the code that uses the lease to end the attempt."""
        self.revoked, self.preempted = self.revoked or revoked, self.preempted or not revoked
        if self.on_cut is not None:
            self.on_cut()


class Admitted:
    """The async context manager of a lease. It is a class because a generator would be slower."""

    __slots__ = ("_dispatcher", "_entry", "_excluded", "_lease", "_request")

    def __init__(self, dispatcher: Lender, request: Request, excluded: frozenset[str], entry: AdmissionKind) -> None:
        self._dispatcher = dispatcher
        self._request = request
        self._excluded = excluded
        self._entry = entry
        self._lease: Lease | None = None

    async def __aenter__(self) -> Lease:
        lease = self._lease = await self._dispatcher.wait(self._request, self._excluded, self._entry)
        return lease

    async def __aexit__(self, *_: object) -> None:
        lease = self._lease
        if lease is not None:
            returned = Returned(lease.grant.lease, lease.verdict, lease.usage)
            lease.apply(returned, asyncio.get_running_loop().time())
