"""Calls that are due at once are made over several turns of the loop."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from llmproxy.lifecycle.paced import CALLS, PacedCalls


async def test_a_call_that_raises_holds_up_no_later_call() -> None:
    raised: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    paced, made = PacedCalls(), list[int]()
    for number in range(3 * CALLS):
        paced.add(partial(made.append, number) if number != 1 else partial(made.remove, number))
    for _ in range(10):
        await asyncio.sleep(0)
    assert made == [0, *range(2, 3 * CALLS)]
    assert len(raised) == 1
