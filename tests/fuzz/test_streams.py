"""A stream means the same however it is split, and is forwarded without only the event that the proxy asked for."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from llmproxy.core.domain import Usage
from llmproxy.gateway.proxying.sse import StreamTap, usage_in_tail
from tests.fuzz.profile import FUZZED
from tests.gateway.proxying.test_sse import facts, through

COUNTS = st.none() | st.integers(-1, 9) | st.text(max_size=2) | st.booleans()
USAGES = st.none() | st.dictionaries(
    st.sampled_from(["prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "usage", "x"]), COUNTS
)
TEXTS = st.text(alphabet=st.sampled_from('ab"\\{}[]:,\n usage漢'), max_size=12)
CHOICES = st.lists(st.fixed_dictionaries({"delta": st.fixed_dictionaries({"content": TEXTS})}), max_size=2)
PAYLOADS = st.one_of(
    st.fixed_dictionaries({"id": TEXTS}, optional={"choices": CHOICES, "usage": USAGES, "error": st.none() | TEXTS}),
    st.fixed_dictionaries({"id": st.just("x"), "choices": st.just([]), "usage": USAGES}),
    st.fixed_dictionaries({"error": st.fixed_dictionaries({"code": st.sampled_from([400, 500, "4", None])})}),
    st.fixed_dictionaries({"type": st.sampled_from(["error", "ping", "message_stop"]), "usage": USAGES}),
)
NAMES = st.sampled_from(["", "event: error\n", "event: message_stop\n", "event:response.completed\n", "event: ping\n"])
EVENTS = st.one_of(
    st.tuples(NAMES, PAYLOADS, st.booleans()).map(
        lambda one: f"{one[0]}data: {json.dumps(one[1], ensure_ascii=one[2])}\n\n".encode()
    ),
    st.sampled_from(
        [b": keep-alive\n\n", b"data: [DONE]\n\n", b"\n", b"retry: 5\n\n", b"data:\n\n", b"id: 1\ndata: x\n\n"]
    ),
    st.text(alphabet=':{}"dat usage\n', max_size=20).map(str.encode),
    st.binary(max_size=12),
)
STREAMS = st.lists(EVENTS, max_size=8).map(b"".join)
CUTS = st.lists(st.integers(0, 600), max_size=12)


def cut_at(stream: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    return [stream[start:end] for start, end in pairwise(places)]


def is_usage_event(event: bytes) -> bool:
    """The definition by a parser: data of one line, an object without choices or error, with token counts."""
    if not event.startswith(b"data:") or event.count(b"\n") != 2:
        return False
    try:
        fields = json.loads(event[5:])
    except ValueError:
        return False
    usage = fields.get("usage") if isinstance(fields, dict) else None
    known = ("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens")
    return (
        isinstance(usage, dict)
        and any(type(usage.get(name)) is int for name in known)
        and fields.get("choices") == []
        and not fields.get("error")
    )


@FUZZED
@given(STREAMS, CUTS, st.booleans(), st.booleans())
@example(b'event: error\ndata: {"choices":[],"usage":{"prompt_tokens":0}}\n\n', [1], True, False)
@example(b'data: {"id": ""}\r\n\r\n', [19], False, False)
def test_a_stream_says_the_same_however_it_is_cut(stream: bytes, cuts: list[int], hide: bool, windows: bool) -> None:
    if windows:
        stream = stream.replace(b"\r", b"").replace(b"\n", b"\r\n")
    whole, tap_of_whole = through([stream], hide)
    out, tap = through(cut_at(stream, cuts), hide)
    assert out == whole
    assert facts(tap) == facts(tap_of_whole)
    assert through(cut_at(stream, cuts), False)[0] == stream


@FUZZED
@given(st.lists(st.tuples(PAYLOADS, st.booleans()), max_size=8), CUTS)
@example([({"id": "x", "choices": [], "usage": {"prompt_tokens": 1, "usage": {"input_tokens": 1}}}, True)], [])
@example([({"id": "x", "choices": [], "error": None, "usage": {"prompt_tokens": 1}}, True)], [])
def test_exactly_the_usage_events_are_hidden(payloads: list[tuple[dict[str, Any], bool]], cuts: list[int]) -> None:
    events = [f"data: {json.dumps(fields, ensure_ascii=escaped)}\n\n".encode() for fields, escaped in payloads]
    out, _ = through(cut_at(b"".join(events), cuts), True)
    assert out == b"".join(event for event in events if not is_usage_event(event))


@FUZZED
@given(PAYLOADS, st.binary(max_size=20), st.binary(max_size=20))
def test_usage_of_an_answer_is_read_as_by_a_parser(fields: dict[str, Any], before: bytes, after: bytes) -> None:
    usage_in_tail(before + json.dumps(fields).encode() + after)
    found = usage_in_tail(json.dumps(fields).encode())
    assert found == usage_alone(fields.get("usage"))


LEAVES = st.none() | st.integers(-1, 9) | TEXTS
OBJECTS = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["usage", "response", "message", "prompt_tokens", 'a"\\', "x"]), inner)
    ),
    max_leaves=20,
)


@FUZZED
@given(
    st.dictionaries(st.sampled_from(["usage", "response", "message", "x"]), OBJECTS), st.booleans(), st.integers(0, 40)
)
@example({"usage": {"prompt_tokens": 0}, "response": {"usage": {}}}, False, 0)
def test_a_usage_is_found_in_its_own_place_and_nowhere_else(fields: dict[str, Any], escaped: bool, cut: int) -> None:
    whole = json.dumps(fields, ensure_ascii=escaped).encode()
    expected = usage_alone(fields.get("usage"))
    assert usage_in_tail(whole) == expected
    assert usage_in_tail(whole[min(cut, len(whole)) :]) in (expected, None)
    tap = StreamTap()
    tap.feed(b"data: " + whole + b"\n\n")
    assert tap.usage == usage_alone(own_usage(fields))


def usage_alone(usage: object) -> Usage | None:
    """The usage in an object that has only this member."""
    return usage_in_tail(json.dumps({"usage": usage}).encode()) if isinstance(usage, dict) else None


def own_usage(fields: dict[str, Any]) -> dict[str, Any] | None:
    """The definition, by a parser: the answer's own member, else the member of the last inner answer."""
    if isinstance(usage := fields.get("usage"), dict):
        return usage
    for name, held in reversed(fields.items()):
        if name in ("response", "message") and isinstance(held, dict) and isinstance(held.get("usage"), dict):
            inner: dict[str, Any] = held["usage"]
            return inner
    return None
