"""The base class of fairness policies, and the registry of their names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping

from llmproxy.core.domain import Request
from llmproxy.core.policy_registry import Registry
from llmproxy.core.settings import Settings


class FairnessPolicy(ABC):
    """Orders the flows of one band. It sees flows, charges and ends, never backends.

    A policy must define `backlogged`, `emptied` and `candidates`; the other methods are events that it may ignore. The
    order matters only when requests compete: while there is room for all, all are granted in the pass in which they
    came.
    """

    def __init__(self, settings: Settings) -> None:
        """A policy reads what it needs from `settings` once."""

    @abstractmethod
    def backlogged(self, flow: str, head: Request) -> None:
        """`flow` has requests waiting, and `head` is the first of them. Called again whenever the head changes."""

    @abstractmethod
    def emptied(self, flow: str) -> None:
        """`flow` has no request waiting any more; what it has in flight may still be charged."""

    @abstractmethod
    def candidates(self, now: float) -> Iterator[str]:
        """The backlogged flows in order of preference, each once. Close the iterator before changing anything."""

    def entered(self, request: Request, now: float) -> None:
        """`request` came into the waiting room for the first time."""

    def dispatched(self, flow: str) -> None:
        """A request of `flow` was granted a backend."""

    def charge(self, flow: str, cost: float) -> None:
        """Add `cost` to the account of `flow`; negative when an estimate was too high.

        The unit is the charged resource per unit of the request's weight, because the requests of a flow may have
        different weights.
        """

    def started(self, request: Request, now: float) -> None:
        """The first byte of the answer to `request` came."""

    def ended(self, request: Request, met: bool | None, now: float) -> None:
        """`request` is over, whether or not it ever waited. `met` says whether it kept its objective.

        `met` is None when there was no objective, or when the client left.
        """

    def balances(self) -> Mapping[str, float]:
        """What each known flow was charged beyond the others, for `restore` of a process that goes on in the place of
        this one; none where this policy keeps nothing of the past."""
        return {}

    def restore(self, balances: Mapping[str, float]) -> None:
        """Take over what another process knew of these flows, when those that waited there wait here."""

    def standing(self, flow: str) -> tuple[tuple[str, float], ...]:
        """(Name, value) pairs that show an operator what this policy counts for `flow` now."""
        return ()


policies: Registry[Callable[[Settings], FairnessPolicy]] = Registry("fairness policy")
