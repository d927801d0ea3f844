"""The face of a fairness policy, and the registry of their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from llmproxy.core.domain import Request
from llmproxy.core.policy_registry import Registry
from llmproxy.core.settings import Settings


class FairnessPolicy(Protocol):
    """Orders the flows of one band. It sees flows, charges and ends, never backends.

    It acts only where there is something to choose: while there is room for everybody, everybody is granted in the
    pass in which they came, in whatever order.
    """

    def entered(self, request: Request, now: float) -> None:
        """`request` came into the waiting room for the first time."""

    def backlogged(self, flow: str, head: Request) -> None:
        """`flow` has requests waiting, and `head` is the first of them now; told again whenever the head changes."""

    def emptied(self, flow: str) -> None:
        """`flow` has nothing waiting any more; what it has in flight may still be charged."""

    def candidates(self, now: float) -> Iterator[str]:
        """The backlogged flows in order of preference, each once. Close the iterator before changing anything."""

    def dispatched(self, flow: str) -> None:
        """A request of `flow` was granted a backend."""

    def charge(self, flow: str, cost: float) -> None:
        """Add `cost` to the account of `flow`; negative where an estimate was too high.

        In the charged resource per unit of the request's weight, so that a flow may hold requests of several weights.
        """

    def started(self, request: Request, now: float) -> None:
        """The first byte of an answer to `request` came."""

    def ended(self, request: Request, met: bool | None, now: float) -> None:
        """`request` has left the house, whether or not it ever waited. `met` says whether it kept its objective.

        None where that is nobody's merit or fault: no objective, or a client that left.
        """

    def standing(self, flow: str) -> tuple[tuple[str, float], ...]:
        """What this policy holds of `flow` now, for a person to read: (name, value) pairs."""


class Fairness:
    """For a policy that needs to hear only of some events."""

    def entered(self, request: Request, now: float) -> None:
        pass

    def dispatched(self, flow: str) -> None:
        pass

    def charge(self, flow: str, cost: float) -> None:
        pass

    def started(self, request: Request, now: float) -> None:
        pass

    def ended(self, request: Request, met: bool | None, now: float) -> None:
        pass

    def standing(self, flow: str) -> tuple[tuple[str, float], ...]:
        del flow
        return ()


policies: Registry[Callable[[Settings], FairnessPolicy]] = Registry("fairness policy")
