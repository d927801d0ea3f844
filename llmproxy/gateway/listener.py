"""The server on the listening sockets for clients."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from socket import socket
from typing import Protocol

from aiohttp import web

from llmproxy.config import Config
from llmproxy.gateway.http.connection import ClientServer, ConnectionHandler
from llmproxy.gateway.http.tls import ClientTls
from llmproxy.gateway.proxying.handler import RequestHandler
from llmproxy.lifecycle.accepting import Acceptor
from llmproxy.lifecycle.background import background_task

CUT_AFTER_S = 0.1  # How long requests may still run after the drain. Not 0, because aiohttp takes 0 as no limit.
IDLE_CHECK_S = 0.05  # The interval of counting the open connections. aiohttp does not report when a connection ends.


@dataclass(slots=True)
class Listener:
    """A started server and its listening sockets."""

    server: web.Server
    runner: web.ServerRunner
    acceptor: Acceptor
    # The URL of the first socket, with the actual port.
    url: str
    # Whether the service manager (systemd) keeps the sockets open too, for the next process.
    socket_activated: bool

    async def close(self) -> None:
        """Accepts no more connections. Open connections stay."""
        self.acceptor.close()

    async def wait_closed(self) -> None:
        """Waits until no client connection is open."""
        while self.server.connections:  # noqa: ASYNC110 - see IDLE_CHECK_S
            await asyncio.sleep(IDLE_CHECK_S)


class Frontend(Protocol):
    """Serves clients, in this process or in worker processes. See `Listener` for `url` and `socket_activated`."""

    url: str
    socket_activated: bool

    @property
    def open_requests(self) -> int:
        """The number of requests that have begun and not ended."""

    def begin_shutdown(self, *, replaced: bool = False) -> None:
        """Called once when the shutdown begins. `replaced`: whether a successor has taken over the sockets."""

    async def close_sockets(self) -> None:
        """Accepts no more connections. Open connections stay."""

    async def wait_idle(self) -> None:
        """Waits until no request runs. If a successor has taken over, waits until no connection is open."""


@dataclass(slots=True)
class LocalFrontend:
    """The frontend of a process that serves clients itself, without worker processes."""

    handler: RequestHandler
    listener: Listener
    url: str
    socket_activated: bool

    @property
    def open_requests(self) -> int:
        return self.handler.open_requests

    def begin_shutdown(self, *, replaced: bool = False) -> None:
        del replaced  # The handler already knows.

    async def close_sockets(self) -> None:
        await self.listener.close()

    async def wait_idle(self) -> None:
        if self.handler.replaced:
            await self.listener.wait_closed()
        else:
            await self.handler.idle()


async def listen(
    stack: AsyncExitStack,
    handler: ConnectionHandler,
    config: Config,
    tls: ClientTls | None,
    opened: Iterable[socket],
    *,
    socket_activated: bool = False,
) -> Listener:
    """Starts a server that accepts connections on the `opened` sockets until `stack` closes.

    With `tls`, the server also follows changes of the certificate files. `socket_activated`: see `Listener`.
    """
    if tls is not None:
        await stack.enter_async_context(background_task(tls.watch, "follow the certificate"))
    server = ClientServer(handler, config.clients, tls.context if tls else None)
    runner = web.ServerRunner(server, handle_signals=False, shutdown_timeout=CUT_AFTER_S)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    sockets = list(opened)
    host, port = sockets[0].getsockname()[:2]
    acceptor = Acceptor(sockets, server)
    stack.callback(acceptor.close)
    url = f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
    return Listener(server, runner, acceptor, url, socket_activated)
