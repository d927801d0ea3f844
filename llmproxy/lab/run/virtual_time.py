"""An event loop whose clock jumps to the next timer. An hour of waiting takes no time, and runs are deterministic."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Answer = TypeVar("Answer")


class _Jump(selectors.SelectSelector):
    """A selector that moves the clock to the next timer instead of sleeping."""

    loop: VirtualTimeLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("every task waits, and no timer is set: nothing will ever happen again")
        if timeout > 0:
            self.loop.jump()
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop for pure asyncio code. It never polls sockets, subprocesses or threads."""

    def __init__(self) -> None:
        self._now_s = 0.0
        selector = _Jump()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self._now_s

    def jump(self) -> None:
        # The exact float of the timer: a sum of differences would have rounding errors.
        scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        self._now_s = max(self._now_s, scheduled[0].when())

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        # By default a failed callback is only logged, and the run would wait forever for its effect.
        if "handle" in context:
            raise context["exception"]
        super().call_exception_handler(context)


def run(main: Coroutine[Any, Any, Answer]) -> Answer:
    """Returns the result of `main`, run on a new loop at time 0. Raises RuntimeError if it waits without any timer."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
