"""The connection between a lease client and the scheduling process, and its frame format.

A relay worker inherits one end of a socket pair. The pair needs no path and no permission, and no other process can
use it.
Cluster members use TCP connections, with heartbeats and size limits.

A frame is a length in four bytes (big endian), and a MessagePack array of messages. Messages that a side sends in one
iteration of its event loop share a frame, unless it becomes too long. A message is an array that begins with its kind.

Members may run different releases: the receiver skips unknown kinds and fields, and replaces unknown enum values. So a
release may add kinds that need no answer, trailing fields with defaults, and enum values. A new kind that the receiver
must act upon is sent only if the receiver declares support by a trailing field in its Hello or Welcome. Every other
change needs a new `PROTOCOL`.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any, Generic, Protocol, TypeVar, cast

import msgspec
import structlog
from msgspec import inspect

from llmproxy.core.domain import AdmissionKind, Outcome, Stage, Verdict
from llmproxy.core.retry import Again
from llmproxy.observe.packed import packed
from llmproxy.remote.messages import FromMember, FromWorker, Ping, Sendable, ToMember, ToWorker
from llmproxy.scheduling.attempt import AttemptState, Split

PING_S = 1.0
SILENCE_S = 3.0  # A link between members that receives nothing for this long is closed.
LOCAL_BYTES_MAX = 1 << 30  # The maximum length of a frame on a link to a worker. No list of backends is as long.
FRAME_BYTES_MAX = 16 << 20  # The maximum length of a frame between members. A longer frame is a protocol error.
HELLO_BYTES_MAX = 16 << 10  # The limit for the first frame, in which the peer has to send its Hello.
FRAME_MESSAGES_MAX = 256  # An `Admit` has at most 37 kB, so a frame of this many stays below FRAME_BYTES_MAX.
UNSENT_BYTES_MAX = 64 << 20  # A link between members closes at this many unsent bytes: its peer does not read.
WHY_CHARS = 200
FALLBACKS: Mapping[type[Enum], Enum] = {
    # An admission of an unknown kind most likely repeats an earlier one. As NEW it would be charged twice.
    AdmissionKind: AdmissionKind.RETRY,
    Again: Again.NO,
    AttemptState: AttemptState.FAILED,
    # 503: the client may retry.
    Outcome: Outcome.REJECTED_NO_BACKENDS,
    Split: Split.WHOLE,
    Stage: Stage.WHOLE,
    # This verdict says nothing about a backend.
    Verdict: Verdict.CLIENT_GONE,
}
"""The replacement of unknown values, for each enum of the protocol."""
UNKNOWN_MAX = 100  # Number of unknown values that are logged, each once.
_LENGTH = struct.Struct(">I")
_type_of = cache(inspect.type_info)
_log = structlog.get_logger()

MessageT = TypeVar("MessageT")
DecodedT = TypeVar("DecodedT", covariant=True)


class Decoder(Protocol[DecodedT]):
    """Decodes the body of a frame into messages."""

    def decode(self, data: memoryview, /) -> Sequence[DecodedT]:
        """Returns the messages of a frame. Raises msgspec.DecodeError."""


class TolerantDecoder(Generic[MessageT]):
    """Decodes frames of any release: skips unknown kinds, and replaces unknown enum values by FALLBACKS."""

    def __init__(self, kinds: Any) -> None:
        self._whole: msgspec.msgpack.Decoder[list[MessageT]] = msgspec.msgpack.Decoder(list[kinds])
        self._frame = msgspec.msgpack.Decoder(list[msgspec.Raw])
        self._message: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(kinds)
        self._plain = msgspec.msgpack.Decoder(list[Any])
        self._kinds: dict[Any, Any] = {kind.__struct_config__.tag: kind for kind in kinds.__args__}
        self._unknown: set[tuple[str, str | int]] = set()

    def decode(self, data: Any) -> list[MessageT]:
        """Returns the messages of known kinds, in order. Raises msgspec.DecodeError."""
        try:
            return self._whole.decode(data)
        except msgspec.ValidationError:
            return [*self._decode_each(data)]

    def _decode_each(self, data: Any) -> Iterator[MessageT]:
        for raw in self._frame.decode(data):
            try:
                yield self._message.decode(raw)
            except msgspec.ValidationError:
                plain = self._plain.decode(raw)
                kind = self._kinds.get(plain[0]) if plain and isinstance(plain[0], int) else None
                if kind is not None:
                    replaced = self._with_fallbacks(plain, _type_of(kind))
                    yield self._message.decode(msgspec.msgpack.encode(replaced))

    def _with_fallbacks(self, value: Any, type_: inspect.Type) -> Any:
        """Replaces unknown enum values in plain data of this type. Decoding rejects wrong types later."""
        match type_, value:
            case inspect.EnumType(cls), str() | int() if value not in [one.value for one in cls]:
                return self._fallback(cls, value)
            case inspect.StructType(fields=fields, array_like=True, tag=tag), list():
                types = [field.type for field in fields]
                begin = 0 if tag is None else 1
                ours = value[begin : begin + len(types)]
                return value[:begin] + [self._with_fallbacks(*pair) for pair in zip(ours, types, strict=False)]
            case inspect.StructType(fields=fields) | inspect.DataclassType(fields=fields), dict():
                types_of = {field.encode_name: field.type for field in fields}
                return {key: self._with_fallbacks(one, types_of[key]) for key, one in value.items() if key in types_of}
            case inspect.UnionType(variants), _:
                for variant in variants:
                    value = self._with_fallbacks(value, variant)
                return value
            case inspect.CollectionType(item_type), list():
                return [self._with_fallbacks(one, item_type) for one in value]
            case _:
                return value

    def _fallback(self, enum: type[Enum], value: str | int) -> Any:
        taken_for = FALLBACKS[enum].value
        unknown = enum.__name__, value
        if unknown not in self._unknown and len(self._unknown) < UNKNOWN_MAX:
            self._unknown.add(unknown)
            _log.warning("cluster_value_unknown", of=enum.__name__, value=value, taken_for=taken_for)
        return taken_for


FROM_WORKER: msgspec.msgpack.Decoder[list[FromWorker]] = msgspec.msgpack.Decoder(list[FromWorker])
TO_WORKER: msgspec.msgpack.Decoder[list[ToWorker]] = msgspec.msgpack.Decoder(list[ToWorker])
FROM_MEMBER: TolerantDecoder[FromMember] = TolerantDecoder(FromMember)
TO_MEMBER: TolerantDecoder[ToMember] = TolerantDecoder(ToMember)


def frame(messages: Iterable[Sendable]) -> bytes:
    """Returns the bytes of one frame with these messages."""
    body = packed(list(messages))
    return _LENGTH.pack(len(body)) + body


class BrokenFrameError(Exception):
    """Raised for received bytes that are no frame of the protocol. The connection is then closed."""


class Frames(Generic[MessageT]):
    """Splits received bytes into frames, and decodes their messages."""

    def __init__(self, decoder: Decoder[MessageT], bytes_max: int = LOCAL_BYTES_MAX) -> None:
        self._decoder = decoder
        self.bytes_max = bytes_max
        self._bytes = bytearray()

    def feed(self, data: bytes, handle: Callable[[MessageT], object]) -> None:
        """Calls `handle` for each message of the frames that `data` completes. Raises BrokenFrameError.

        An exception of `handle` goes to the event loop's exception handler, and the next message follows.
        """
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
                for message in messages:
                    try:
                        handle(message)
                    except Exception as error:  # noqa: BLE001 - a bug in one message must not lose the next ones
                        _report_bug(message, error)
        except (msgspec.DecodeError, RecursionError) as error:
            raise BrokenFrameError(str(error)) from None
        # Not reached after an error, whose traceback may still refer to the buffer. The connection then ends.
        del buffer[:begin]


class Sender(Protocol):
    """Sends messages to the process at the other end of a link."""

    local: bool  # Whether the other side is on this machine. It then shares the clock, and ends with the link.

    def send(self, message: Sendable) -> None: ...

    def flush(self) -> None: ...


class Link(asyncio.Protocol, Generic[MessageT]):
    """An end of a connection. Messages sent in one iteration of the event loop share a frame.

    A link that is not `local` closes when its peer is silent or does not read. A local link needs no limit of its send
    buffer, because the number of requests of one worker is limited.
    """

    def __init__(
        self,
        decoder: Decoder[MessageT],
        on_message: Callable[[MessageT], None],
        on_lost: Callable[[], None],
        *,
        local: bool,
        on_broken: Callable[[str], None] | None = None,
    ) -> None:
        self.local = local
        self._bytes_max = LOCAL_BYTES_MAX if local else FRAME_BYTES_MAX
        self._frames = Frames(decoder, self._bytes_max if on_broken is None else HELLO_BYTES_MAX)
        self._on_message = on_message
        self._on_lost = on_lost
        # Gets the reason of an invalid frame before the peer is `identified`; None: the peer is known from the start.
        self._on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.WriteTransport | None = None
        self._unsent: list[Sendable] = []
        self._heard_s = self._checked_s = self._loop.time()
        self._beat: asyncio.TimerHandle | None = None
        self.lost = False

    # --- connection ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        if not self.local:
            self._heard_s = self._checked_s = self._loop.time()
            self._beat = self._loop.call_later(PING_S, self._check)

    def data_received(self, data: bytes) -> None:
        if not self.local:
            self._heard_s = self._loop.time()
        try:
            self._frames.feed(data, self._on_message)
        except BrokenFrameError as error:
            if self._on_broken is not None:
                self._on_broken(str(error))
            else:
                _log.error("broken_frame", peer=str(self.peer), why=str(error)[:WHY_CHARS])
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if self._beat is not None:
            self._beat.cancel()
        self.lost = True
        self._unsent.clear()
        self._on_lost()

    def identified(self) -> None:
        """Allows frames of full length, because the peer has proved to be a member."""
        self._frames.bytes_max = self._bytes_max
        self._on_broken = None

    @property
    def transport(self) -> asyncio.WriteTransport:
        """The transport of the connection, once it is open."""
        assert self._transport is not None
        return self._transport

    @property
    def peer(self) -> object:
        """Address and port of the peer; empty or None for a socket pair."""
        return None if self._transport is None else self._transport.get_extra_info("peername")

    def _check(self) -> None:
        now = self._loop.time()
        if now - self._checked_s > 2 * PING_S:
            # This process was paused: data that arrived meanwhile is not read yet.
            self._heard_s = now
        self._checked_s = now
        silent_s = now - self._heard_s
        if silent_s > SILENCE_S or self.transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            self.abort()
            return
        self.send(Ping())
        self._beat = self._loop.call_later(PING_S, self._check)

    # --- sending ------------------------------------------------------------------------------------------------------

    def send(self, message: Sendable) -> None:
        """Sends a message in the next iteration of the event loop; drops it if the connection has ended."""
        if self.lost:
            return
        if not self._unsent:
            assert self._transport is not None
            self._loop.call_soon(self.flush)
        self._unsent.append(message)

    def flush(self) -> None:
        """Sends all queued messages now."""
        messages, self._unsent = self._unsent, []
        if not messages or self.transport.is_closing():
            return
        for begin in range(0, len(messages), FRAME_MESSAGES_MAX):
            self._write(messages[begin : begin + FRAME_MESSAGES_MAX])

    def _write(self, messages: list[Sendable]) -> None:
        data = frame(messages)
        if len(data) <= self._bytes_max:
            self.transport.write(data)
        elif len(messages) > 1:
            self._write(messages[: len(messages) // 2])
            self._write(messages[len(messages) // 2 :])
        else:
            # Not sent, because the peer would close the connection.
            self._loop.call_exception_handler({"message": f"too long to send: {messages[0]!r:.200}"})

    def close(self) -> None:
        """Closes the connection after all messages are written."""
        self.flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Closes the connection now, without the unsent messages."""
        if self._transport is not None:
            self._transport.abort()


class LocalLink:
    """A link within one process, for example from the leader to itself. `send` delivers at once."""

    local = True

    def __init__(self, handle: Callable[[Any], None]) -> None:
        self._handle = handle

    def send(self, message: Sendable) -> None:
        try:
            self._handle(message)
        except Exception as error:  # noqa: BLE001 - as on a connection, a bug in one message affects no other message
            _report_bug(message, error)

    def flush(self) -> None:
        """Does nothing: no message waits here."""


def _report_bug(message: object, error: Exception) -> None:
    asyncio.get_running_loop().call_exception_handler(
        {"message": f"handling a message failed: {message!r:.200}", "exception": error}
    )
