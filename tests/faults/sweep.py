"""Cancel a request at each of its waits, one run after the other, until one comes through.

A client may leave at any moment, and every await is one. Two moments matter at each: while it waits, and in the turn of
the loop in which it would have gone on, when it has been given a lease or a connection, which would be
lost with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from enum import Enum
from typing import Any

import pytest

from llmproxy.gateway.http.routes import Route
from llmproxy.gateway.proxying.handler import RequestHandler


class Moment(Enum):
    WAITING = "while it waits"
    RESUMED = "as it goes on"


class Swept:
    """Runs a coroutine and cancels its task at its `at`-th wait. `waits` counts them."""

    def __init__(self, context: Any, at: int, moment: Moment) -> None:
        self._request = context
        self._at = at
        self._moment = moment
        self.waits = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        context = self._request.__await__()
        resume: Callable[[], Any] = lambda: next(context)  # noqa: E731 - it is replaced for every resumption
        while True:
            try:
                waited_for = resume()
            except StopIteration as end:
                return end.value
            self.waits += 1
            if self.waits == self._at:
                self._cancel(waited_for)
            try:
                value = yield waited_for
            except BaseException as error:  # noqa: BLE001 - any exception is for the request
                resume = lambda error=error: context.throw(error)  # type: ignore[misc]  # noqa: E731
            else:
                resume = lambda value=value: context.send(value)  # type: ignore[misc]  # noqa: E731

    def _cancel(self, waited_for: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._moment is Moment.WAITING or waited_for is None:
            task.get_loop().call_soon(task.cancel)
            return
        # Its callbacks are called in the order in which they were added: this one before the wake-up of the task.
        waited_for.add_done_callback(lambda _: task.cancel())


def sweep(patch: pytest.MonkeyPatch, handler: RequestHandler, at: int, moment: Moment) -> list[Swept]:
    """Cancel the next requests at their `at`-th wait; they are in the list."""
    serve: Callable[[Route, Any], Awaitable[Any]] = type(handler).serve.__get__(handler)
    runs: list[Swept] = []

    async def swept(route: Route, *given: Any) -> Any:
        runs.append(Swept(serve(route, *given), at, moment))
        return await runs[-1]

    patch.setattr(handler, "serve", swept)
    return runs
