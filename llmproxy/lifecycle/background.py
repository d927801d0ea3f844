"""Background tasks: supervised work that is restarted after failures, and single tasks whose failures are logged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import structlog

PAUSE_MIN_S, PAUSE_MAX_S = 0.2, 30.0  # The shortest and the longest pause before failed work runs again.

Work = Callable[[], Coroutine[Any, Any, None]]
_log = structlog.get_logger()


def supervised(work: Work, name: str) -> asyncio.Task[None]:
    """Returns a task that runs `work`. If `work` raises, the task logs the exception and runs `work` again.

    Pauses grow with each failure. The task ends when `work` returns or the task is cancelled.
    """
    return asyncio.create_task(_supervise(work, name), name=name)


async def _supervise(work: Work, name: str) -> None:
    pause_s, now = PAUSE_MIN_S, asyncio.get_running_loop().time
    while True:
        began_s = now()
        try:
            return await work()
        except Exception as bug:  # noqa: BLE001 - otherwise the work would end silently
            if now() - began_s >= PAUSE_MAX_S:
                pause_s = PAUSE_MIN_S
            _log.error("task_failed", task=name, why=repr(bug)[:200], again_in_s=pause_s, exc_info=bug)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_MAX_S)


def spawned(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Returns a task that runs `work` once. Its exception is logged, because no caller awaits the task."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_log_failure)
    return task


def _log_failure(ended: asyncio.Task[None]) -> None:
    if not ended.cancelled() and (bug := ended.exception()) is not None:
        _log.error("task_failed", task=ended.get_name(), why=repr(bug)[:200], exc_info=bug)


@asynccontextmanager
async def background_task(work: Work, name: str) -> AsyncIterator[None]:
    """Runs `work` during the block, again after each failure, and cancels it at the end of the block."""
    task = supervised(work, name)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
