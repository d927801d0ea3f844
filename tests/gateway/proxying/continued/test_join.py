"""A stream that breaks at any byte, and goes on elsewhere, is one answer for its client."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmproxy.gateway.http.routes import BodyKind
from llmproxy.gateway.proxying.continued.join import MARK, JoinedTap, RestOf
from llmproxy.gateway.proxying.continued.rule import How, NotContinued, Rest, write_rest
from llmproxy.gateway.proxying.continued.sent import Sent, read_sent
from llmproxy.gateway.proxying.sse import StreamTap
from llmproxy.gateway.request.json_scan import drain
from tests.gateway.proxying.continued.engines import PIECES, PROMPT_TOKENS, events

CHAT, COMPLETION = BodyKind.CHAT, BodyKind.COMPLETION
TEXT = "".join(PIECES)
BODIES = {
    CHAT: b'{"model":"tiny","stream":true,"messages":[{"role":"user","content":"go"}],"max_tokens":%d}',
    COMPLETION: b'{"model":"tiny","stream":true,"prompt":"go","max_tokens":%d}',
}


def answered(kind: BodyKind, body: bytes, *, usage: bool, ids: bool) -> list[bytes]:
    """Returns the events of an engine that gets the request for the rest. It knows the answer by its beginning."""
    fields = orjson.loads(body)
    if kind is CHAT:
        last = fields["messages"][-1]
        text = last["content"] if last["role"] == "assistant" else ""
        assert (last["role"] == "assistant") is fields.get("continue_final_message", False)
    elif isinstance(fields["prompt"], str):
        text = fields["prompt"].removeprefix("go")
    else:
        text = "".join(PIECES[number - 100] for number in fields["prompt"][PROMPT_TOKENS:])
    known = [number for number in range(len(PIECES) + 1) if "".join(PIECES[:number]) == text]
    assert known, f"{text!r} is no beginning of the answer"
    return events(kind, known[0], until=known[0] + fields["max_tokens"], usage=usage, ids=ids, name="the second")


def fed(tap: StreamTap, data: bytes, sizes: list[int]) -> bytes:
    """Feeds `data` in chunks of these sizes, over and over."""
    out, at, turn = b"", 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        out += tap.feed(data[at : at + size])
        at, turn = at + size, turn + 1
    return out


def broken_and_joined(
    kind: BodyKind, cut: int, limit: int, sizes: list[int], *, usage: bool = True, ids: bool = False
) -> tuple[bytes, How]:
    """Returns the bytes for the client of a stream that is cut after `cut` bytes, and how the rest was asked for."""
    body = BODIES[kind] % limit
    whole = b"".join(events(kind, until=limit, usage=usage, ids=ids))
    first = fed(StreamTap(holds=True), whole[:cut], sizes)
    sent = drain(read_sent(first))
    assert sent is not None
    rest = drain(write_rest(body, kind, sent, limit))
    tap = JoinedTap(False, RestOf(sent, rest, 0.0))
    second = fed(tap, b"".join(answered(kind, rest.body, usage=usage, ids=ids)), sizes)
    assert not tap.error_seen, tap.held_back
    return first + second + tap.flush(), rest.how


def parsed(raw: bytes) -> list[dict[str, Any]]:
    assert raw.endswith(b"data: [DONE]\n\n")
    lines = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: ")]
    assert lines.count(b"[DONE]") == 1
    return [orjson.loads(line) for line in lines[:-1]]


@given(
    kind=st.sampled_from([CHAT, COMPLETION]),
    share=st.floats(0, 1, exclude_max=True),
    limit=st.integers(1, len(PIECES) + 2),
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=5),
    usage=st.booleans(),
    ids=st.booleans(),
)
# The whole text arrived, so the second engine has no token left.
@example(kind=CHAT, share=0.96875, limit=15, sizes=[1], usage=True, ids=False)
def test_any_cut_gives_each_token_once(
    kind: BodyKind, share: float, limit: int, sizes: list[int], usage: bool, ids: bool
) -> None:
    end = len(b"".join(events(kind, until=limit, usage=usage, ids=ids))) - len(b"data: [DONE]\n\n")
    try:
        raw, _ = broken_and_joined(kind, int(share * end), limit, sizes, usage=usage, ids=ids)
    except NotContinued:
        # The ids of white space may be other ids the next time.
        assert (kind, ids) == (CHAT, True)
        return
    found = parsed(raw)
    choices = [choice for event in found for choice in event["choices"]]
    text = "".join(choice.get("delta", choice).get("content" if kind is CHAT else "text") or "" for choice in choices)
    assert text == "".join(PIECES[:limit])
    assert sum("role" in choice.get("delta", ()) for choice in choices) == (kind is CHAT)
    ends = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    assert ends == ["stop" if limit >= len(PIECES) else "length"]
    assert len({(event["id"], event["created"], event["model"]) for event in found}) == 1
    counted = [event["usage"] for event in found if event.get("usage")]
    tokens = min(limit, len(PIECES))
    whole = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens, "total_tokens": PROMPT_TOKENS + tokens}
    assert counted == [whole] * usage


@given(
    kind=st.sampled_from([CHAT, COMPLETION]),
    cuts=st.lists(st.floats(0, 1, exclude_max=True), min_size=2, max_size=3),
    limit=st.integers(1, len(PIECES) + 2),
    ids=st.booleans(),
)
# The rest has an event without text, which is a token of an incomplete character.
@example(kind=CHAT, cuts=[0.0, 0.9375], limit=9, ids=False)
# The second engine generates such a token again.
@example(kind=CHAT, cuts=[0.875, 0.75], limit=9, ids=False)
def test_any_cuts_one_after_the_other_give_each_token_once(
    kind: BodyKind, cuts: list[float], limit: int, ids: bool
) -> None:
    body = BODIES[kind] % limit
    seen, tap, stream = b"", StreamTap(holds=True), events(kind, until=limit, ids=ids)
    try:
        for share in cuts:
            # At least the usage and the end mark are missing.
            seen += tap.feed(b"".join(stream[:-2])[: int(share * len(b"".join(stream[:-2])))])
            sent = drain(read_sent(seen))
            assert sent is not None
            rest = drain(write_rest(body, kind, sent, limit))
            tap, stream = JoinedTap(False, RestOf(sent, rest, 0.0)), answered(kind, rest.body, usage=True, ids=ids)
    except NotContinued:
        assert (kind, ids) == (CHAT, True)
        return
    found = parsed(seen + tap.feed(b"".join(stream)) + tap.flush())
    choices = [choice for event in found for choice in event["choices"]]
    text = "".join(choice.get("delta", choice).get("content" if kind is CHAT else "text") or "" for choice in choices)
    assert text == "".join(PIECES[:limit])
    assert [event["usage"]["completion_tokens"] for event in found if event.get("usage")] == [min(limit, len(PIECES))]


@pytest.mark.parametrize(
    ("kind", "ids", "tokens", "how"),
    [
        (CHAT, False, 0, How.ANEW),
        (CHAT, False, 3, How.TEXT),
        (CHAT, True, 3, How.TEXT),
        (COMPLETION, False, 0, How.ANEW),
        (COMPLETION, False, 3, How.TEXT),
        (COMPLETION, True, 3, How.IDS),
    ],
)
def test_the_way_depends_on_what_the_engine_tells(kind: BodyKind, ids: bool, tokens: int, how: How) -> None:
    cut = len(b"".join(events(kind, ids=ids)[: tokens + (kind is CHAT)]))
    raw, used = broken_and_joined(kind, cut, 100, [50], ids=ids)
    assert used is how
    assert raw.count(MARK) == 1


@pytest.mark.parametrize(("prompt_ids", "prompt_tokens"), [(None, 1), ([1, 2, 3, 4, 5, 6], 6)])
def test_a_text_that_is_read_as_fewer_tokens_leaves_a_prompt(prompt_ids: list[int] | None, prompt_tokens: int) -> None:
    sent = Sent(text="so far", tokens=9, prompt_ids=prompt_ids)
    tap = JoinedTap(False, RestOf(sent, Rest(How.TEXT, b"", "", 9), 0.0))
    usage = {"prompt_tokens": 8, "completion_tokens": 3, "total_tokens": 11}
    out = tap.feed(b"data: " + orjson.dumps({"id": "x", "choices": [], "usage": usage}) + b"\n\n")
    found = orjson.loads(out.removeprefix(MARK).removeprefix(b"data: "))["usage"]
    whole = {"prompt_tokens": prompt_tokens, "completion_tokens": 12, "total_tokens": prompt_tokens + 12}
    assert found == whole


def test_reasoning_in_the_rest_ends_the_stream_with_an_error() -> None:
    tap = JoinedTap(False, RestOf(Sent(text="so far", tokens=2), Rest(How.TEXT, b"", "", 2), 0.0))
    event = {"id": "x", "choices": [{"index": 0, "delta": {"reasoning": "hm"}}]}
    assert tap.feed(b"data: " + orjson.dumps(event) + b"\n\n") == MARK
    assert tap.error_seen
    assert b"it begins to reason" in tap.held_back
    assert tap.feed(b"data: [DONE]\n\n") == b""


def joined(rest: Rest, sent: Sent, *chunks: bytes) -> tuple[bytes, JoinedTap]:
    """Returns the bytes for the client of a rest that ends regularly, and its tap."""
    tap = JoinedTap(False, RestOf(sent, rest, 0.0))
    return b"".join([tap.feed(chunk) for chunk in chunks]) + tap.flush(), tap


def after(kind: BodyKind, tokens: int) -> Sent:
    sent = drain(read_sent(b"".join(events(kind)[: tokens + (kind is CHAT)])))
    assert sent is not None
    return sent


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"data: ", b"id: 7\ndata: "),
        (b"\n\n", b"\nid: 7\n\n"),
        (b"data: ", b"event: message\ndata: "),
        (b"data: ", b": a comment\ndata: "),
        (b"data: ", b"data:"),
        (b"\n", b"\r\n"),
        (b"\n", b"\r"),
        (b',"choices"', b',\ndata: "choices"'),
    ],
)
def test_events_are_joined_in_any_form_that_the_standard_allows(old: bytes, new: bytes) -> None:
    sent = after(CHAT, 3)
    rest = b"".join(events(CHAT, 3, name="the second")).replace(old, new)
    raw, tap = joined(Rest(How.TEXT, b"", "", 3), sent, b"\xef\xbb\xbf" + rest)
    assert not tap.error_seen, tap.held_back
    lines = [line[5:].strip() for line in raw.splitlines() if line.startswith(b"data:")]
    found = [orjson.loads(line) for line in lines[:-1]]
    assert lines[-1] == b"[DONE]"
    assert {event["id"] for event in found} == {"first"}
    assert not any("role" in choice["delta"] for event in found for choice in event["choices"])


@pytest.mark.parametrize("at_once", [True, False])
def test_nothing_follows_an_event_that_cannot_be_joined(at_once: bool) -> None:
    rest = [b"data: {\n\n", *events(CHAT, 3)]
    raw, tap = joined(Rest(How.TEXT, b"", "", 3), after(CHAT, 3), *([b"".join(rest)] if at_once else rest))
    assert raw == MARK
    assert (tap.held_back.count(b"\n\n"), b"[DONE]" in tap.held_back) == (1, False)


@pytest.mark.parametrize("chunks", [[], events(CHAT, 3)[:3]])
def test_a_rest_without_an_end_is_cut_short(chunks: list[bytes]) -> None:
    _, tap = joined(Rest(How.TEXT, b"", "", 3), after(CHAT, 3), *chunks)
    assert tap.cut_short


@pytest.mark.parametrize("usage", [{"completion_tokens": 2}, {"prompt_tokens": 2, "completion_tokens": None}])
def test_a_usage_without_all_counts_is_passed_on(usage: dict[str, Any]) -> None:
    event = b"data: " + orjson.dumps({"choices": [], "usage": usage}) + b"\n\n"
    raw, tap = joined(Rest(How.TEXT, b"", "", 3), after(CHAT, 3), *events(CHAT, 3, usage=False)[:-1], event)
    assert not tap.error_seen
    assert raw.endswith(event)


def test_usage_is_sent_once() -> None:
    whole = events(CHAT)[:-1]
    sent = drain(read_sent(b"".join(whole)))
    assert sent is not None
    raw, _ = joined(Rest(How.TEXT, b"", "", 3, text_ended=True), sent, *events(CHAT, len(PIECES) - 1))
    assert raw == MARK + b"data: [DONE]\n\n"


def with_ids(text: str, ids: list[int], finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish, "token_ids": ids, "prompt_token_ids": [1]}
    return b"data: " + orjson.dumps({"id": "x", "choices": [choice]}) + b"\n\n"


def test_ids_that_the_client_has_are_not_sent_again() -> None:
    sent = drain(read_sent(with_ids("a", [7]) + with_ids("", [8])))
    assert sent is not None
    rest = drain(write_rest(BODIES[COMPLETION] % 9, COMPLETION, sent, 9))
    assert orjson.loads(rest.body)["prompt"] == [1, 7]
    raw, _ = joined(rest, sent, with_ids("", [8]), with_ids("é", [9], "stop"), b"data: [DONE]\n\n")
    assert [choice["token_ids"] for event in parsed(raw) for choice in event["choices"]] == [[9]]
    _, tap = joined(rest, sent, with_ids("q", [5]), b"data: [DONE]\n\n")
    assert b"it has other tokens" in tap.held_back


def test_the_first_text_may_follow_a_byte_order_mark_or_come_with_the_role() -> None:
    event = {"id": "x", "choices": [{"index": 0, "delta": {"role": "assistant", "content": "a"}}]}
    sent = drain(read_sent(b"\xef\xbb\xbfdata: " + orjson.dumps(event) + b"\n\n"))
    assert sent is not None
    assert (sent.text, sent.tokens, sent.roles) == ("a", 1, {0})


def test_an_engine_that_begins_the_answer_again_is_noticed() -> None:
    sent = after(CHAT, 10)
    raw, tap = joined(Rest(How.TEXT, b"", "", 9), sent, *events(CHAT))
    assert b"Once" not in raw
    assert tap.error_seen
    assert b"begins the answer again" in tap.held_back


def test_the_space_of_a_token_is_written_again_within_the_limit() -> None:
    choices = [{"index": 0, "delta": {"content": text}} for text in ("One", " two.\n")]
    sent = drain(read_sent(b"".join(b"data: " + orjson.dumps({"choices": [one]}) + b"\n\n" for one in choices)))
    assert sent is not None
    rest = drain(write_rest(BODIES[CHAT] % 5, CHAT, sent, 5))
    assert (rest.space, rest.tokens, orjson.loads(rest.body)["max_tokens"]) == ("\n", 1, 4)


@pytest.mark.parametrize(
    ("sent", "rest", "whole"),
    [
        (".\n\n", ["\n\n", "Zo"], ".\n\nZo"),
        (".\n\n", ["\n", "\n", "\nZo"], ".\n\n\nZo"),
        (".\n\n", [" Zo"], ".\n\nZo"),
        (".\n\n", [" ", "Zo"], ".\n\nZo"),
        (":\n", ["\n    pass"], ":\n    pass"),
        (":\n\n", ["\n", "    pass"], ":\n\n    pass"),
        ("a ", [" Zo"], "a Zo"),
        ("a ", ["\nZo"], "a \nZo"),
        ("a ", ["Zo"], "a Zo"),
    ],
)
def test_white_space_at_the_join_is_not_doubled(sent: str, rest: list[str], whole: str) -> None:
    pieces = [{"index": 0, "delta": {"content": piece}, "finish_reason": None} for piece in rest]
    chunks = [b"data: " + orjson.dumps({"id": "x", "choices": [piece]}) + b"\n\n" for piece in pieces]
    space = sent[len(sent.rstrip()) :]
    tap = JoinedTap(False, RestOf(Sent(text=sent, tokens=2), Rest(How.TEXT, b"", space, 1), 0.0))
    raw = b"".join(map(tap.feed, chunks))
    lines = [orjson.loads(line[6:]) for line in raw.split(b"\n") if line.startswith(b"data: ")]
    assert sent + "".join(line["choices"][0]["delta"]["content"] for line in lines) == whole
