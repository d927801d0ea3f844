"""Where clients come in, whichever process they come to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from socket import socket
from typing import Any, Protocol

from aiohttp import web

from llmproxy.config import Config
from llmproxy.gateway.http.connection import ClientServer, Door
from llmproxy.gateway.http.listener import Listener
from llmproxy.gateway.http.tls import ClientTls
from llmproxy.gateway.proxying.handler import RequestHandler

BACKLOG = 4096
CUT_AFTER_S = 0.1
"""How long requests that outlived the drain get before they are cut; the server library takes 0 for "for ever"."""


class Front(Protocol):
    """Who has the clients: this process, or its relay workers. `held` is that of the `Listener`."""

    url: str
    held: bool

    @property
    def open_requests(self) -> int:
        """Requests that have come in and not ended."""

    def begin_shutdown(self, *, replaced: bool = False) -> None:
        """See `RequestHandler.begin_shutdown`."""

    async def close_sockets(self) -> None:
        """Take no further connections. Those that are open stay."""

    async def wait_idle(self) -> None:
        """Wait until no request runs; where another process serves instead, until no connection is open."""


@dataclass(slots=True)
class Here:
    """This process has the clients."""

    handler: RequestHandler
    listener: Listener
    url: str
    held: bool

    @property
    def open_requests(self) -> int:
        return self.handler.open_requests

    def begin_shutdown(self, *, replaced: bool = False) -> None:
        del replaced  # The handler was told already.

    async def close_sockets(self) -> None:
        await self.listener.close()

    async def wait_idle(self) -> None:
        if self.handler.replaced:
            await self.listener.deserted()
        else:
            await self.handler.idle.wait()


async def listen(
    stack: AsyncExitStack,
    door: Door,
    config: Config,
    tls: ClientTls | None,
    opened: Iterable[socket],
    *,
    held: bool = False,
) -> Listener:
    """Accept connections on these sockets until the stack is left. `held` is that of the `Listener`."""
    if tls is not None:
        await stack.enter_async_context(in_the_background(tls.watch()))
    server = ClientServer(door, config.clients, tls.context if tls else None)
    runner = web.ServerRunner(server, handle_signals=False, shutdown_timeout=CUT_AFTER_S)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    for one in opened:
        await web.SockSite(runner, one, backlog=BACKLOG).start()
    host, port = runner.addresses[0][:2]
    url = f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
    return Listener(server, runner, url, held)


@asynccontextmanager
async def in_the_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Let something go on for the length of the block."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
