"""Messages between members: the same come out that went in, and two releases understand each other."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmproxy.cluster.channel import FRAME_BYTES_MAX, FRAME_MESSAGES_MAX
from llmproxy.cluster.protocol import (
    FROM_MEMBER,
    PROTOCOL,
    TO_MEMBER,
    Balances,
    Drained,
    FromMember,
    Hello,
    KnownMessages,
    Learned,
    LeaseTaken,
    Members,
    NotLeader,
    Ping,
    RateDebts,
    Resume,
    Resumed,
    Running,
    ToMember,
    Welcome,
    aged,
)
from llmproxy.core.backends.catalogue import Target
from llmproxy.core.domain import Entry, KnownCapacity, KnownLimit, Outcome, Stage, Verdict
from llmproxy.workers import protocol
from llmproxy.workers.channel import BrokenFrameError, Frames, frame
from tests.core.make import request
from tests.workers.test_protocol import EXITS, NUMBERS, PLACED, REQUESTS, TEXTS, TIMES, USAGES, WHYS

CALLS = st.integers(-(2**40), 2**40)
CALL_SETS = st.frozensets(CALLS, max_size=5)
BOOLS = st.booleans()
TARGETS = st.builds(Target, TEXTS, TEXTS, TEXTS, st.none() | TEXTS)
LIMIT = st.builds(KnownLimit, NUMBERS, BOOLS, st.lists(TEXTS, max_size=3).map(tuple), st.none() | NUMBERS)
SIZE = st.tuples(NUMBERS, NUMBERS, TIMES, TIMES)
CAPACITY = st.builds(KnownCapacity, st.lists(TIMES, max_size=3).map(tuple), st.lists(SIZE, max_size=3).map(tuple))
LIMITS, CAPACITIES = (st.dictionaries(TEXTS, one, max_size=3) for one in (LIMIT, CAPACITY))
FROM: dict[type[Any], st.SearchStrategy[Any]] = {
    protocol.Admit: st.builds(protocol.Admit, CALLS, REQUESTS, st.frozensets(TEXTS), st.sampled_from(Entry)),
    protocol.CancelCall: st.builds(protocol.CancelCall, CALLS),
    protocol.LeaseStarted: st.builds(protocol.LeaseStarted, CALLS),
    protocol.LeaseCommitted: st.builds(protocol.LeaseCommitted, CALLS),
    protocol.LeaseProgress: st.builds(protocol.LeaseProgress, CALLS, NUMBERS),
    protocol.LeaseReturned: st.builds(protocol.LeaseReturned, CALLS, st.sampled_from(Verdict), USAGES),
    protocol.LeaseRecomputing: st.builds(protocol.LeaseRecomputing, CALLS),
    protocol.RequestEnded: st.builds(protocol.RequestEnded, TEXTS, st.none() | BOOLS),
    protocol.PrefixCached: st.builds(
        protocol.PrefixCached, TEXTS, CALLS, TEXTS, st.lists(NUMBERS, max_size=5).map(tuple)
    ),
    protocol.ResponseStored: st.builds(protocol.ResponseStored, TEXTS, TEXTS, TEXTS),
    protocol.PageRequest: st.builds(protocol.PageRequest, CALLS, st.binary(max_size=50), TEXTS),
    protocol.Resolve: st.builds(protocol.Resolve, CALLS, st.none() | TEXTS, TIMES, NUMBERS),
    protocol.ExitReport: st.builds(protocol.ExitReport, EXITS),
    Hello: st.builds(Hello, NUMBERS, TEXTS, TEXTS, TEXTS, TEXTS, TEXTS, NUMBERS),
    Resume: st.builds(Resume, CALL_SETS, CALL_SETS),
    Running: st.builds(Running, CALLS, REQUESTS, PLACED, TIMES, st.none() | TIMES, BOOLS, NUMBERS),
    Resumed: st.just(Resumed()),
    LeaseTaken: st.builds(LeaseTaken, CALLS),
    Ping: st.just(Ping()),
}
TO: dict[type[Any], st.SearchStrategy[Any]] = {
    protocol.LeaseGranted: st.builds(
        protocol.LeaseGranted, CALLS, CALLS, st.sampled_from(Stage), PLACED, TIMES, NUMBERS, WHYS, TIMES
    ),
    protocol.CallRefused: st.builds(protocol.CallRefused, CALLS, st.sampled_from(Outcome), TEXTS, st.none() | TIMES),
    protocol.LeaseCut: st.builds(protocol.LeaseCut, CALLS, BOOLS),
    protocol.ResponseStored: st.builds(protocol.ResponseStored, TEXTS, TEXTS, TEXTS),
    protocol.PageResponse: st.builds(
        protocol.PageResponse, CALLS, st.integers(100, 599), TEXTS, st.lists(st.tuples(TEXTS, TEXTS)).map(tuple),
        st.binary(max_size=50),
    ),
    protocol.NameResolved: st.builds(protocol.NameResolved, CALLS, TARGETS),
    Welcome: st.builds(Welcome, NUMBERS, TEXTS, TEXTS, TEXTS),
    NotLeader: st.builds(NotLeader, TEXTS),
    Members: st.builds(Members, st.lists(TEXTS, max_size=5).map(tuple)),
    Drained: st.builds(Drained, st.frozensets(TEXTS, max_size=5)),
    Balances: st.builds(Balances, TEXTS, st.integers(-100, 100), st.dictionaries(TEXTS, TIMES, max_size=5)),
    Learned: st.builds(Learned, LIMITS, CAPACITIES),
    RateDebts: st.builds(RateDebts, st.lists(st.tuples(TEXTS, TEXTS, TIMES), max_size=3).map(tuple)),
    Ping: st.just(Ping()),
}  # fmt: skip
WAYS = pytest.mark.parametrize(("kinds", "known"), [(FROM, FROM_MEMBER), (TO, TO_MEMBER)], ids=["from", "to"])


def heard(known: KnownMessages[Any], data: bytes) -> list[Any]:
    return list(Frames(known, FRAME_BYTES_MAX).feed(data))


def test_every_kind_is_tried() -> None:
    assert set(FROM) == set(get_args(FromMember))
    assert set(TO) == set(get_args(ToMember))


def test_no_two_kinds_have_one_number() -> None:
    kinds = set(FROM) | set(TO)
    assert len({kind.__struct_config__.tag for kind in kinds}) == len(kinds)


@WAYS
@given(data=st.data())
def test_messages_come_out_as_they_went_in(
    kinds: dict[type[Any], st.SearchStrategy[Any]], known: KnownMessages[Any], data: st.DataObject
) -> None:
    sent = data.draw(st.lists(st.one_of(*kinds.values()), max_size=4))
    # Numbers beyond 64 bits and texts that are no UTF-8 are bounded: see the tests of frames.
    assert heard(known, frame(sent)) == sent


# --- two releases -----------------------------------------------------------------------------------------------------


@WAYS
@given(data=st.data(), more=st.lists(st.none() | NUMBERS | TEXTS | st.lists(NUMBERS), max_size=3))
def test_further_last_fields_are_skipped(
    kinds: dict[type[Any], st.SearchStrategy[Any]], known: KnownMessages[Any], data: st.DataObject, more: list[Any]
) -> None:
    message = data.draw(st.one_of(*kinds.values()))
    [plain] = msgspec.msgpack.decode(frame([message])[4:])
    assert heard(known, _frame([[*plain, *more]])) == [message]


@WAYS
@given(kind=st.integers(60, 127) | TEXTS | st.none(), fields=st.lists(NUMBERS | TEXTS, max_size=4))
def test_unknown_kinds_are_skipped(
    kinds: dict[type[Any], st.SearchStrategy[Any]], known: KnownMessages[Any], kind: Any, fields: list[Any]
) -> None:
    del kinds
    assert heard(known, _frame([[kind, *fields], [Ping.__struct_config__.tag]])) == [Ping()]


@WAYS
def test_a_known_kind_that_is_wrong_is_broken(
    kinds: dict[type[Any], st.SearchStrategy[Any]], known: KnownMessages[Any]
) -> None:
    for kind in kinds:
        if kind.__struct_fields__:
            with pytest.raises(BrokenFrameError):
                heard(known, _frame([[kind.__struct_config__.tag, {}]]))


def _frame(messages: list[Any]) -> bytes:
    body = msgspec.msgpack.encode(messages)
    return len(body).to_bytes(4, "big") + body


# --- what no member of ours writes ------------------------------------------------------------------------------------


@WAYS
@given(data=st.binary(max_size=200))
def test_any_bytes_are_messages_or_broken(
    kinds: dict[type[Any], st.SearchStrategy[Any]], known: KnownMessages[Any], data: bytes
) -> None:
    del kinds
    with suppress(BrokenFrameError):
        heard(known, data)
    with suppress(BrokenFrameError):
        heard(known, len(data).to_bytes(4, "big") + data)


@pytest.mark.parametrize("messages", [5, None, {}, "x", [5], [None], ["x"], [{}]], ids=str)
def test_what_is_no_list_of_messages_is_broken(messages: Any) -> None:
    with pytest.raises(BrokenFrameError):
        heard(FROM_MEMBER, _frame(messages))


def test_a_frame_beyond_the_limit_is_broken_before_it_is_there() -> None:
    with pytest.raises(BrokenFrameError):
        heard(FROM_MEMBER, (FRAME_BYTES_MAX + 1).to_bytes(4, "big"))
    assert heard(FROM_MEMBER, FRAME_BYTES_MAX.to_bytes(4, "big")) == []


def test_the_longest_requests_fit_into_a_frame() -> None:
    longest = request(prefix=tuple(range(2**63, 2**63 + 4096)))
    admits = [protocol.Admit(number, longest, frozenset(), Entry.NEW) for number in range(FRAME_MESSAGES_MAX)]
    assert len(frame(admits)) < FRAME_BYTES_MAX


@given(REQUESTS, TIMES, TIMES)
def test_a_request_is_as_old_to_who_hears_of_it(asked: Any, ours: float, theirs: float) -> None:
    there = aged(aged(asked, ours), -theirs)
    for one, other in ((asked.arrived_s, there.arrived_s), (asked.deadline_s, there.deadline_s)):
        assert other - theirs == pytest.approx(one - ours, abs=1e-5)


def test_the_version_is_not_changed_by_accident() -> None:
    """Members of another version do not talk to each other, so that a roll-out would halve a cluster."""
    assert PROTOCOL == 1
