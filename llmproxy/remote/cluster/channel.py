"""The connection between two members: the frames of relay workers over TCP, with heartbeats and size limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from llmproxy.remote.cluster.protocol import Ping, TolerantDecoder
from llmproxy.remote.workers.channel import Channel, frame
from llmproxy.remote.workers.protocol import Sendable

PING_S = 1.0
SILENCE_S = 3.0
"""A connection that receives nothing for this long is closed."""
FRAME_BYTES_MAX = 16 << 20
"""Members send no longer frames: a longer frame is a protocol error."""
HELLO_BYTES_MAX = 16 << 10
"""The limit for the first frame, in which the peer has to send its Hello."""
FRAME_MESSAGES_MAX = 256
"""An `Admit` has at most 37 kB, so a frame of this many messages stays below FRAME_BYTES_MAX."""
UNSENT_BYTES_MAX = 64 << 20
"""A connection with more unsent bytes than this is closed: its peer does not read."""

MessageT = TypeVar("MessageT")


class Sender(Protocol):
    """Sends messages to the other side of a member connection."""

    local: bool
    """Whether the other side is in this process."""

    def send(self, message: Sendable) -> None: ...

    def flush(self) -> None: ...


class MemberChannel(Channel[MessageT]):
    """An end of a connection between members. It closes when the peer is silent for SILENCE_S."""

    local = False

    def __init__(
        self,
        decoder: TolerantDecoder[MessageT],
        on_message: Callable[[MessageT], None],
        on_lost: Callable[[], None],
        frame_bytes_max: int = FRAME_BYTES_MAX,
        on_broken: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(decoder, on_message, on_lost, frame_bytes_max)
        self.on_broken = on_broken
        """Gets the reason when the peer sends an invalid frame. None: the reason is logged."""
        self._heard_s = self._checked_s = self._loop.time()
        self._beat: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._heard_s = self._checked_s = self._loop.time()
        self._beat = self._loop.call_later(PING_S, self._check)

    def data_received(self, data: bytes) -> None:
        self._heard_s = self._loop.time()
        super().data_received(data)

    def identified(self) -> None:
        """Allow frames of full length, because the peer has proved to be a member."""
        self._frames.bytes_max = FRAME_BYTES_MAX
        self.on_broken = None

    def broken(self, why: str) -> None:
        if self.on_broken is None:
            super().broken(why)
        else:
            self.on_broken(why)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._beat is not None:
            self._beat.cancel()
        super().connection_lost(exc)

    @property
    def transport(self) -> asyncio.BaseTransport:
        """The transport of the connection, once it is open."""
        assert self._transport is not None
        return self._transport

    def _check(self) -> None:
        assert self._transport is not None
        now = self._loop.time()
        if now - self._checked_s > 2 * PING_S:
            # This process was paused: data that arrived meanwhile is not read yet.
            self._heard_s = now
        self._checked_s = now
        silent_s = now - self._heard_s
        if silent_s > SILENCE_S or self._transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            self.abort()
            return
        self.send(Ping())
        self._beat = self._loop.call_later(PING_S, self._check)

    def flush(self) -> None:
        if self._transport is None:
            return
        messages, self._unsent = self._unsent, []
        if self._transport.is_closing():
            return
        for begin in range(0, len(messages), FRAME_MESSAGES_MAX):
            self._write(messages[begin : begin + FRAME_MESSAGES_MAX])

    def _write(self, messages: list[Sendable]) -> None:
        assert self._transport is not None
        data = frame(messages)
        if len(data) <= FRAME_BYTES_MAX:
            self._transport.write(data)
        elif len(messages) > 1:
            self._write(messages[: len(messages) // 2])
            self._write(messages[len(messages) // 2 :])
        else:
            # Not sent, because the peer would close the connection.
            self._loop.call_exception_handler({"message": f"too long to send: {messages[0]!r:.200}"})


class LocalChannel:
    """A connection within one process, for example from the leader to itself. `send` delivers at once."""

    local = True

    def __init__(self, take: Callable[[Any], None]) -> None:
        self._take = take

    def send(self, message: Sendable) -> None:
        try:
            self._take(message)
        except Exception as error:  # noqa: BLE001 - as on a network connection, a bug in one message affects no other message
            report = {"message": f"handling a message failed: {message!r:.200}", "exception": error}
            asyncio.get_running_loop().call_exception_handler(report)

    def flush(self) -> None:
        """Does nothing: no message waits here."""
