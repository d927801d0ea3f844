"""Leases: the right to use a backend for an attempt, and the interface of the objects that grant them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from msgspec import Struct

from llmproxy.core.backends.catalogue import Target
from llmproxy.core.domain import AdmissionKind, Grant, Request, Usage, Verdict
from llmproxy.core.lease_events import LeaseEvent, Returned


class Leasing(Protocol):
    """The part of `Dispatcher` that requests use. The dispatcher may be in another process."""

    async def admit(
        self, request: Request, excluded: frozenset[str] = frozenset(), entry: AdmissionKind = AdmissionKind.NEW
    ) -> Lease: ...

    async def resolve(
        self, name: str | None, no_backend_wait_s: float, body_bytes: int, key: str = "", beside: str | None = None
    ) -> Target: ...

    def direct(self, backend: str, cut: Callable[[], None]) -> AbstractContextManager[None]: ...

    def ended(self, request: Request, met: bool | None) -> None: ...

    def cached(self, pool: str, lease: int, backend: str, hashes: Sequence[int]) -> None: ...

    @property
    def draining(self) -> bool: ...

    @property
    def granting(self) -> bool: ...


class Lease(Struct, eq=False):
    """The right to use one backend for one attempt. The lease is given back exactly once."""

    grant: Grant
    # Reports an event of this lease to the object that granted it. The time is on the event loop's clock.
    apply: Callable[[LeaseEvent, float], None]
    verdict: Verdict = Verdict.CLIENT_GONE  # Result of the attempt. The holder sets it before `give_back`.
    usage: Usage | None = None  # Tokens of the attempt, None if unknown. The holder sets it before `give_back`.
    on_cut: Callable[[], None] | None = None  # Called after `cut` has set some of the next four flags.
    revoked: bool = False  # Whether the backend is gone, so no answer will come.
    # Whether the backend hangs, or is `leaving` after the deadline of its drain. The holder may ignore the flag if no
    # other backend can go on with the attempt.
    hung: bool = False
    # Whether a request of a higher band needs the slot. A holder whose answer has begun may ignore the flag.
    preempted: bool = False
    leaving: bool = False  # Whether the backend was drained, so its end is planned. The attempt goes on.
    movable: bool = False  # Whether a further attempt may follow if the backend hangs. `run_attempts` sets it.

    @property
    def backend(self) -> str:
        return self.grant.placed.backend

    def cut(self, *, revoked: bool = False, hung: bool = False, preempted: bool = False, leaving: bool = False) -> None:
        """Sets the given flags, which stay set, and calls `on_cut`."""
        self.revoked, self.hung = self.revoked or revoked, self.hung or hung
        self.preempted, self.leaving = self.preempted or preempted, self.leaving or leaving
        if self.on_cut is not None:
            self.on_cut()

    def give_back(self, now: float) -> None:
        """Ends the lease, with the verdict and the usage that are set."""
        self.apply(Returned(self.grant.lease, self.verdict, self.usage), now)
