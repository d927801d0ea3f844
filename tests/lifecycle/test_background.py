"""Background work: an unexpected exception is logged, and the work restarts."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from itertools import pairwise
from typing import Any

from structlog.testing import capture_logs

from llmproxy.lab.run.virtual_time import run
from llmproxy.lifecycle.background import PAUSE_MAX_S, PAUSE_MIN_S, background_task, spawned, supervised


def failures(lines: list[MutableMapping[str, Any]]) -> list[tuple[str, str, str]]:
    return [(line["event"], line["task"], line["why"]) for line in lines]


def test_work_that_fails_starts_again_ever_more_slowly() -> None:
    began: list[float] = []

    async def fail() -> None:
        began.append(asyncio.get_running_loop().time())
        raise RecursionError("too deep")

    async def main() -> None:
        async with background_task(fail, "follow"):
            await asyncio.sleep(1_000)

    with capture_logs() as lines:
        run(main())
    pauses_s = [round(after - before, 6) for before, after in pairwise(began)]
    assert pauses_s[:3] == [PAUSE_MIN_S, 2 * PAUSE_MIN_S, 4 * PAUSE_MIN_S]
    assert pauses_s[-1] == PAUSE_MAX_S
    assert failures(lines) == [("task_failed", "follow", "RecursionError('too deep')")] * len(began)


def test_work_that_lasted_starts_again_at_once() -> None:
    began: list[float] = []

    async def fail_after_a_while() -> None:
        began.append(asyncio.get_running_loop().time())
        await asyncio.sleep(PAUSE_MAX_S)
        raise ValueError

    async def main() -> None:
        async with background_task(fail_after_a_while, "follow"):
            await asyncio.sleep(10 * PAUSE_MAX_S)

    with capture_logs():
        run(main())
    assert {round(after - before, 6) for before, after in pairwise(began)} == {PAUSE_MAX_S + PAUSE_MIN_S}


async def test_work_that_ends_or_is_cancelled_is_over() -> None:
    began = 0

    async def end() -> None:
        nonlocal began
        began += 1

    with capture_logs() as lines:
        await supervised(end, "ends")
        task = supervised(asyncio.Event().wait, "waits")  # type: ignore[arg-type] # the result is not used
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert (began, lines) == (1, [])


async def test_work_that_is_done_once_fails_aloud() -> None:
    async def fail() -> None:
        raise KeyError("x")

    with capture_logs() as lines:
        await asyncio.gather(spawned(fail(), "leave a"), return_exceptions=True)
        await asyncio.sleep(0)
    assert failures(lines) == [("task_failed", "leave a", "KeyError('x')")]
