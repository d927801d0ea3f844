"""Frames: messages survive every split of the bytes, and no client data can break a frame."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from math import inf
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llmproxy.core.backends.catalogue import Target
from llmproxy.core.domain import AdmissionKind, GrantReason, Outcome, Placed, Predicted, Slo, Stage, Usage, Verdict
from llmproxy.core.lease_events import Progress, Recomputing, Returned, Started
from llmproxy.observe.packed import INTEGER_MAX
from llmproxy.remote import messages
from llmproxy.remote.link import FROM_WORKER, TO_WORKER, BrokenFrameError, Decoder, Frames, Link, frame
from llmproxy.remote.workers.main import SchedulerConnection
from tests.core.make import request
from tests.dispatching import turns, virtual
from tests.exits import exit_of
from tests.remote.workers.link import Pipe

# --- round trips ------------------------------------------------------------------------------------------------------

TEXTS = st.text(max_size=20)
NUMBERS = st.integers(0, 2**63)
TIMES = st.floats(0, 1e9)
USAGES = st.none() | st.builds(Usage, NUMBERS, NUMBERS, st.none() | NUMBERS)
TERMS = st.lists(st.tuples(TEXTS, TIMES), max_size=3).map(tuple)
REQUESTS = st.builds(
    request, id=TEXTS, adapter=st.none() | TEXTS, flow=TEXTS, arrived_s=TIMES, max_tokens=st.none() | NUMBERS,
    slo=st.none() | st.builds(Slo, st.none() | TIMES, st.none() | TIMES), limits=st.lists(TEXTS, max_size=2).map(tuple),
    prefix=st.lists(st.integers(0, 2**64 - 1), max_size=5).map(tuple), session=st.none() | TEXTS,
)  # fmt: skip
PREDICTED = st.none() | st.builds(Predicted, TIMES, TIMES)
PLACED = st.builds(Placed, TEXTS, TIMES, TERMS, NUMBERS, ttft=PREDICTED, tpot=PREDICTED)
WHYS = st.builds(
    GrantReason, st.lists(st.tuples(st.integers(-100, 100), NUMBERS), max_size=3).map(tuple), NUMBERS, TERMS, NUMBERS
)
EXITS = st.builds(
    exit_of, request_id=TEXTS, method=st.just("POST"), path=TEXTS, outcome=st.sampled_from(Outcome), status=NUMBERS,
    duration_s=TIMES, why=st.none() | WHYS, terms=TERMS, predicted_ttft=PREDICTED, met=st.none() | st.booleans(),
)  # fmt: skip
UP: st.SearchStrategy[list[messages.Sendable]] = st.lists(
    st.builds(messages.Admit, NUMBERS, REQUESTS, st.frozensets(TEXTS, max_size=3), st.sampled_from(AdmissionKind))
    | st.builds(messages.Resolve, NUMBERS, st.none() | TEXTS, TIMES, NUMBERS)
    | st.builds(messages.PageRequest, NUMBERS, st.binary(max_size=50), TEXTS)
    | st.builds(Returned, NUMBERS, st.sampled_from(Verdict), USAGES)
    | st.builds(messages.RequestEnded, TEXTS, st.none() | st.booleans())
    | st.builds(messages.PrefixCached, TEXTS, NUMBERS, TEXTS, st.lists(NUMBERS, max_size=5).map(tuple))
    | st.builds(messages.ExitReport, EXITS)
    | st.builds(Progress, NUMBERS, NUMBERS)
    | st.sampled_from(
        [
            messages.CancelCall(1),
            Started(2),
            messages.WorkerIdle(),
            messages.Listening("http://h:1"),
            messages.ResponseStored("resp_1", "a", ""),
            messages.LogLinesLost(3),
            messages.BufferedBytes(4),
            Recomputing(5),
        ]
    ),
    max_size=6,
)
DOWN: st.SearchStrategy[list[messages.Sendable]] = st.lists(
    st.builds(
        messages.LeaseGranted,
        NUMBERS,
        st.sampled_from(Stage),
        PLACED,
        TIMES,
        NUMBERS,
        WHYS,
        TIMES | st.just(inf),
    )
    | st.builds(messages.CallRefused, NUMBERS, st.sampled_from(Outcome), TEXTS, st.none() | TIMES)
    | st.builds(messages.NameResolved, NUMBERS, st.builds(Target, TEXTS, TEXTS, TEXTS, st.none() | TEXTS))
    | st.builds(
        messages.PageResponse,
        NUMBERS,
        NUMBERS,
        TEXTS,
        st.lists(st.tuples(TEXTS, TEXTS), max_size=3).map(tuple),
        st.binary(),
    )
    | st.builds(
        messages.KnownBackends,
        st.binary(),
        st.dictionaries(TEXTS, st.builds(Target, TEXTS, TEXTS, TEXTS, TEXTS)),
        st.none(),
    )
    | st.sampled_from(
        [
            messages.LeaseCut(1, True),
            messages.StopWorker(),
            messages.ShutdownState(leaving=True),
            messages.WorkerStart("w1", (3, 4), b"config"),
            messages.LearnedEstimates({}),
        ]
    ),
    max_size=6,
)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """The same bytes in pieces."""
    ends = sorted(place % (len(data) + 1) for place in places)
    return [data[i:j] for i, j in zip([0, *ends], [*ends, len(data)], strict=True)]


@pytest.mark.parametrize(("kind", "messages"), [(FROM_WORKER, UP), (TO_WORKER, DOWN)], ids=["up", "down"])
@given(draws=st.data(), places=st.lists(st.integers(0, 10_000), max_size=8))
def test_messages_arrive_unchanged(
    kind: Any, messages: st.SearchStrategy[list[messages.Sendable]], draws: st.DataObject, places: list[int]
) -> None:
    batches = draws.draw(st.lists(messages, max_size=4))
    frames = Frames(kind)
    data = b"".join(map(frame, batches))
    heard: list[Any] = []
    for piece in cut(data, places):
        frames.feed(piece, heard.append)
    assert heard == [message for batch in batches for message in batch]


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


# --- what no end of ours writes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x01\xc1",
        b"\x00\x00\x00\x01\x80",
        frame([messages.StopWorker()]),
        frame([]) + b"\x00\x00\x00\x02\x91\x90",
    ],
    ids=["a frame of 4 GB", "no MessagePack", "no array", "a message of the other side", "a message of no kind"],
)
def test_a_broken_frame_is_reported(data: bytes) -> None:
    with pytest.raises(BrokenFrameError):
        Frames(FROM_WORKER).feed(data, lambda _: None)


@given(st.binary(max_size=200))
def test_any_bytes_are_messages_or_broken(data: bytes) -> None:
    with suppress(BrokenFrameError):
        Frames(FROM_WORKER).feed(data, lambda _: None)


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
