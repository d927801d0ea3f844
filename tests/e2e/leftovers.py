"""A closed proxy must leave nothing behind.

Tasks, sockets and timers are compared with those before it was opened; whatever the loop had to report
in between, such as an exception that nobody retrieved, is a failure of the test. Warnings are errors in any case.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import stat
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import uvloop

from tests.upstream.raw_server import Peer

TESTS = str(Path(__file__).parents[1])
LIMIT_S = 5.0
"""How long connections that were closed may take to be gone."""


class CountingLoop(uvloop.Loop):
    """The loop of production, which remembers the timers that are set on it."""

    def __init__(self) -> None:
        super().__init__()
        self.timers: weakref.WeakSet[asyncio.TimerHandle] = weakref.WeakSet()

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return self._remembered(callback, super().call_at(when, callback, *args, context=context))

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return self._remembered(callback, super().call_later(delay, callback, *args, context=context))

    def _remembered(self, callback: object, handle: asyncio.TimerHandle) -> asyncio.TimerHandle:
        # Who sleeps is a task, and tasks are counted.
        if getattr(callback, "__name__", "") != "_set_result_unless_cancelled":
            self.timers.add(handle)
        return handle


def sockets() -> set[str]:
    """The TCP sockets that this process has open, those of backends below HTTP left out: they are the tests' own."""
    # Another socket gets the number of a descriptor that was closed, but never its inode.
    scripted = {peer.inode for peer in Peer.all}
    found = set()
    for fd in [int(entry.name) for entry in os.scandir("/proc/self/fd")]:
        with suppress(OSError):
            status = os.fstat(fd)
            if stat.S_ISSOCK(status.st_mode) and status.st_ino not in scripted and _is_tcp(fd):
                found.add(f"socket:[{status.st_ino}]")
    return found


def _is_tcp(fd: int) -> bool:
    with socket.socket(fileno=os.dup(fd)) as twin:
        return twin.family in (socket.AF_INET, socket.AF_INET6)


def tasks() -> set[asyncio.Task[Any]]:
    """The tasks that are not the tests' own."""
    me = asyncio.current_task()
    return {task for task in asyncio.all_tasks() if task is not me and not _source(task).startswith(TESTS)}


def _source(task: asyncio.Task[Any]) -> str:
    code = getattr(task.get_coro(), "cr_code", None)
    return code.co_filename if code is not None else ""


def timers() -> set[asyncio.TimerHandle]:
    """Returns the pending timers that were set from Python."""
    loop = asyncio.get_running_loop()
    now = loop.time()
    found = loop.timers if isinstance(loop, CountingLoop) else ()
    return {handle for handle in found if not handle.cancelled() and handle.when() > now}


def _left(before: set[object]) -> list[object]:
    return [each for each in (*tasks(), *sockets(), *timers()) if each not in before]


def _connections(left: list[object]) -> str:
    """The rows of the kernel's table (addresses, state, inode) of the sockets that are left."""
    inodes = {str(each)[8:-1] for each in left if isinstance(each, str)}
    table = Path("/proc/self/net/tcp").read_text() + Path("/proc/self/net/tcp6").read_text()
    return "\n".join(row for row in table.splitlines() if inodes & set(row.split()))


@asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """Check that the block gives back every task, socket and timer, and that the loop had nothing to report."""
    loop = asyncio.get_running_loop()
    reported: list[dict[str, Any]] = []
    before: set[object] = {*tasks(), *sockets(), *timers()}
    old = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: reported.append(context))
    try:
        yield
        end_s = loop.time() + LIMIT_S
        while left := _left(before):
            assert loop.time() < end_s, f"left behind: {left}\n{_connections(left)}"
            await asyncio.sleep(0.005)
        # An exception that was never retrieved is reported when its task is collected.
        gc.collect(1)
        await asyncio.sleep(0)
        assert not reported, reported
    finally:
        loop.set_exception_handler(old)
