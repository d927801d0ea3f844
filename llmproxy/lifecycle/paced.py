"""Spreads many calls that are due at once over several iterations of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

CALLS = 16
"""The maximum number of callbacks in one iteration of the event loop.

More would not be faster, and would delay running streams.
"""


class PacedCalls:
    """Runs callbacks in the order of `add`, at most CALLS in each iteration of the event loop.

    Each callback starts or ends a request, which takes up to a millisecond. Thousands may be added at once, and other
    work of the event loop must run in between.
    """

    def __init__(self) -> None:
        self._calls: deque[Callable[[], object]] = deque()
        self._taken = 0

    def take(self) -> bool:
        """Returns whether the caller may run its callback now, and then counts the callback. If False, call `add`."""
        if self._calls or self._taken >= CALLS:
            return False
        if not self._taken:
            asyncio.get_running_loop().call_soon(self._end_turn)
        self._taken += 1
        return True

    def __len__(self) -> int:
        """Returns the number of callbacks that wait."""
        return len(self._calls)

    def _end_turn(self) -> None:
        self._taken = 0

    def add(self, call: Callable[[], object]) -> None:
        """Runs `call` in a later iteration of the event loop. An exception goes to the loop's exception handler."""
        if not self._calls:
            asyncio.get_running_loop().call_soon(self._make_some)
        self._calls.append(call)

    def _make_some(self) -> None:
        try:
            for _ in range(min(len(self._calls), CALLS)):
                self._calls.popleft()()
        finally:
            if self._calls:
                asyncio.get_running_loop().call_soon(self._make_some)
