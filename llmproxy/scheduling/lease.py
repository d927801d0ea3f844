"""Leases: the right to use a backend for an attempt, and the protocols of their lender."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from msgspec import Struct

from llmproxy.core.backends.catalogue import Target
from llmproxy.core.domain import AdmissionKind, Grant, Request, Usage, Verdict


class AttemptProgress(Protocol):
    """Receives the events of the attempt of a lease. `now` is on the clock of the loop."""

    def recomputing(self, grant: Grant) -> None: ...
    def started(self, grant: Grant, now: float) -> None: ...
    def committed(self, grant: Grant, now: float) -> None: ...
    def progress(self, grant: Grant, output_tokens: int, now: float) -> None: ...


class Lender(Protocol):
    """Lends leases and takes them back."""

    async def wait(self, request: Request, excluded: frozenset[str], entry: AdmissionKind) -> Lease: ...

    def returned(self, lease: Lease) -> None: ...


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
    """The right to use one backend for one attempt. It is given back exactly once, at the end of its block."""

    grant: Grant
    _progress: AttemptProgress
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

    def recomputing(self) -> None:
        """The transfer of the prompt failed, so this backend computes the prompt itself."""
        self._progress.recomputing(self.grant)

    def started(self) -> None:
        """The first token of the answer arrived."""
        self._progress.started(self.grant, asyncio.get_running_loop().time())

    def committed(self) -> None:
        """The first byte of the answer is on its way to the client."""
        self._progress.committed(self.grant, asyncio.get_running_loop().time())

    def progress(self, output_tokens: int) -> None:
        """About `output_tokens` tokens of the answer have arrived by now."""
        self._progress.progress(self.grant, output_tokens, asyncio.get_running_loop().time())

    def cut(self, *, revoked: bool) -> None:
        """Ask the holder to end the attempt."""
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
        if self._lease is not None:
            self._dispatcher.returned(self._lease)
