"""One lease of a backend, and the base class of those that follow what happens to leases."""

from __future__ import annotations

from dataclasses import dataclass

from llmproxy.core.backends.backend import Backend
from llmproxy.core.domain import Placed, Request, Usage, Verdict


@dataclass(slots=True, eq=False)
class LeaseRecord:
    """`request` has a place on `backend` since `at_s`.

    `guaranteed`: it was granted by the minimum share of its band. `cold`: its adapter was not believed to be resident.
    `on_old_process`: it runs on a process that another one has replaced, so that it does not end with the new one.
    """

    number: int
    request: Request
    placed: Placed
    backend: Backend
    at_s: float
    guaranteed: bool
    cold: bool
    on_old_process: bool = False


class LeaseObserver:
    """Is told of what happens to the leases of one pool. Each method is an event that an observer may ignore."""

    def booked(self, lease: LeaseRecord, now: float) -> None:
        """The lease was granted."""

    def started(self, lease: LeaseRecord, now: float) -> None:
        """The first token of the answer arrived."""

    def committed(self, lease: LeaseRecord, now: float) -> None:
        """A first byte was sent to the client, so that the request cannot move to another backend any more."""

    def progress(self, lease: LeaseRecord, output_tokens: int, now: float) -> None:
        """The answer has about `output_tokens` so far."""

    def finished(self, lease: LeaseRecord, verdict: Verdict, usage: Usage | None, now: float) -> None:
        """The lease is over. `usage` is None where nothing is known of its tokens."""

    def process_gone(self, backend: str) -> None:
        """The process behind `backend` is gone or was replaced, or the backend left the pool; leases may run on."""
