"""Reads the requests and answers of a connection, and their times, from copies of its bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import httptools
from multidict import CIMultiDict

from llmproxy.gateway.http.routes import SCHEDULED, Route

BODY_BYTES_MAX = 8 << 20  # A request with a longer body is passed on, and counted as unread.
ANSWER_BYTES_MAX = 1 << 20
"""The longest answer that is kept whole. Of a longer one the last bytes are kept, which have the usage."""
TAIL_BYTES = 64 << 10
HELD_BYTES_MAX = 64 << 20
"""The most bytes of all bodies and answers together.

A request that would need more is passed on, and counted as unread.
"""


@dataclass(slots=True)
class Exchange:
    """A request and its answer.

    Times are instants of `time.monotonic()`, because the clock of the event loop has only whole milliseconds.
    """

    arrived_s: float
    method: str = ""
    path: str = ""
    headers: CIMultiDict[str] = field(default_factory=CIMultiDict)
    # The address of the client.
    address: str = ""
    # None if llmproxy does not schedule requests with this method and path. Body and answer are then not kept.
    route: Route | None = None
    body: bytearray = field(default_factory=bytearray)
    asked: bool = False
    status: int = 0
    answer_headers: CIMultiDict[str] = field(default_factory=CIMultiDict)
    answer: bytearray = field(default_factory=bytearray)
    # Whether only the last bytes of the answer were kept, because it is long.
    cut: bool = False
    # Whether body and answer were dropped, because a limit was exceeded or the watcher failed.
    unread: bool = False
    first_byte_s: float | None = None
    ended_s: float = 0.0
    # Whether the answer came to its regular end.
    complete: bool = False
    # Whether the client closed the connection before the end of the answer.
    left: bool = False


class Held:
    """Counts the bytes of the bodies and answers of all exchanges that are open or not yet recorded."""

    def __init__(self) -> None:
        self.bytes = 0

    def add(self, exchange: Exchange, into: bytearray, data: bytes, most: int) -> None:
        """Adds `data` to the body or the answer of an exchange. `most` is the limit for `into`.

        Over a limit, the exchange loses all its bytes and is `unread`; of an answer longer than `most`, the last bytes
        stay.
        """
        if exchange.unread:
            return
        if self.bytes + len(data) > HELD_BYTES_MAX or (into is exchange.body and len(into) + len(data) > most):
            self.drop(exchange)
            return
        into += data
        self.bytes += len(data)
        if len(into) > most:
            exchange.cut = True
            gone = len(into) - TAIL_BYTES
            del into[:gone]
            self.bytes -= gone

    def drop(self, exchange: Exchange) -> None:
        """Drops the bytes of an exchange, which is then `unread`."""
        self.bytes -= len(exchange.body) + len(exchange.answer)
        exchange.body, exchange.answer, exchange.unread = bytearray(), bytearray(), True


class HttpWatcher:
    """Reads one connection with llhttp.

    An upgrade or CONNECT raises an exception, so that the rest of the connection is passed on unread. An offer of h2c
    that the router ignores raises none.
    """

    def __init__(
        self, address: str, held: Held, now: Callable[[], float], on_exchange: Callable[[Exchange], None]
    ) -> None:
        self._address = address
        self._held = held
        self._now = now
        self._on_exchange = on_exchange
        self._open: deque[Exchange] = deque()
        self._requests = _Requests(self)
        self._request_parser = httptools.HttpRequestParser(self._requests)
        self._begin_answers()

    def _begin_answers(self) -> None:
        self._answers = _Answers(self)
        self._answer_parser = httptools.HttpResponseParser(self._answers)

    @property
    def busy(self) -> bool:
        return bool(self._open)

    def asked(self, data: bytes) -> None:
        try:
            self._request_parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # Java's HttpClient offers HTTP/2 on its first request. The parser then skips the body, so it gets it again
            # behind a head without the offer. An answer 101 is an upgrade too, and ends the reading.
            if not self._requests.offers_h2c():
                raise
            self._request_parser.feed_data(self._requests.framing())
            self.asked(data[upgrade.args[0] :])

    def answered(self, data: bytes) -> None:
        self._answer_parser.feed_data(data)
        if self._answers.to_head:
            # The parser expects a body, because it does not know the request.
            self._begin_answers()

    def closed(self, by_client: bool) -> None:
        """Ends all open exchanges.

        A closed connection is the regular end only of an answer without a length, and only if the router closed it.
        """
        while self._open:
            exchange = self._open[0]
            headers = exchange.answer_headers
            until_close = "content-length" not in headers and "transfer-encoding" not in headers
            exchange.left = by_client
            self.end(complete=bool(exchange.status) and until_close and not by_client)

    def forget(self) -> None:
        for exchange in self._open:
            self._held.drop(exchange)

    # --- from the parsers ---------------------------------------------------------------------------------------------

    def begin(self) -> Exchange:
        exchange = Exchange(self._now(), address=self._address)
        self._open.append(exchange)
        return exchange

    def route(self, exchange: Exchange, url: bytes) -> None:
        exchange.method = self._request_parser.get_method().decode()
        exchange.path = url.partition(b"?")[0].decode("latin-1")
        if exchange.method == "CONNECT":
            raise ValueError("a tunnel is not read")
        route = SCHEDULED.get(exchange.path)
        exchange.route = route if route is not None and route.method == exchange.method else None

    def body(self, exchange: Exchange, data: bytes) -> None:
        if exchange.route is not None:
            self._held.add(exchange, exchange.body, data, BODY_BYTES_MAX)

    def answering(self) -> Exchange:
        return self._open[0]

    def answer_head(self) -> int:
        status: int = self._answer_parser.get_status_code()
        return status

    def answer(self, data: bytes) -> None:
        exchange = self._open[0]
        if exchange.first_byte_s is None:
            exchange.first_byte_s = self._now()
        if exchange.route is not None:
            self._held.add(exchange, exchange.answer, data, ANSWER_BYTES_MAX)

    def end(self, *, complete: bool) -> None:
        exchange = self._open.popleft()
        exchange.ended_s, exchange.complete = self._now(), complete
        self._on_exchange(exchange)


class _Requests:
    """The callbacks of the parser of requests."""

    def __init__(self, watcher: HttpWatcher) -> None:
        self._watcher = watcher
        self._exchange: Exchange | None = None
        self._url = b""
        # Whether the parser reads the head of `framing`.
        self._again = False

    def offers_h2c(self) -> bool:
        return self._exchange is not None and self._exchange.headers.get("upgrade", "").strip().lower() == "h2c"

    def framing(self) -> bytes:
        """Returns a head with only those fields of the last request that delimit its body. The callbacks ignore it."""
        self._again = True
        headers = self._exchange.headers if self._exchange is not None else {}
        fields = (f"{name}: {headers[name]}\r\n" for name in ("Content-Length", "Transfer-Encoding") if name in headers)
        return f"POST / HTTP/1.1\r\n{''.join(fields)}\r\n".encode("latin-1")

    def on_message_begin(self) -> None:
        if not self._again:
            self._exchange, self._url = self._watcher.begin(), b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._exchange is not None and not self._again:
            self._exchange.headers.add(name.decode("latin-1"), value.decode("utf-8", "surrogateescape"))

    def on_headers_complete(self) -> None:
        if self._exchange is not None and not self._again:
            self._watcher.route(self._exchange, self._url)
        self._again = False

    def on_body(self, body: bytes) -> None:
        if self._exchange is not None:
            self._watcher.body(self._exchange, body)

    def on_message_complete(self) -> None:
        if self._exchange is not None:
            self._exchange.asked = True


class _Answers:
    """The callbacks of the parser of answers. Interim answers (1xx) are skipped."""

    def __init__(self, watcher: HttpWatcher) -> None:
        self._watcher = watcher
        self._headers: CIMultiDict[str] = CIMultiDict()
        self._interim = False
        # Whether the answer belongs to a HEAD request, so that it ended with its head.
        self.to_head = False

    def on_message_begin(self) -> None:
        self._headers, self.to_head = CIMultiDict(), False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.add(name.decode("latin-1"), value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        status = self._watcher.answer_head()
        self._interim = status < 200
        if not self._interim:
            exchange = self._watcher.answering()
            exchange.status, exchange.answer_headers = status, self._headers
            self.to_head = exchange.method == "HEAD"
            if self.to_head:
                self._watcher.end(complete=True)

    def on_body(self, body: bytes) -> None:
        if self.to_head:
            raise ValueError("an answer to HEAD has no body")
        self._watcher.answer(body)

    def on_message_complete(self) -> None:
        if not (self._interim or self.to_head):
            self._watcher.end(complete=True)
