"""What a relay worker and the scheduler process tell each other: the messages, and the frames that they travel in.

They are ends of one socket pair that the worker inherits, so that there is no path, no permission and no stranger. A
frame is its length in four bytes (big endian) and a MessagePack array of messages: all that one side had to say in one
turn of its loop, in one write. A message is an array too, whose first item says of which kind it is.

Times are those of the loop's clock. It is the monotonic clock of the machine, and so the same in all its processes.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar, cast

import msgspec

from llmproxy.core.backends.catalogue import Target
from llmproxy.core.domain import Entry, Outcome, Placed, Request, Usage, Verdict, Why
from llmproxy.core.estimates.tokens import Estimate
from llmproxy.telemetry.exit import RequestExit

FRAME_BYTES_MAX = 1 << 30
"""More than any fleet's listings; a length beyond it comes from no end of ours."""
INTEGER_MAX = (1 << 64) - 1
_LENGTH = struct.Struct(">I")


class Message(msgspec.Struct, frozen=True, array_like=True):
    """One message. `call` numbers what a worker waits for an answer to, `lease` is the number of a `Grant`."""


# --- from a worker ----------------------------------------------------------------------------------------------------


class Listening(Message, frozen=True, tag=1):
    """The worker accepts connections, under this URL."""

    url: str


class Admit(Message, frozen=True, tag=2):
    """`Dispatcher.admit`. Answered by `Granted` or `Refuse`."""

    call: int
    request: Request
    excluded: frozenset[str]
    entry: Entry


class Resolve(Message, frozen=True, tag=3):
    """`Dispatcher.resolve`, for a name that the worker does not know yet. Answered by `Resolved` or `Refuse`."""

    call: int
    name: str | None
    hold_s: float
    body_bytes: int


class Page(Message, frozen=True, tag=4):
    """An HTTP/1 request from `remote` that is not for an engine, in bytes. Answered by `Shown`.

    It comes without its body, and once more with it where the answer is 100 (Continue).
    """

    call: int
    request: bytes
    remote: str


class Direct(Message, frozen=True, tag=29):
    """`Dispatcher.direct`, until it is cancelled. Answered by `Refuse` alone, when it is to be cut."""

    call: int
    backend: str


class Cancel(Message, frozen=True, tag=5):
    """Nobody waits for the answer to a call any more; where it was a grant, its lease is over."""

    call: int


class Started(Message, frozen=True, tag=6):
    lease: int


class Committed(Message, frozen=True, tag=7):
    lease: int


class Progress(Message, frozen=True, tag=8):
    lease: int
    output_tokens: int


class Return(Message, frozen=True, tag=9):
    """A lease is given back."""

    lease: int
    verdict: Verdict
    usage: Usage | None


class Ended(Message, frozen=True, tag=10):
    """`Dispatcher.ended`, for the request of this id."""

    request_id: str
    met: bool | None


class Cached(Message, frozen=True, tag=11):
    """`Pools.cached_on`."""

    pool: str
    lease: int
    backend: str
    hashes: tuple[int, ...]


class Attempted(Message, frozen=True, tag=12):
    """`Metrics.attempted`."""

    backend: str
    verdict: Verdict


class Exit(Message, frozen=True, tag=13):
    """What the metrics and the decision log are told of a request; its line in the log the worker writes itself."""

    record: RequestExit


class Learn(Message, frozen=True, tag=14):
    """`Estimator.learn`."""

    model: str
    prompt_bytes: int | None
    sequences: int | None
    usage: Usage


class Idle(Message, frozen=True, tag=15):
    """What the worker was told to see off is gone: its requests, or its connections where it was replaced."""


class LogLinesLost(Message, frozen=True, tag=28):
    """Lines that the standard error of the worker could not take."""

    lines: int


class Holds(Message, frozen=True, tag=30):
    """`BodyBudget.held_bytes` of the worker, for the metrics."""

    body_bytes: int


# --- either way -------------------------------------------------------------------------------------------------------


class Made(Message, frozen=True, tag=16):
    """A stored response, the backend that made it and its tenant."""

    response_id: str
    backend: str
    tenant: str


# --- to a worker ------------------------------------------------------------------------------------------------------


class Begin(Message, frozen=True, tag=17):
    """The first message: who the worker is, and the descriptors of the sockets on which it is to listen."""

    name: str
    fds: tuple[int, ...]


class GoBy(Message, frozen=True, tag=18):
    """The configuration from now on, pickled: a child may believe the parent whose program it runs."""

    config: bytes


class Fleet(Message, frozen=True, tag=19):
    """All backends (pickled configurations), every name that is known, and what a request without a name means."""

    backends: bytes
    targets: Mapping[str, Target]
    unnamed: Target | None


class Estimates(Message, frozen=True, tag=20):
    """What was learned of these models."""

    models: Mapping[str, Estimate]


class Standing(Message, frozen=True, tag=21):
    """How far the shutdown is; see `RequestHandler.begin_shutdown`, `Listener.close` and `Dispatcher.drain`."""

    leaving: bool = False
    replaced: bool = False
    closed: bool = False
    draining: bool = False
    granting: bool = True


