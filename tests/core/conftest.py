from __future__ import annotations

from collections.abc import Iterator

import pytest

from llmproxy.core.domain import Request
from llmproxy.core.queueing.fairness import FairnessPolicy, policies
from llmproxy.core.settings import Settings


class Ledger(FairnessPolicy):
    """Adds up the charges of all flows."""

    last: Ledger

    def __init__(self, settings: Settings) -> None:
        Ledger.last = self
        self._flows: dict[str, None] = {}
        self.charged = 0.0

    def backlogged(self, flow: str, head: Request) -> None:
        self._flows[flow] = None

    def emptied(self, flow: str) -> None:
        del self._flows[flow]

    def candidates(self, now: float) -> Iterator[str]:
        return iter(self._flows)

    def charge(self, flow: str, cost: float) -> None:
        self.charged += cost


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> type[Ledger]:
    """Makes `Ledger` the fairness policy. `ledger.last` is the instance that was made last."""
    monkeypatch.setattr(policies, "get", lambda _: Ledger)
    return Ledger
