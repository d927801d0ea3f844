"""Reports leftovers of requests inside a proxy as JSON, on each connection to a UNIX socket.

This is a plugin of the proxy under test (`plugins: [benchmarks.soak.probe]`). SOAK_PROBE has the path of the socket.
The probe is needed because no metric counts tasks and timers.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import threading
from collections import Counter
from concurrent.futures import Future
from typing import Any

from llmproxy.app import Proxy

PATH_VARIABLE = "SOAK_PROBE"
SLEEP = "_set_result_unless_cancelled"
"""The name of the callback of `asyncio.sleep`. Such a timer is not counted, because the sleeping task is counted."""

_opened: list[tuple[Proxy, asyncio.AbstractEventLoop]] = []
_make = Proxy.__init__


def left(proxy: Proxy) -> dict[str, Any]:
    """Returns the leftovers of requests, read on the proxy's event loop.

    `check` is the result of the scheduler's own check of its sums.
    """
    now = asyncio.get_running_loop().time()
    pools, queued = proxy.pools, list(proxy.pools.queued().values())
    try:
        pools.check(now)
        check = "sound"
    except AssertionError as error:
        check = f"broken: {error}"
    return {
        "check": check,
        "requests": {
            "open_requests": proxy.handler.open_requests,
            "leases": proxy.dispatcher.leases,
            "sequences booked": sum(backend.own_in_flight for backend in pools.backends.values()),
            "queued": sum(requests for requests, _ in queued),
            "queued bytes": sum(size for _, size in queued),
            "waiting for a name": proxy.dispatcher.nameless,
            "kept bytes": proxy.handler.captured_bytes,
        },
        "tasks": Counter(task.get_coro().__qualname__ for task in asyncio.all_tasks()),  # type: ignore[union-attr]
        "timers": Counter(name for each in gc.get_objects() if (name := _timer(each, now)) is not None),
    }


def _timer(thing: Any, now: float) -> str | None:
    # Not isinstance: an object with a `__class__` of its own may raise.
    if type(thing).__name__ != "TimerHandle" or thing.cancelled() or thing.when() <= now:
        return None
    name = repr(thing)
    return None if SLEEP in name else name


def _answer() -> dict[str, Any]:
    """Reads the leftovers on the event loop, for a caller in another thread."""
    proxy, loop = _opened[-1]
    found: Future[dict[str, Any]] = Future()

    def look() -> None:
        try:
            found.set_result(left(proxy))
        except Exception as error:  # noqa: BLE001 - the waiting thread raises it
            found.set_exception(error)

    loop.call_soon_threadsafe(look)
    return found.result(10.0)


def _serve(listening: socket.socket) -> None:
    while True:
        connection, _ = listening.accept()
        with connection:
            connection.sendall(json.dumps(_answer()).encode())


def _listen(path: str) -> None:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()
    threading.Thread(target=_serve, args=(listening,), daemon=True).start()


def _remember(proxy: Proxy, *parts: Any) -> None:
    _make(proxy, *parts)
    _opened.append((proxy, asyncio.get_running_loop()))


if path := os.environ.get(PATH_VARIABLE):
    _listen(path)
    # The proxy has no hook that is of use to this benchmark alone.
    Proxy.__init__ = _remember  # type: ignore[method-assign,assignment]
