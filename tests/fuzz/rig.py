"""A proxy on a loop that runs while an example of a fuzz test does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TypeVar

import uvloop

T = TypeVar("T")


@contextmanager
def entered(block: AbstractAsyncContextManager[T]) -> Iterator[tuple[asyncio.Runner, T]]:
    """Yields a runner for coroutines on the loop of `block`, and the value of `block`."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        yield runner, runner.run(block.__aenter__())
        runner.run(block.__aexit__(None, None, None))
