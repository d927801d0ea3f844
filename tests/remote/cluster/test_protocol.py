"""Messages between processes: encoding and decoding, and compatibility of two releases of members."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from itertools import chain, pairwise
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect
from structlog.testing import capture_logs

from llmproxy.core.domain import (
    AdmissionKind,
    Grant,
    GrantReason,
    Outcome,
    Placed,
    Stage,
    Verdict,
)
from llmproxy.core.lease_events import Returned
from llmproxy.observe.exit import RequestExit
from llmproxy.remote import messages
from llmproxy.remote.link import (
    FALLBACKS,
    FRAME_BYTES_MAX,
    FRAME_MESSAGES_MAX,
    FROM_MEMBER,
    FROM_WORKER,
    TO_MEMBER,
    TO_WORKER,
    UNKNOWN_MAX,
    BrokenFrameError,
    Decoder,
    Frames,
    TolerantDecoder,
    frame,
)
from llmproxy.remote.messages import (
    FromMember,
    Ping,
    RunningLease,
    ToMember,
    relative_to,
)
from llmproxy.scheduling.attempt import Attempt
from tests.core.make import request
from tests.remote.strategies import DOWN, FROM, NUMBERS, REQUESTS, TEXTS, TIMES, TO, UP

WAYS = pytest.mark.parametrize(("kinds", "known"), [(FROM, FROM_MEMBER), (TO, TO_MEMBER)], ids=["from", "to"])
ALL_WAYS = pytest.mark.parametrize(
    ("kinds", "known"),
    [(FROM, FROM_MEMBER), (TO, TO_MEMBER), (UP, FROM_WORKER), (DOWN, TO_WORKER)],
    ids=["from", "to", "up", "down"],
)


def heard(known: Decoder[Any], *pieces: bytes) -> list[Any]:
    heard: list[Any] = []
    frames = Frames(known, FRAME_BYTES_MAX)
    for piece in pieces:
        frames.feed(piece, heard.append)
    return heard


def test_every_kind_is_tried() -> None:
    assert set(FROM) == set(get_args(FromMember))
    assert set(TO) == set(get_args(ToMember))


def test_no_two_kinds_have_one_number() -> None:
    kinds = set(FROM) | set(TO)
    assert len({kind.__struct_config__.tag for kind in kinds}) == len(kinds)


@ALL_WAYS
@given(data=st.data(), places=st.lists(st.integers(0, 10_000), max_size=8))
def test_messages_come_out_as_they_went_in(
    kinds: dict[type[Any], st.SearchStrategy[Any]], known: Decoder[Any], data: st.DataObject, places: list[int]
) -> None:
    frames = data.draw(st.lists(st.lists(st.one_of(*kinds.values()), max_size=4), max_size=3))
    sent = b"".join(map(frame, frames))
    ends = sorted(place % (len(sent) + 1) for place in places)
    # Numbers beyond 64 bits and texts that are no UTF-8 are bounded: see the tests of frames.
    assert heard(known, *(sent[i:j] for i, j in pairwise([0, *ends, len(sent)]))) == [*chain(*frames)]


# --- two releases -----------------------------------------------------------------------------------------------------


@WAYS
@given(data=st.data(), more=st.lists(st.none() | NUMBERS | TEXTS | st.lists(NUMBERS), max_size=3))
def test_further_last_fields_are_skipped(
    kinds: dict[type[Any], st.SearchStrategy[Any]], known: TolerantDecoder[Any], data: st.DataObject, more: list[Any]
) -> None:
    message = data.draw(st.one_of(*kinds.values()))
    [plain] = msgspec.msgpack.decode(frame([message])[4:])
    assert heard(known, _frame([[*plain, *more]])) == [message]


@WAYS
@given(kind=st.integers(60, 127) | TEXTS | st.none(), fields=st.lists(NUMBERS | TEXTS, max_size=4))
def test_unknown_kinds_are_skipped(
    kinds: dict[type[Any], st.SearchStrategy[Any]], known: TolerantDecoder[Any], kind: Any, fields: list[Any]
) -> None:
    del kinds
    assert heard(known, _frame([[kind, *fields], [Ping.__struct_config__.tag]])) == [Ping()]


@WAYS
def test_a_known_kind_that_is_wrong_is_broken(
    kinds: dict[type[Any], st.SearchStrategy[Any]], known: TolerantDecoder[Any]
) -> None:
    for kind in kinds:
        if kind.__struct_fields__:
            with pytest.raises(BrokenFrameError):
                heard(known, _frame([[kind.__struct_config__.tag, {}]]))


UNKNOWN = "from a later release"


def values(of: inspect.Type, way: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], type[Enum]]]:
    """Where a type has enums: the keys and places on the way there in plain data, and the enum."""
    match of:
        case inspect.EnumType(cls):
            yield way, cls
        case inspect.StructType(array_like=True, fields=fields, tag=tag):
            for place, field in enumerate(fields, 0 if tag is None else 1):
                yield from values(field.type, (*way, place))
        case inspect.StructType(fields=fields) | inspect.DataclassType(fields=fields):
            for field in fields:
                yield from values(field.type, (*way, field.encode_name))
        case inspect.UnionType(types):
            for one in types:
                yield from values(one, way)
        case inspect.CollectionType(item_type):
            yield from values(item_type, (*way, 0))
        case inspect.TupleType(item_types):
            for place, one in enumerate(item_types):
                yield from values(one, (*way, place))
        case inspect.DictType(key_type, value_type):
            assert not [*values(key_type), *values(value_type)], "a value of an enum in a mapping is not looked for"


TRAVEL = [
    pytest.param(known, kind, way, enum, id=f"{kind.__name__}-{enum.__name__}-{'.'.join(map(str, way))}")
    for kinds, known in ((FROM, FROM_MEMBER), (TO, TO_MEMBER))
    for kind in kinds
    for way, enum in values(inspect.type_info(kind))
]
GRANT = Grant(1, request(), Placed("a", 0.0, (), 1), 0.0, 0, GrantReason((), 0, (), 0))
FULL: dict[type[Any], Any] = {
    messages.Admit: messages.Admit(1, request(), frozenset(), AdmissionKind.NEW),
    Returned: Returned(1, Verdict.SERVED, None),
    messages.ExitReport: messages.ExitReport(
        RequestExit(
            request_id="r",
            method="POST",
            path="/",
            outcome=Outcome.COMPLETED,
            status=200,
            duration_s=1.0,
            tried=[Attempt.begun(GRANT, 0.0)],
        )
    ),
    RunningLease: RunningLease(1, request(), GRANT.placed, 0.0, None, False, 0),
    messages.LeaseGranted: messages.LeaseGranted(1, Stage.WHOLE, GRANT.placed, 0.0, 0, GRANT.why, 1.0),
    messages.CallRefused: messages.CallRefused(1, Outcome.SHED, "", None),
}
"""A message of each kind that has a value of an enum, with all the parts in which one is."""


@pytest.mark.parametrize(("known", "kind", "way", "enum"), TRAVEL)
def test_an_unknown_value_is_taken_for_another_one(
    known: TolerantDecoder[Any], kind: type[Any], way: tuple[Any, ...], enum: type[Enum]
) -> None:
    """Neither the connection ends, nor are the messages beside it lost."""
    beside = Ping()
    [_, plain, _] = sent = msgspec.msgpack.decode(frame([beside, FULL[kind], beside])[4:])
    part = plain
    for key in way[:-1]:
        part = part[key]
    part[way[-1]] = UNKNOWN
    [before, message, after] = heard(known, _frame(sent))
    assert (before, after) == (beside, beside)
    part[way[-1]] = FALLBACKS[enum].value
    assert message == heard(known, _frame([plain]))[0]


def test_an_unknown_value_is_logged_once() -> None:
    known: TolerantDecoder[Any] = TolerantDecoder(ToMember)
    sent = msgspec.msgpack.decode(frame([FULL[messages.CallRefused]])[4:])
    with capture_logs() as logs:
        for value in (UNKNOWN, UNKNOWN, "and another one"):
            sent[0][2] = value
            heard(known, _frame(sent))
        for number in range(2 * UNKNOWN_MAX):
            sent[0][2] = str(number)
            heard(known, _frame(sent))
    assert [(line["of"], line["value"]) for line in logs[:2]] == [("Outcome", UNKNOWN), ("Outcome", "and another one")]
    assert len(logs) == UNKNOWN_MAX


REQUIRED = {
    "Admit": "call request excluded entry",
    "Attempt": "",
    "Balances": "pool band flows",
    "CallRefused": "call outcome message retry_after_s",
    "CancelCall": "call",
    "Committed": "lease",
    "Drained": "backends",
    "ExitReport": "record",
    "GrantReason": "waiting flows standing passed_over",
    "Hello": "protocol version name incarnation address config epoch",
    "KnownCapacity": "sums sizes",
    "KnownLimit": "limit settled models",
    "Learned": "limits capacities",
    "LeaseAcknowledged": "call",
    "LeaseCut": "lease revoked",
    "LeaseGranted": "call stage placed at_s queued_ahead why left_s",
    "Members": "names",
    "NameResolved": "call target",
    "NotLeader": "why",
    "PageRequest": "call request remote",
    "PageResponse": "call status reason headers body",
    "Ping": "",
    "Placed": "backend score terms candidates",
    "Predicted": "expected_s p90_s",
    "PrefixCached": "pool lease backend hashes",
    "Progress": "lease output_tokens",
    "RateDebts": "debts",
    "Recomputing": "lease",
    "RememberedPrefix": "pool backend hashes",
    "Request": "id pool model adapter band flow arrived_s deadline_s body_bytes prompt_tokens output_tokens",
    "RequestEnded": "request_id met",
    "RequestExit": "request_id method path",
    "Resolve": "call name no_backend_wait_s body_bytes",
    "ResponseStored": "response_id backend tenant",
    "Resume": "waiting running",
    "Resumed": "",
    "Returned": "lease verdict",
    "RunningLease": "call request placed age_s started_age_s committed output_tokens",
    "Slo": "",
    "Started": "lease",
    "Target": "requested model pool adapter",
    "TraceContext": "trace_id span_id parent_id sampled",
    "Usage": "prompt_tokens output_tokens",
    "Waited": "rule",
    "Welcome": "epoch name version config",
}
"""The fields without a default of everything that travels, by name and in their order."""


def structs(of: inspect.Type) -> Iterator[inspect.StructType | inspect.DataclassType]:
    """The structs that data of a type consists of."""
    match of:
        case inspect.StructType(fields=fields) | inspect.DataclassType(fields=fields):
            yield of
            for field in fields:
                yield from structs(field.type)
        case inspect.UnionType(types) | inspect.TupleType(types):
            for one in types:
                yield from structs(one)
        case inspect.CollectionType(item_type) | inspect.DictType(value_type=item_type):
            yield from structs(item_type)


def test_no_release_changes_required_fields() -> None:
    """A new field has a default, and one without a default is neither renamed nor left out.

    Whoever needs more raises PROTOCOL and writes `REQUIRED` anew. New kinds are added to it.
    """
    found = {
        one.cls.__name__: " ".join(field.encode_name for field in one.fields if field.required)
        for kind in {**FROM, **TO}
        for one in structs(inspect.type_info(kind))
    }
    assert found == REQUIRED


def _frame(messages: list[Any]) -> bytes:
    body = msgspec.msgpack.encode(messages)
    return len(body).to_bytes(4, "big") + body


# --- what no member of ours writes ------------------------------------------------------------------------------------


@ALL_WAYS
@given(data=st.binary(max_size=200))
def test_any_bytes_are_messages_or_broken(
    kinds: dict[type[Any], st.SearchStrategy[Any]], known: Decoder[Any], data: bytes
) -> None:
    del kinds
    with suppress(BrokenFrameError):
        heard(known, data)
    with suppress(BrokenFrameError):
        heard(known, len(data).to_bytes(4, "big") + data)


@pytest.mark.parametrize("messages", [5, None, {}, "x", [5], [None], ["x"], [{}]], ids=str)
@pytest.mark.parametrize("known", [FROM_MEMBER, FROM_WORKER], ids=["member", "worker"])
def test_frame_without_a_list_of_messages_is_broken(known: Decoder[Any], messages: Any) -> None:
    with pytest.raises(BrokenFrameError):
        heard(known, _frame(messages))


def test_workers_know_every_kind() -> None:
    """Both sides of a worker have the same release, so that a message of the other side is a bug."""
    for data in (frame([messages.StopWorker()]), _frame([[]])):
        with pytest.raises(BrokenFrameError):
            heard(FROM_WORKER, data)


def test_a_frame_beyond_the_limit_is_broken_before_it_is_there() -> None:
    with pytest.raises(BrokenFrameError):
        heard(FROM_MEMBER, (FRAME_BYTES_MAX + 1).to_bytes(4, "big"))
    assert heard(FROM_MEMBER, FRAME_BYTES_MAX.to_bytes(4, "big")) == []


def test_the_longest_requests_fit_into_a_frame() -> None:
    longest = request(prefix=tuple(range(2**63, 2**63 + 4096)))
    admits = [messages.Admit(number, longest, frozenset(), AdmissionKind.NEW) for number in range(FRAME_MESSAGES_MAX)]
    assert len(frame(admits)) < FRAME_BYTES_MAX


@given(REQUESTS, TIMES, TIMES)
def test_a_request_is_as_old_to_who_hears_of_it(asked: Any, ours: float, theirs: float) -> None:
    there = relative_to(relative_to(asked, ours), -theirs)
    for one, other in ((asked.arrived_s, there.arrived_s), (asked.deadline_s, there.deadline_s)):
        assert other - theirs == pytest.approx(one - ours, abs=1e-5)


def test_a_broken_frame_after_a_good_one_is_a_protocol_error() -> None:
    received: list[object] = []
    with pytest.raises(BrokenFrameError):
        Frames(FROM_MEMBER, FRAME_BYTES_MAX).feed(frame([Ping()]) + b"\x00\x00\x00\x01\xc1", received.append)
    assert received == [Ping()]