class Granted(Message, frozen=True, tag=22):
    """A `Grant` of the request that was asked for."""

    call: int
    lease: int
    placed: Placed
    at_s: float
    queued_ahead: int
    why: Why
    left_s: float


class Refuse(Message, frozen=True, tag=23):
    """The exception `Refused`."""

    call: int
    outcome: Outcome
    message: str
    retry_after_s: float | None


class Resolved(Message, frozen=True, tag=24):
    call: int
    target: Target


class Shown(Message, frozen=True, tag=25):
    """The answer to a `Page`."""

    call: int
    status: int
    reason: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


class Cut(Message, frozen=True, tag=26):
    """`Lease.cut`."""

    lease: int
    revoked: bool


class Stop(Message, frozen=True, tag=27):
    """Cut whatever is left, and end."""


FromWorker = (
    Listening | Admit | Resolve | Page | Direct | Cancel | Started | Committed | Progress | Return | Ended | Cached
    | Attempted | Exit | Learn | Idle | Made | LogLinesLost | Holds
)  # fmt: skip
ToWorker = (
    Begin | GoBy | Fleet | Estimates | Made | Standing | Granted | Refuse | Resolved | Shown | Cut | Stop
)  # fmt: skip

Heard = TypeVar("Heard")
FROM_WORKER: msgspec.msgpack.Decoder[list[FromWorker]] = msgspec.msgpack.Decoder(list[FromWorker])
TO_WORKER: msgspec.msgpack.Decoder[list[ToWorker]] = msgspec.msgpack.Decoder(list[ToWorker])


def _plain(value: Any) -> Any:
    """Texts of a class of their own, as header names are, as texts."""
    if isinstance(value, str):
        return str(value)
    raise NotImplementedError(type(value).__name__)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)


def frame(messages: Iterable[Message]) -> bytes:
    """One frame of all these messages."""
    told = list(messages)
    try:
        body = _ENCODER.encode(told)
    except (UnicodeEncodeError, OverflowError):
        # Clients may ask for more tokens than 64 bits can count, and send header fields that are no UTF-8.
        body = _ENCODER.encode(_bounded(msgspec.to_builtins(told, builtin_types=(bytes,), enc_hook=_plain)))
    return _LENGTH.pack(len(body)) + body


def _bounded(value: Any) -> Any:
    """Plain data with every text as UTF-8 can say it, and integers of 64 bits; texts that differ still differ."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int):
        return value if -(INTEGER_MAX >> 1) <= value <= INTEGER_MAX else INTEGER_MAX
    if isinstance(value, dict):
        return {_bounded(key): _bounded(one) for key, one in value.items()}
    return [_bounded(one) for one in value] if isinstance(value, list | tuple) else value


class BrokenFrameError(Exception):
    """Bytes that no end of ours writes."""


class Frames(Generic[Heard]):
    """Takes bytes as they come and gives messages, of frames that are whole, in order."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[list[Heard]]) -> None:
        self._decoder = decoder
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Heard]:
        """The messages whose frames these bytes complete. Raises BrokenFrameError."""
        held = self._bytes
        held += data
        begin = 0
        try:
            while len(held) - begin >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(held, begin)
                if size > FRAME_BYTES_MAX:
                    raise BrokenFrameError(f"a frame of {size} bytes")
                end = begin + _LENGTH.size + size
                if len(held) < end:
                    break
                with memoryview(held) as view:
                    messages = self._decoder.decode(view[begin + _LENGTH.size : end])
                begin = end
                yield from messages
        except msgspec.DecodeError as error:
            raise BrokenFrameError(str(error)) from error
        finally:
            del held[:begin]


class Channel(asyncio.Protocol, Generic[Heard]):
    """One end of the socket. `on_message` hears each message, `on_lost` that there will be no more of them.

    What is sent in one turn of the loop travels in one frame. Nothing bounds what is on its way but what causes it: the
    requests of one worker, whose number is bounded.
    """

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[list[Heard]],
        on_message: Callable[[Heard], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._frames = Frames(decoder)
        self._on_message = on_message
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.WriteTransport | None = None
        self._unsent: list[Message] = []
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                self._hear(message)
        except BrokenFrameError as error:
            self._loop.call_exception_handler({"message": "a broken frame", "exception": error})
            self.abort()

    def _hear(self, message: Heard) -> None:
        try:
            self._on_message(message)
        except Exception as error:  # noqa: BLE001 - a bug with one message must not lose those behind it
            self._loop.call_exception_handler(
                {"message": f"a message was not understood: {message!r:.200}", "exception": error}
            )

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self.lost = True
        self._unsent.clear()
        self._on_lost()

    def send(self, message: Message) -> None:
        """Send at the end of this turn of the loop; into nothing where nobody hears any more."""
        if self.lost:
            return
        if not self._unsent:
            self._loop.call_soon(self.flush)
        self._unsent.append(message)

    def flush(self) -> None:
        """Send what was given so far."""
        if self._unsent and self._transport is not None:
            messages, self._unsent = self._unsent, []
            self._transport.write(frame(messages))

    def close(self) -> None:
        """End the connection when all that was sent is on its way."""
        self.flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End the connection now."""
        if self._transport is not None:
            self._transport.abort()
