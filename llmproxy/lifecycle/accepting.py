"""Accepts many waiting connections of a listening socket in one iteration of the event loop.

uvloop accepts one connection per iteration. In a burst of new clients, the last client would wait for as many
iterations as there are clients, and each iteration also serves all connected clients.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from functools import partial

import structlog

from llmproxy.lifecycle.descriptors import errno_reason

BACKLOG = 4096  # The number of connections that the kernel may queue for each socket.
ACCEPTS_MAX = 64
"""The maximum number of connections accepted from one socket in an iteration of the event loop. Each takes 0.2 ms."""
RETRY_S = 0.1  # For how long accepting pauses after this process or machine ran out of a resource, such as descriptors.
LOG_S = 60.0  # The minimum seconds between two log lines about a pause.

_log = structlog.get_logger()


class Acceptor:
    """Accepts connections on the sockets `opened` until `close`.

    `factory` makes the protocol of each connection. `accepted` is called with its transport; None calls nothing.
    """

    def __init__(
        self,
        opened: Iterable[socket.socket],
        factory: Callable[[], asyncio.BaseProtocol],
        accepted: Callable[[asyncio.Transport], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._factory = factory
        self._accepted = accepted
        self._sockets = list(opened)
        self._beginning: set[asyncio.Task[None]] = set()
        self._paused: dict[socket.socket, asyncio.TimerHandle] = {}
        self._logged_s = -LOG_S
        for one in self._sockets:
            one.setblocking(False)
            one.listen(BACKLOG)
            self._watch(one)

    def close(self) -> None:
        """Stops accepting and closes the listening sockets. Open connections stay."""
        for one in self._sockets:
            if (paused := self._paused.pop(one, None)) is not None:
                paused.cancel()
            else:
                self._loop.remove_reader(one)
            one.close()
        self._sockets.clear()

    def _watch(self, listening: socket.socket) -> None:
        self._paused.pop(listening, None)
        self._loop.add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS_MAX):
            try:
                connection, _ = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if (lack := errno_reason(error)) is not None:
                    self._pause(listening, lack)
                    return
                # The client disconnected before the accept.
                continue
            task = self._loop.create_task(self._begin(connection))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    async def _begin(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            transport, _ = await self._loop.connect_accepted_socket(self._factory, connection)
        except OSError:
            # The connection was reset meanwhile.
            connection.close()
            return
        if self._accepted is not None:
            self._accepted(transport)

    def _pause(self, listening: socket.socket, lack: str) -> None:
        """Stops accepting for RETRY_S. The socket stays readable, so the event loop would otherwise retry at once."""
        self._loop.remove_reader(listening)
        self._paused[listening] = self._loop.call_later(RETRY_S, partial(self._watch, listening))
        if self._loop.time() >= self._logged_s + LOG_S:
            self._logged_s = self._loop.time()
            _log.error("connections_not_accepted", why=lack, again_in_s=RETRY_S)
