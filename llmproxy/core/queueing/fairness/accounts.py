"""What a policy remembers of flows, bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

IDLE_FLOWS_MAX = 10_000
"""Idle flows whose account is kept, so that a flow cannot shed its debt by pausing; the least recent is forgotten."""

Account = TypeVar("Account")


class Accounts(Generic[Account]):
    """One account for each flow that waits, and for the `IDLE_FLOWS_MAX` others that were heard of last.

    `make` opens an account; `forgotten` gets the name of an idle flow whose account was dropped to keep the bound.
    """

    def __init__(self, make: Callable[[], Account], forgotten: Callable[[str], object] | None = None) -> None:
        self._make = make
        self._forgotten = forgotten
        self._waiting: dict[str, Account] = {}
        self._idle: OrderedDict[str, Account] = OrderedDict()

    def find(self, flow: str) -> Account | None:
        return self._waiting.get(flow) or self._idle.get(flow)

    def all(self) -> Iterator[tuple[str, Account]]:
        """Every flow with its account."""
        yield from self._waiting.items()
        yield from self._idle.items()

    def open(self, flow: str) -> Account:
        """The account of `flow`, opened where there is none."""
        account = self._waiting.get(flow)
        return account if account is not None else self._rest(flow, self._idle.pop(flow, None) or self._make())

    def set_waiting(self, flow: str) -> Account:
        """The account of `flow`, which waits from now on."""
        account = self._waiting.get(flow)
        if account is None:
            account = self._waiting[flow] = self._idle.pop(flow, None) or self._make()
        return account

    def set_idle(self, flow: str) -> Account | None:
        """`flow` waits no more; its account, None where it did not wait."""
        account = self._waiting.pop(flow, None)
        return None if account is None else self._rest(flow, account)

    def drop(self, flow: str) -> None:
        """Close the account of `flow`."""
        self._waiting.pop(flow, None)
        self._idle.pop(flow, None)

    def _rest(self, flow: str, account: Account) -> Account:
        self._idle[flow] = account
        if len(self._idle) > IDLE_FLOWS_MAX:
            oldest, _ = self._idle.popitem(last=False)
            if self._forgotten is not None:
                self._forgotten(oldest)
        return account
