"""Where clients come in: the listening sockets, and the connections that came through them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from aiohttp import web

LOOK_AGAIN_S = 0.05
"""The server library tells nobody when a connection ends, so that somebody has to look."""


@dataclass(slots=True)
class Listener:
    """A started server on its sockets. `held` says that another process keeps the sockets open for those who come."""

    server: web.Server
    runner: web.ServerRunner
    url: str
    held: bool

    async def close(self) -> None:
        """Take no further connections. Those that are open stay."""
        for site in list(self.runner.sites):
            await site.stop()

    async def deserted(self) -> None:
        """Wait until no connection is open."""
        while self.server.connections:  # noqa: ASYNC110 - see LOOK_AGAIN_S
            await asyncio.sleep(LOOK_AGAIN_S)
