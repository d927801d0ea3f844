"""A bounded store of the accounts that a policy keeps for its flows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

IDLE_FLOWS_MAX = 10_000  # Maximum number of idle flows with an account. The longest idle flow is dropped.

Account = TypeVar("Account")


class Accounts(dict[str, Account]):
    """An account for each waiting flow, and for the `IDLE_FLOWS_MAX` idle flows that were used last.

    `accounts[flow]` and `open` create the account of an unknown flow as idle.
    """

    def __init__(self, make: Callable[[], Account], forgotten: Callable[[str], object] | None = None) -> None:
        super().__init__()
        self._make = make
        self._forgotten = forgotten  # Called with the name of an idle flow whose account was dropped.
        self.idle: OrderedDict[str, None] = OrderedDict()  # The idle flows, the flow that was used last at the end.

    def __missing__(self, flow: str) -> Account:
        account = self[flow] = self._make()
        self.set_idle(flow)
        return account

    def open(self, flow: str) -> Account:
        """Returns the account of `flow`, created as idle if there is none. Marks an idle flow as used last."""
        account = self[flow]
        if flow in self.idle:
            self.idle.move_to_end(flow)
        return account

    def set_waiting(self, flow: str) -> Account:
        """Marks `flow` as waiting, and returns its account."""
        account = self.get(flow)
        if account is None:
            account = self[flow] = self._make()
        self.idle.pop(flow, None)
        return account

    def set_idle(self, flow: str) -> None:
        """Marks `flow` as idle, and as the flow that was used last."""
        self.idle[flow] = None
        self.idle.move_to_end(flow)
        if len(self.idle) > IDLE_FLOWS_MAX:
            oldest, _ = self.idle.popitem(last=False)
            del self[oldest]
            if self._forgotten is not None:
                self._forgotten(oldest)

    def drop(self, flow: str) -> None:
        self.pop(flow, None)
        self.idle.pop(flow, None)
