"""The connection between a relay worker and the scheduler process, and its frame format.

The connection is a socket pair that the worker inherits: it needs no path and no permission, and no other process can
use it. A frame is a length in four bytes (big endian) and a MessagePack array with all messages that one side sent in
one turn of its loop. A message is an array whose first item is its kind.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar, cast

import msgspec
import structlog

from llmproxy.observe.packed import packed
from llmproxy.remote.workers.protocol import FromWorker, Sendable, ToWorker

FRAME_BYTES_MAX = 1 << 30
"""The maximum length of a frame. No list of backends is as long. A longer frame is a protocol error."""
WHY_CHARS = 200
_LENGTH = struct.Struct(">I")
_log = structlog.get_logger()

MessageT = TypeVar("MessageT")
DecodedT = TypeVar("DecodedT", covariant=True)


class Decoder(Protocol[DecodedT]):
    """Decodes the body of a frame."""

    def decode(self, data: memoryview, /) -> Sequence[DecodedT]:
        """Returns the messages of a frame. Raises msgspec.DecodeError."""


FROM_WORKER: msgspec.msgpack.Decoder[list[FromWorker]] = msgspec.msgpack.Decoder(list[FromWorker])
TO_WORKER: msgspec.msgpack.Decoder[list[ToWorker]] = msgspec.msgpack.Decoder(list[ToWorker])


def frame(messages: Iterable[Sendable]) -> bytes:
    """Returns one frame with these messages."""
    body = packed(list(messages))
    return _LENGTH.pack(len(body)) + body


class BrokenFrameError(Exception):
    """Bytes that are not a frame of this protocol."""


class Frames(Generic[MessageT]):
    """Splits received bytes into frames, and decodes their messages."""

    def __init__(self, decoder: Decoder[MessageT], bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._decoder = decoder
        self.bytes_max = bytes_max
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[MessageT]:
        """Yields the messages of the frames that these bytes complete. Raises BrokenFrameError."""
        buffer = self._bytes
        buffer += data
        begin = 0
        try:
            while len(buffer) - begin >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(buffer, begin)
                if size > self.bytes_max:
                    raise BrokenFrameError(f"a frame of {size} bytes")
                end = begin + _LENGTH.size + size
                if len(buffer) < end:
                    break
                with memoryview(buffer) as view:
                    messages = self._decoder.decode(view[begin + _LENGTH.size : end])
                begin = end
                yield from messages
        except (msgspec.DecodeError, RecursionError) as error:
            raise BrokenFrameError(str(error)) from None
        finally:
            del buffer[:begin]


class Channel(asyncio.Protocol, Generic[MessageT]):
    """An end of the connection.

    Messages that are sent in one turn of the loop share a frame. The send buffer needs no limit: messages come from the
    requests of one worker, whose number is limited.
    """

    def __init__(
        self,
        decoder: Decoder[MessageT],
        on_message: Callable[[MessageT], None],
        on_lost: Callable[[], None],
        frame_bytes_max: int = FRAME_BYTES_MAX,
    ) -> None:
        """`on_message` gets each message. `on_lost` is called when the connection has ended."""
        self._frames = Frames(decoder, frame_bytes_max)
        self._on_message = on_message
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.WriteTransport | None = None
        self._unsent: list[Sendable] = []
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                self._handle(message)
        except BrokenFrameError as error:
            self.broken(str(error))
            self.abort()

    def broken(self, why: str) -> None:
        """Log an invalid frame. The caller then closes the connection."""
        _log.error("broken_frame", peer=str(self.peer), why=why[:WHY_CHARS])

    @property
    def peer(self) -> object:
        """Address and port of the peer; empty or None for a socket pair."""
        return None if self._transport is None else self._transport.get_extra_info("peername")

    def _handle(self, message: MessageT) -> None:
        try:
            self._on_message(message)
        except Exception as error:  # noqa: BLE001 - a bug in one message must not lose the next ones
            self._loop.call_exception_handler(
                {"message": f"handling a message failed: {message!r:.200}", "exception": error}
            )

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self.lost = True
        self._unsent.clear()
        self._on_lost()

    def send(self, message: Sendable) -> None:
        """Send at the end of this turn of the loop. Does nothing after the connection has ended."""
        if self.lost:
            return
        if not self._unsent:
            self._loop.call_soon(self.flush)
        self._unsent.append(message)

    def flush(self) -> None:
        """Send all queued messages now."""
        if self._unsent and self._transport is not None:
            messages, self._unsent = self._unsent, []
            self._transport.write(frame(messages))

    def close(self) -> None:
        """Close the connection after all messages are written."""
        self.flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection now, without the unsent messages."""
        if self._transport is not None:
            self._transport.abort()
