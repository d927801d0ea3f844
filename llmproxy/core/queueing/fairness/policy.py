"""The base class of fairness policies, and the registry of their names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping

from llmproxy.core.domain import Request
from llmproxy.core.policy_registry import Registry
from llmproxy.core.settings import Settings


class FairnessPolicy(ABC):
    """Orders the flows of one band. A policy sees flows, charges and ends of requests, never backends.

    A subclass must define `backlogged`, `emptied` and `candidates`. The other methods are optional events. The order
    matters only when requests compete: while slots are free, each request is granted as soon as it arrives.
    """

    def __init__(self, settings: Settings) -> None:
        """Reads the settings that the policy needs. Overridden by policies with settings."""

    @abstractmethod
    def backlogged(self, flow: str, head: Request) -> None:
        """Records that `head` is now the first waiting request of `flow`."""

    @abstractmethod
    def emptied(self, flow: str) -> None:
        """Records that `flow` has no more waiting requests. Its requests in flight may still be charged."""

    @abstractmethod
    def candidates(self, now: float) -> Iterator[str]:
        """Yields the backlogged flows in order of preference, each once. Close the iterator before any other call."""

    def entered(self, request: Request, now: float) -> None:
        """Records that `request` entered the waiting room for the first time."""

    def dispatched(self, flow: str) -> None:
        """Records that a request of `flow` was granted a backend."""

    def charge(self, flow: str, cost: float) -> None:
        """Adds `cost` to the account of `flow`. `cost` is negative if an estimate was too high.

        The unit is the charged resource per unit of the request's weight, because the requests of a flow may have
        different weights.
        """

    def started(self, request: Request, now: float) -> None:
        """Records the first token of a stream, or the grant of a request without a stream."""

    def ended(self, request: Request, met: bool | None, now: float) -> None:
        """Records the end of `request`. `met`: whether its objective was met; None if that is unknown."""

    def balances(self) -> Mapping[str, float]:
        """Maps flows to their charges relative to a common level, for `restore` in another process or pool."""
        return {}

    def restore(self, balances: Mapping[str, float]) -> None:
        """Takes over the balances of another process or pool. Call this after its waiting requests were moved here."""

    def standing(self, flow: str) -> tuple[tuple[str, float], ...]:
        """Returns (name, value) pairs of the account of `flow`, for logs and debug pages."""
        return ()


policies: Registry[Callable[[Settings], FairnessPolicy]] = Registry("fairness policy")
