"""The client behind the upstream port, over aiohttp."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import Self

import aiohttp
from aiohttp import ClientRequest, ClientTimeout
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.tracing import Trace
from multidict import CIMultiDict
from yarl import URL

from llmproxy.backends.tls import PeerTls, trust_of
from llmproxy.upstream import Body, ConnectFailed, Headers, UpstreamBroken

IDLE_MAX_S = 4.0
"""Idle connections are dropped after this; vLLM itself closes them after exactly 5 s."""

READ_BUFFER_BYTES = 64 << 10
"""Reading from a backend pauses at twice this, when the client is slower than the engine."""

HEAD_LINE_BYTES_MAX = 256 << 10
"""The longest status line or header accepted of a backend."""

WHOLE_BODY_BYTES_MAX = 1 << 20
"""Request bodies up to this are handed to the transport in one piece, larger ones in slices as it drains."""

SLICE_BYTES = 256 << 10


class _Held:
    """The connection that the running `open` was given, if any: it alone tells whether bytes may have gone out."""

    __slots__ = ("content", "protocol", "reused", "transport")

    def __init__(self) -> None:
        self.content: aiohttp.StreamReader | None = None
        self.protocol: ResponseHandler | None = None
        self.transport: asyncio.Transport | None = None
        self.reused = False

    def abort(self) -> None:
        # A mere close would first wait for the peer to read what is still buffered, for ever if it hangs.
        if self.transport is not None:
            self.transport.abort()

    def lost(self) -> None:
        """The connection is no more: whoever waits for more of a body learns of it."""
        # aiohttp closes it over what is no HTTP, such as a chunk size of garbage, and lets its reader wait for ever.
        if self.content is not None and not self.content.is_eof() and self.content.exception() is None:
            why = self.protocol.exception() if self.protocol is not None else None
            self.content.set_exception(aiohttp.ClientPayloadError(str(why or "the connection was lost")))

    def was_reset(self) -> bool:
        return self.protocol is not None and isinstance(self.protocol.exception(), OSError)


_held: ContextVar[_Held | None] = ContextVar("upstream_connection", default=None)


class _Connector(aiohttp.TCPConnector):
    """Tells the `open` that runs in this context which connection it was given, and whether that one is fresh."""

    def __init__(self) -> None:
        super().__init__(limit=0, keepalive_timeout=IDLE_MAX_S)
        self._latest: dict[ResponseHandler, _Held] = {}

    async def connect(self, req: ClientRequest, traces: list[Trace], timeout: ClientTimeout) -> Connection:
        connection = await super().connect(req, traces, timeout)
        while (kept := connection.protocol) is not None and kept in self._latest and kept.should_close:
            # Bytes came while nobody asked: they would pass for the answer to this request.
            connection.close()
            connection = await super().connect(req, traces, timeout)
        held, protocol = _held.get(), connection.protocol
        if held is not None and protocol is not None:
            held.protocol, held.transport, held.reused = protocol, protocol.transport, protocol in self._latest
            if held.reused:
                self._latest[protocol] = held
            elif (closed := protocol.closed) is not None:
                self._latest[protocol] = held
                closed.add_done_callback(partial(self._lost, protocol))
        return connection

    def _lost(self, protocol: ResponseHandler, closed: asyncio.Future[None]) -> None:
        if not closed.cancelled():
            # Whoever reads is told; nobody else has to retrieve it.
            closed.exception()
        self._latest.pop(protocol).lost()


class AiohttpUpstream:
    """The upstream port over aiohttp's client. Made on a running loop; closed by `close` or by leaving its block.

    `tls` says, by base URL, how to trust a backend; any other is trusted as this machine trusts anybody.
    """

    def __init__(self, tls: Mapping[str, PeerTls] | None = None) -> None:
        self._tls = tls if tls is not None else {}
        self._session = aiohttp.ClientSession(
            connector=_Connector(),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            auto_decompress=False,
            read_bufsize=READ_BUFFER_BYTES,
            max_line_size=HEAD_LINE_BYTES_MAX,
            max_field_size=HEAD_LINE_BYTES_MAX,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections, those in use too."""
        await self._session.close()

    async def open(
        self, base_url: str, method: str, path_qs: str, headers: Headers, body: Body, connect_timeout_s: float
    ) -> AiohttpExchange:
        held = _Held()
        size_bytes = sum(len(piece) for piece in body)
        token = _held.set(held)
        try:
            response = await self._session.request(
                method,
                URL(base_url + path_qs, encoded=True),
                headers=_fields(headers, size_bytes),
                data=_data(body, size_bytes),
                allow_redirects=False,
                timeout=ClientTimeout(total=None, connect=connect_timeout_s, ceil_threshold=float("inf")),
                **trust_of(self._tls.get(base_url)),
            )
        except (aiohttp.ClientError, OSError) as error:
            held.abort()
            story = f"{base_url}: {error or type(error).__name__}"
            if held.protocol is None:
                raise ConnectFailed(story) from error
            raise UpstreamBroken(story, reused=held.reused) from error
        except BaseException:
            held.abort()
            raise
        finally:
            _held.reset(token)
        return AiohttpExchange(response, held)


