"""A bounded store of a policy's accounts of flows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

IDLE_FLOWS_MAX = 10_000
"""Maximum number of idle flows that keep their account, and with it a debt. The longest idle flow is dropped."""

Account = TypeVar("Account")


class Accounts(Generic[Account]):
    """An account for each waiting flow, and for the `IDLE_FLOWS_MAX` idle flows that were used last.

    `make` creates an account. `forgotten` is called with the name of an idle flow whose account was dropped.
    """

    def __init__(self, make: Callable[[], Account], forgotten: Callable[[str], object] | None = None) -> None:
        self._make = make
        self._forgotten = forgotten
        self._waiting: dict[str, Account] = {}
        self._idle: OrderedDict[str, Account] = OrderedDict()

    def find(self, flow: str) -> Account | None:
        return self._waiting.get(flow) or self._idle.get(flow)

    def all(self) -> Iterator[tuple[str, Account]]:
        yield from self._waiting.items()
        yield from self._idle.items()

    def open(self, flow: str) -> Account:
        """Returns the account of `flow`, created as idle if there is none."""
        account = self._waiting.get(flow)
        return account if account is not None else self._rest(flow, self._idle.pop(flow, None) or self._make())

    def set_waiting(self, flow: str) -> Account:
        """Mark `flow` as waiting, and return its account."""
        account = self._waiting.get(flow)
        if account is None:
            account = self._waiting[flow] = self._idle.pop(flow, None) or self._make()
        return account

    def set_idle(self, flow: str) -> Account | None:
        """Mark `flow` as idle. Returns its account, None if it did not wait."""
        account = self._waiting.pop(flow, None)
        return None if account is None else self._rest(flow, account)

    def drop(self, flow: str) -> None:
        self._waiting.pop(flow, None)
        self._idle.pop(flow, None)

    def _rest(self, flow: str, account: Account) -> Account:
        self._idle[flow] = account
        if len(self._idle) > IDLE_FLOWS_MAX:
            oldest, _ = self._idle.popitem(last=False)
            if self._forgotten is not None:
                self._forgotten(oldest)
        return account
