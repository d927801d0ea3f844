"""A simulated vLLM replica on a real port: in-process for tests, or served until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from aiohttp import web

from llmproxy.lab.simulator.engine.engine import Engine
from llmproxy.lab.simulator.http.routes import Routes
from llmproxy.lab.simulator.server.faults import FaultKind, FaultSwitch
from llmproxy.lab.simulator.server.service import ReplicaOptions, Service

__all__ = ["FaultKind", "Replica", "ReplicaOptions", "SeenRequest", "serve_replica"]

KEEP_ALIVE_S = 5.0
_BODY_BYTES_MAX = 512 * 1024 * 1024
_HEADER_BYTES_MAX = 128 * 1024
_SEEN_BYTES_MAX = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """A received request. Header names are lower case, and `path` includes the query."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Replica:
    """A replica that listens during `async with Replica(options) as replica:`. Leaving the block cuts its connections.

    Port 0 takes a free port, which `url` and `port` show. `faults` injects faults, `restart` starts a cold replica on
    the same port, and `requests_seen` has the latest requests, limited in number and bytes.
    """

    def __init__(self, options: ReplicaOptions | None = None, host: str = "127.0.0.1", port: int = 0) -> None:
        self.options = options or ReplicaOptions()
        self.host = host
        self.port = port
        self.faults = FaultSwitch(self._fault_changed)
        self.requests_seen: deque[SeenRequest] = deque()
        self._seen_bytes = 0
        self._busy: set[web.RequestHandler] = set()
        self._service = Service(self.options, self.faults)

    @property
    def url(self) -> str:
        """The base URL, without a trailing slash."""
        return f"http://{self.host}:{self.port}"

    @property
    def engine(self) -> Engine:
        """The engine model. A restart replaces it."""
        return self._service.engine

    @property
    def in_flight(self) -> int:
        """The number of accepted generation requests that have not ended."""
        return self._service.in_flight

    async def __aenter__(self) -> Self:
        # This socket does not listen. It reserves the port while a fault or a restart has closed the listener.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._reserved.bind((self.host, self.port))
            self.port = self._reserved.getsockname()[1]
            await self._start()
        except BaseException:
            self._reserved.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()
        self._reserved.close()

    async def idle(self) -> None:
        await self._service.idle.wait()

    async def restart(self) -> None:
        """Cuts all connections, and starts again on the same port, cold and without faults."""
        await self._stop()
        self.faults = FaultSwitch(self._fault_changed)
        self._service = Service(self.options, self.faults)
        await self._start()

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        routes = Routes(self._service)

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            return await self._handle(routes, request)

        # With handler_cancellation, a disconnected client aborts its request.
        self._server = _Server(
            handle,
            # aiohttp's own factory limits bodies to 1 MiB; vLLM has no such limit.
            request_factory=partial(web.BaseRequest, loop=loop, client_max_size=_BODY_BYTES_MAX),
            handler_cancellation=True,
            keepalive_timeout=KEEP_ALIVE_S,
            max_field_size=_HEADER_BYTES_MAX,
            max_line_size=_HEADER_BYTES_MAX,
            auto_decompress=False,
            access_log=None,
        )
        listener = socket.create_server((self.host, self.port), backlog=1024)
        if self._service.nixl is not None:
            self._service.nixl.open(self.host, self.port)
        self._listening = await loop.create_server(self._server, sock=listener)
        self._stepping = asyncio.create_task(self._service.pacer.run(), name=f"engine of {self.url}")

    async def _stop(self) -> None:
        self.faults.close()
        self._listening.close()
        self._cut(self._server.connections)
        if self._service.nixl is not None:
            await self._service.nixl.close()
        self._stepping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._stepping
        await self._server.shutdown(1.0)

    async def _handle(self, routes: Routes, request: web.BaseRequest) -> web.StreamResponse:
        self._busy.add(request.protocol)
        try:
            if request.headers.get("expect", "").lower() == "100-continue" and request.transport is not None:
                request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = await request.read()
            self._remember(request, body)
            if self.faults.kind is FaultKind.HANG:
                await asyncio.Event().wait()
            return await routes.answer(request, body)
        finally:
            self._busy.discard(request.protocol)

    def _remember(self, request: web.BaseRequest, body: bytes) -> None:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.requests_seen.append(SeenRequest(request.method, request.path_qs, headers, body))
        self._seen_bytes += len(body)
        while len(self.requests_seen) > self.options.requests_kept or self._seen_bytes > _SEEN_BYTES_MAX:
            self._seen_bytes -= len(self.requests_seen.popleft().body)

    def _fault_changed(self, kind: FaultKind | None) -> None:
        self._service.fault_changed(kind)
        if kind is FaultKind.HANG:
            self._listening.close()
            self._cut([connection for connection in self._server.connections if connection not in self._busy])
        elif kind is FaultKind.REFUSE:
            self._listening.close()
            self._cut(self._server.connections)

    @staticmethod
    def _cut(connections: list[web.RequestHandler]) -> None:
        for connection in connections:
            if connection.transport is not None:
                connection.transport.abort()


async def serve_replica(options: ReplicaOptions, host: str, port: int) -> None:
    """Serves a replica until cancellation, SIGTERM or SIGINT, then cuts its connections.

    Prints a line with the URL once it listens; port 0 takes a free port. With `shutdown="hang"`, a signal closes the
    port, and open streams get no further byte until their clients disconnect. With `shutdown="abort"`, open requests
    end with this finish reason. Raises OSError if the address cannot be used.
    """
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    async with Replica(replace(options, requests_kept=0), host, port) as replica:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.set)
        try:
            print(f"simulated vLLM replica of {options.model} on {replica.url}", flush=True)
            await stopping.wait()
            if options.shutdown != "now":
                replica.faults.set(options.shutdown)
                await replica.idle()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


class _Connection(web.RequestHandler):
    """A connection without a time limit for its first request, as in vLLM and unlike in aiohttp."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.keep_alive(False)


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)