def _fields(headers: Headers, size_bytes: int) -> CIMultiDict[str]:
    # The client below drops all but the last of a repeated header whose repetitions are spelt in different case.
    fields: CIMultiDict[str] = CIMultiDict()
    spelling: dict[str, str] = {"content-length": ""}
    for name, value in headers.items() if isinstance(headers, Mapping) else headers:
        if name := spelling.setdefault(name.lower(), name):
            fields.add(name, value)
    if size_bytes > WHOLE_BODY_BYTES_MAX:
        # What is written in slices would be sent as chunks unless its length is told.
        fields["content-length"] = str(size_bytes)
    return fields


def _data(body: Body, size_bytes: int) -> bytes | AsyncIterator[bytes] | None:
    # One write of a large body would copy all of it at once into the transport, and hold on to it there.
    if size_bytes > WHOLE_BODY_BYTES_MAX:
        return _slices(body)
    return (body[0] if len(body) == 1 and isinstance(body[0], bytes) else b"".join(body)) or None


async def _slices(body: Body) -> AsyncIterator[bytes]:
    for piece in body:
        for start in range(0, len(piece), SLICE_BYTES):
            yield bytes(piece[start : start + SLICE_BYTES])
            # The writer only waits for a slow backend; everybody else on this loop must have a turn with a fast one.
            await asyncio.sleep(0)


class AiohttpExchange:
    """One answer over aiohttp's client; see `Exchange`."""

    __slots__ = ("_content", "_ends_with_connection", "_held", "_response", "headers", "reason", "reused", "status")

    def __init__(self, response: aiohttp.ClientResponse, held: _Held) -> None:
        self._response = response
        self._content = held.content = response.content
        self._held = held
        self.status = response.status
        self.reason = response.reason or ""
        self.headers = [
            (name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape"))
            for name, value in response.raw_headers
        ]
        self.reused = held.reused
        self._ends_with_connection = not {"content-length", "transfer-encoding"} & {n.lower() for n, _ in self.headers}

    async def chunk(self) -> bytes:
        try:
            piece = await self._content.readany()
        except (aiohttp.ClientError, OSError) as error:
            self.close()
            raise UpstreamBroken(f"{self._response.host}: {error or type(error).__name__}") from error
        if not piece and self._ends_with_connection and self._held.was_reset():
            # Where neither a length nor chunks delimit the body, a reset looks like its end to the parser.
            raise UpstreamBroken(f"{self._response.host}: the connection was reset within the body")
        return piece

    def close(self) -> None:
        if self._response.connection is not None:
            self._held.abort()
        self._response.close()
