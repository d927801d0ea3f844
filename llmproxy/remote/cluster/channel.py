"""The connection between two members: the frames of relay workers over TCP, watched, bounded and with TLS both ways."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from llmproxy.remote.cluster.protocol import KnownMessages, Ping
from llmproxy.remote.workers.channel import Channel, frame
from llmproxy.remote.workers.protocol import Message

PING_S = 1.0
SILENCE_S = 3.0
"""A connection on which nothing came for so long is lost."""
FRAME_BYTES_MAX = 16 << 20
"""A longer frame is not from this program."""
HELLO_BYTES_MAX = 16 << 10
"""A longer frame is no Hello, and nothing else may come before that."""
FRAME_MESSAGES_MAX = 256
"""An `Admit` has 37 kB at most, so that a frame of them stays below its limit."""
UNSENT_BYTES_MAX = 64 << 20
"""A peer that takes nothing while so much waits for it is lost."""

MessageT = TypeVar("MessageT")


class Sender(Protocol):
    """Where messages for the other side go. `local`: it is in this process."""

    local: bool

    def send(self, message: Message) -> None: ...

    def flush(self) -> None: ...


class MemberChannel(Channel[MessageT]):
    """One end of a connection between members. It ends when the peer is silent."""

    local = False

    def __init__(
        self,
        decoder: KnownMessages[MessageT],
        on_message: Callable[[MessageT], None],
        on_lost: Callable[[], None],
        frame_bytes_max: int = FRAME_BYTES_MAX,
        on_broken: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(decoder, on_message, on_lost, frame_bytes_max)
        self.on_broken = on_broken
        """Called instead of a log line with why what came is no frame."""
        self._heard_s = self._checked_s = self._loop.time()
        self._beat: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._heard_s = self._checked_s = self._loop.time()
        self._beat = self._loop.call_later(PING_S, self._check)

    def data_received(self, data: bytes) -> None:
        self._heard_s = self._loop.time()
        super().data_received(data)

    def introduced(self) -> None:
        """The peer is a member: it may send frames of any length that members send."""
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
        """The connection itself, once it is made."""
        assert self._transport is not None
        return self._transport

    def _check(self) -> None:
        assert self._transport is not None
        now = self._loop.time()
        if now - self._checked_s > 2 * PING_S:
            # This process stood still: what came meanwhile was not read yet.
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

    def _write(self, messages: list[Message]) -> None:
        assert self._transport is not None
        data = frame(messages)
        if len(data) <= FRAME_BYTES_MAX:
            self._transport.write(data)
        elif len(messages) > 1:
            self._write(messages[: len(messages) // 2])
            self._write(messages[len(messages) // 2 :])
        else:
            # The peer would end the connection.
            self._loop.call_exception_handler({"message": f"too long to be sent: {messages[0]!r:.200}"})


class LocalChannel:
    """The connection of the leader to itself: what one side sends, the other takes at once."""

    local = True

    def __init__(self, take: Callable[[Any], None]) -> None:
        self._take = take

    def send(self, message: Message) -> None:
        try:
            self._take(message)
        except Exception as error:  # noqa: BLE001 - as with any other member, a bug with one message ends nothing else
            report = {"message": f"a message was not understood: {message!r:.200}", "exception": error}
            asyncio.get_running_loop().call_exception_handler(report)

    def flush(self) -> None:
        """Nothing waits to be sent."""
