"""The requests that ended in the last ten minutes, so that the story of each can be told from its id.

They are kept as bytes: a third of the memory of their objects, and the garbage collector never looks at them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

from llmproxy.telemetry.exit import RequestExit
from llmproxy.telemetry.packed import packed

KEPT_S = 600.0
BYTES_MAX = 32 << 20
"""Of all records. Beyond it, the oldest are forgotten earlier."""
RECORD_BYTES = 240
"""What a record takes beside its bytes: an instant, an id, and the objects around them."""


class RecentRequests:
    """Takes every exit record."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, str, bytes]] = deque()
        self._bytes = 0
        self._decode = msgspec.msgpack.Decoder(RequestExit).decode

    def record(self, ended: RequestExit) -> None:
        """Remember one request."""
        kept, data = self._kept, packed(ended)
        at_s = ended.ended_s
        if at_s is None:
            # It was refused before its time was noted.
            at_s = kept[-1][0] if kept else 0.0
        kept.append((at_s, ended.input.request_id, data))
        self._bytes += len(data) + RECORD_BYTES
        while self._bytes > BYTES_MAX or at_s - kept[0][0] > KEPT_S:
            self._bytes -= len(kept.popleft()[2]) + RECORD_BYTES

    def newest_first(self) -> Iterator[RequestExit]:
        return (self._decode(data) for _, _, data in reversed(self._kept))

    def find(self, request_id: str) -> RequestExit | None:
        """The newest request of this id, None if none is remembered."""
        found = next((data for _, known, data in reversed(self._kept) if known == request_id), None)
        return None if found is None else self._decode(found)
