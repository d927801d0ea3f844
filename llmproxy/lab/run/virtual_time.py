"""An event loop whose clock jumps to the next timer: an hour of waiting takes no time, and always the same turns."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Answer = TypeVar("Answer")


class _Jump(selectors.SelectSelector):
    """Where a loop would sleep until its next timer, this one moves the clock there instead."""

    loop: VirtualTimeLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("every task waits, and no timer is set: nothing will ever happen again")
        if timeout > 0:
            self.loop.jump()
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For pure asyncio code only: sockets, subprocesses and threads never get a turn."""

    def __init__(self) -> None:
        self._now_s = 0.0
        selector = _Jump()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self._now_s

    def jump(self) -> None:
        # The very float that the timer was set for, because a sum of differences may miss it by a hair.
        scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        self._now_s = max(self._now_s, scheduled[0].when())

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        # A callback that fails would otherwise be logged, and the run would wait for its effect in vain.
        if "handle" in context:
            raise context["exception"]
        super().call_exception_handler(context)


def run(main: Coroutine[Any, Any, Answer]) -> Answer:
    """The result of `main` on a fresh loop at time 0. Raises RuntimeError when it waits for what cannot come."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
