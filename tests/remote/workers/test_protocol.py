"""Frames and links: no client data breaks a frame, and no failure loses a message."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from llmproxy.core.domain import AdmissionKind
from llmproxy.core.lease_events import Progress, Started
from llmproxy.observe.packed import INTEGER_MAX
from llmproxy.remote import messages
from llmproxy.remote.link import FROM_WORKER, TO_WORKER, Decoder, Frames, Link, frame
from llmproxy.remote.workers.main import SchedulerConnection
from tests.core.make import request
from tests.dispatching import turns, virtual
from tests.remote.workers.link import Pipe


def heard_of(decoder: Decoder[Any], data: bytes) -> list[Any]:
    """The messages of these bytes."""
    heard: list[Any] = []
    Frames(decoder).feed(data, heard.append)
    return heard


# --- what clients may send --------------------------------------------------------------------------------------------


def test_any_number_and_text_of_a_client_fits_a_frame() -> None:
    vast = request(max_tokens=10**30, flow="a\udcffb", label="x", prefix=(2**64 - 1,))
    other = request(flow="a\udcfeb")
    sent = [messages.Admit(n, one, frozenset(), AdmissionKind.NEW) for n, one in enumerate((vast, other))]
    first, second = heard_of(FROM_WORKER, frame(sent))
    assert isinstance(first, messages.Admit)
    assert isinstance(second, messages.Admit)
    assert first.request == replace(vast, max_tokens=INTEGER_MAX, flow=first.request.flow)
    assert second.request == replace(other, flow=second.request.flow)
    assert first.request.flow != second.request.flow, "two flows are still two"


def test_a_text_of_a_class_of_its_own_is_a_text() -> None:
    class Name(str):
        __slots__ = ()

    [shown] = heard_of(TO_WORKER, frame([messages.PageResponse(1, 200, "OK", ((Name("A"), Name("b")),), b"")]))
    assert shown == messages.PageResponse(1, 200, "OK", (("A", "b"),), b"")


# --- the link ---------------------------------------------------------------------------------------------------------


class _End:
    """A link that records received messages, and its pipe."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.lost = 0
        self.link = Link(FROM_WORKER, self._hear, self._lost, local=True)
        self.pipe = Pipe(self.link)

    def _hear(self, message: Any) -> None:
        if message == messages.CancelCall(0):
            raise ValueError("a bug")
        self.heard.append(message)

    def _lost(self) -> None:
        self.lost += 1


@virtual
async def test_messages_of_one_turn_travel_in_one_write() -> None:
    end = _End()
    sender = Link(TO_WORKER, lambda _: None, lambda: None, local=True)
    sender.connection_made(end.pipe)
    for call in (1, 2, 3):
        sender.send(messages.CancelCall(call))
    assert end.pipe.writes == 0
    await turns()
    assert end.pipe.writes == 1
    sender.send(messages.CancelCall(4))
    await turns()
    assert end.pipe.writes == 2
    assert end.heard == [messages.CancelCall(1), messages.CancelCall(2), messages.CancelCall(3), messages.CancelCall(4)]


@virtual
async def test_a_bug_with_one_message_does_not_lose_the_next() -> None:
    end = _End()
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    end.link.data_received(frame([messages.CancelCall(0), messages.CancelCall(1)]))
    assert end.heard == [messages.CancelCall(1)]


@virtual
async def test_lost_link_drops_messages() -> None:
    end, calls = _End(), []
    sender = Link(TO_WORKER, lambda _: None, lambda: calls.append("lost"), local=True)
    sender.connection_made(end.pipe)
    sender.send(messages.CancelCall(1))
    sender.connection_lost(None)
    sender.send(messages.CancelCall(2))
    await turns()
    assert calls == ["lost"]
    assert end.heard == []


@virtual
async def test_a_broken_frame_ends_the_connection() -> None:
    end = _End()
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    end.link.connection_made(end.pipe)
    end.link.data_received(b"\xff\xff\xff\xff")
    await turns()
    assert end.lost == 1


def test_frames_are_small() -> None:
    assert len(frame([Progress(12345, 96)])) < 16
    assert len(msgspec.msgpack.encode(Started(12345))) < 8


# --- the start of a worker --------------------------------------------------------------------------------------------


@virtual
async def test_a_queued_message_that_fails_loses_none_after_it() -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    connection, handled = SchedulerConnection(), list[str]()

    def handle(message: messages.ToWorker) -> None:
        handled.append(type(message).__name__)
        if len(handled) == 1:
            raise RuntimeError("a bug")

    connection.link.data_received(frame([messages.ShutdownState(), messages.LearnedEstimates({})]))
    connection.handle_by(handle, lambda: None)
    connection.link.data_received(frame([messages.NewConfig(b"")]))
    assert handled == ["ShutdownState", "LearnedEstimates", "NewConfig"]
    assert [str(one["exception"]) for one in reported] == ["a bug"]


@virtual
async def test_nothing_is_sent_before_a_connection_is_open() -> None:
    """Without a transport, the message would never be sent."""
    link: Link[Any] = Link(TO_WORKER, lambda _: None, lambda: None, local=True)
    with pytest.raises(AssertionError):
        link.send(messages.WorkerIdle())
