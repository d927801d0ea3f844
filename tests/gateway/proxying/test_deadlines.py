"""Attempts end at their limits, to a tenth of a second, and thousands of them do not hold up the loop."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from llmproxy.config import TimeoutsConfig
from llmproxy.core.retry import Cause
from llmproxy.gateway.proxying.deadlines import SWEEP_S, Deadlines, Timed
from llmproxy.lifecycle.paced import CALLS
from tests.dispatching import virtual

LIMITS = TimeoutsConfig(first_byte_s=2.0, stall_s=1.0, total_s=10.0)
ATTEMPTS = 10_000


def now() -> float:
    return asyncio.get_running_loop().time()


def timed(deadlines: Deadlines, stream: bool = True) -> Timed:
    return Timed(deadlines=deadlines, timeouts=LIMITS, now=asyncio.get_running_loop().time, stream=stream)


async def ended(timer: Timed) -> float:
    """Waits in the limits of an attempt. Returns when they end it."""
    with pytest.raises(TimeoutError), timer:
        await asyncio.Event().wait()
    return now()


@virtual
@pytest.mark.parametrize(
    ("streams", "chunks_s", "cause", "limit_s"),
    [
        (True, [], Cause.LATE, 2.0),
        (True, [0.5], Cause.STALLED, 1.5),
        (True, [1.95, 2.9, 3.0], Cause.STALLED, 4.0),
        (True, [0.5 * number for number in range(1, 30)], Cause.OVERRAN, 10.0),
        (False, [], Cause.OVERRAN, 10.0),
        # The answer begins after the first look at a limit that is far away.
        (False, [3.25], Cause.STALLED, 4.25),
    ],
)
async def test_an_attempt_ends_at_its_limit(streams: bool, chunks_s: list[float], cause: Cause, limit_s: float) -> None:
    timer = timed(Deadlines(), streams)
    for chunk_s in chunks_s:
        asyncio.get_running_loop().call_at(chunk_s, timer.streaming, chunk_s)
    at_s = await ended(timer)
    assert limit_s <= at_s <= limit_s + SWEEP_S + 1e-6
    assert timer.cause is cause


@virtual
async def test_ten_thousand_limits_in_one_sweep_end_a_few_attempts_in_each_turn() -> None:
    deadlines, loop = Deadlines(), asyncio.get_running_loop()
    turn, ends = 0, Counter[int]()

    def count() -> None:
        nonlocal turn
        turn += 1
        if sum(ends.values()) < ATTEMPTS:
            loop.call_soon(count)

    async def attempt() -> None:
        await ended(timed(deadlines))
        if not ends:
            loop.call_soon(count)
        ends[turn] += 1

    attempts = [asyncio.create_task(attempt()) for _ in range(ATTEMPTS)]
    await asyncio.gather(*attempts)
    assert now() <= 2.0 + SWEEP_S
    assert max(ends.values()) <= CALLS


@virtual
async def test_an_attempt_that_ends_in_time_is_forgotten() -> None:
    with timed(Deadlines()):
        await asyncio.sleep(1.0)
    await asyncio.sleep(20.0)


@virtual
async def test_a_cancellation_by_another_is_no_timeout() -> None:
    async def attempt() -> None:
        with timed(Deadlines()):
            await asyncio.Event().wait()

    task = asyncio.create_task(attempt())
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
