"""The records of requests of the last ten minutes, so that a page can explain each request by its id.

Records are kept as bytes, which take a third of the memory of objects and cost the garbage collector nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

from llmproxy.core.domain import Waited
from llmproxy.observe.exit import RequestExit
from llmproxy.observe.packed import packed

_ended = msgspec.msgpack.Decoder(RequestExit).decode
_waited = msgspec.msgpack.Decoder(Waited).decode

KEPT_S = 600.0
BYTES_MAX = 32 << 20  # The maximum bytes of all records. Beyond this, the oldest records are dropped early.
RECORD_BYTES = 240  # The overhead of a record in memory: a time, an id, and the objects around them.


class RecentRequests:
    """The exit records of recent requests, and the wait reasons of requests that left the queue without a backend."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, str, type, bytes]] = deque()
        self._bytes = 0

    def record(self, ended: RequestExit) -> None:
        at_s = ended.ended_s
        if at_s is None:
            # The request was refused before its arrival time was set.
            at_s = self._kept[-1][0] if self._kept else 0.0
        self._keep(at_s, ended.request_id, ended)

    def left(self, request_id: str, waited: Waited, at_s: float) -> None:
        """Stores why a request waited. `at_s`: when it left the queue without a backend, on the event loop's clock."""
        self._keep(at_s, request_id, waited)

    def _keep(self, at_s: float, request_id: str, value: RequestExit | Waited) -> None:
        kept, data = self._kept, packed(value)
        kept.append((at_s, request_id, type(value), data))
        self._bytes += len(data) + RECORD_BYTES
        while self._bytes > BYTES_MAX or at_s - kept[0][0] > KEPT_S:
            self._bytes -= len(kept.popleft()[3]) + RECORD_BYTES

    def newest_first(self) -> Iterator[RequestExit]:
        return (_ended(data) for _, _, kind, data in reversed(self._kept) if kind is RequestExit)

    def find(self, request_id: str) -> RequestExit | None:
        """Returns the newest record of a request id; None without a record."""
        data = self._newest(request_id, RequestExit)
        return None if data is None else _ended(data)

    def waited(self, request_id: str) -> Waited | None:
        """Returns why a request waited before it left the queue without a backend; None without a record."""
        data = self._newest(request_id, Waited)
        return None if data is None else _waited(data)

    def _newest(self, request_id: str, wanted: type) -> bytes | None:
        kept = reversed(self._kept)
        return next((data for _, known, kind, data in kept if kind is wanted and known == request_id), None)
