"""Which answers go on at another backend, and with which request."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from llmproxy.gateway.http.routes import BodyKind
from llmproxy.gateway.proxying.continued.rule import How, NotContinued, Rest, write_rest
from llmproxy.gateway.proxying.continued.sent import Sent, read_sent
from llmproxy.gateway.request.json_scan import drain
from tests.gateway.proxying.continued.engines import PIECES, PROMPT_TOKENS, events

CHAT, COMPLETION = BodyKind.CHAT, BodyKind.COMPLETION
ASKED: dict[BodyKind, dict[str, Any]] = {
    CHAT: {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "go"}]},
    COMPLETION: {"model": "tiny", "stream": True, "prompt": "go"},
}


def after(kind: BodyKind, tokens: int, **options: Any) -> Sent:
    """Returns the part of an answer that has so many tokens."""
    chunks = events(kind, **options)[: tokens + (kind is CHAT)]
    sent = drain(read_sent(b"".join(chunks)))
    assert sent is not None
    return sent


def rest(
    kind: BodyKind, more: dict[str, Any], sent: Sent | None = None, limit: int | None = None, *, always: bool = False
) -> Rest:
    body = orjson.dumps(ASKED[kind] | more)
    return drain(write_rest(body, kind, sent or after(kind, 3), limit, always=always))


@pytest.mark.parametrize(
    "member",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json": {}}},
        {"guided_regex": "a+"},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"n": 2},
        {"best_of": 2},
        {"echo": True},
        {"logprobs": True},
        {"logprobs": 0},
        {"prompt_logprobs": 1},
        {"use_beam_search": True},
        {"suffix": "end"},
        {"prompt_embeds": "AAAA"},
        {"truncate_prompt_tokens": 5},
        {"continue_final_message": True},
        {"add_generation_prompt": False},
        {"modalities": ["text", "audio"]},
        {"kv_transfer_params": {"remote": 1}},
        {"thinking_token_budget": 5},
        {"unheard_of": 1},
    ],
)
@pytest.mark.parametrize("always", [False, True])
def test_a_member_forbids_a_continuation(member: dict[str, Any], always: bool) -> None:
    with pytest.raises(NotContinued, match=f"`{next(iter(member))}`"):
        rest(CHAT, member, always=always)


@pytest.mark.parametrize(
    "member", [{"presence_penalty": 0.5}, {"frequency_penalty": 1}, {"seed": 7}, {"include_stop_str_in_output": True}]
)
def test_a_member_that_counts_tokens_needs_always(member: dict[str, Any]) -> None:
    with pytest.raises(NotContinued, match=f"`{next(iter(member))}`"):
        rest(CHAT, member)
    assert rest(CHAT, member, always=True).how is How.TEXT


@pytest.mark.parametrize(
    "member",
    [
        {"n": 1, "best_of": 1, "echo": False, "logprobs": False, "top_logprobs": None, "presence_penalty": 0.0},
        {"response_format": {"type": "text"}, "tool_choice": "auto", "tools": [], "suffix": None},
        {"add_generation_prompt": True, "continue_final_message": False, "kv_transfer_params": None},
        {"temperature": 0.7, "stop": ["x"], "logit_bias": {}, "user": "me", "truncate_prompt_tokens": -1},
    ],
)
def test_members_that_change_nothing_allow_a_continuation(member: dict[str, Any]) -> None:
    assert rest(CHAT, member).how is How.TEXT


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"delta": {"reasoning": "hm"}}, "reasoning"),
        ({"delta": {"tool_calls": [{"index": 0}]}}, "tool_calls"),
        ({"delta": {"content": "a"}, "logprobs": {"content": []}}, "logprobs"),
        ({"delta": {"audio": {"id": "x"}}}, "audio"),
        ({"delta": {"content": "a"}, "index": 1}, "several choices"),
    ],
)
def test_an_answer_with_more_than_text_is_not_continued(part: dict[str, Any], why: str) -> None:
    event = b"data: " + orjson.dumps({"id": "x", "choices": [{"index": 0} | part]}) + b"\n\n"
    sent = drain(read_sent(b"".join(events(CHAT)[:3]) + event))
    assert sent is not None
    with pytest.raises(NotContinued, match=why):
        rest(CHAT, {}, sent)


@pytest.mark.parametrize("raw", [b"data: [1]\n\n", b"data: {\n\n", b'data: {"id":1}\n\n', b'data: {"choices":[1]}\n\n'])
def test_events_of_an_unknown_shape_are_not_read(raw: bytes) -> None:
    assert drain(read_sent(raw)) is None


def test_the_beginning_of_an_answer_is_asked_for_again_whatever_the_request_has() -> None:
    for tokens in (0, 1):
        blank = drain(read_sent(events(CHAT)[0] + events(CHAT)[5] * tokens))
        assert blank is not None
        again = rest(CHAT, {"response_format": {"type": "json_object"}, "n": 1}, blank)
        assert (again.how, again.tokens, again.space) == (How.ANEW, 0, "\n\n" * tokens)
        assert orjson.loads(again.body) == ASKED[CHAT] | {"response_format": {"type": "json_object"}, "n": 1}


def test_a_chat_goes_on_with_its_last_message() -> None:
    asked = orjson.loads(rest(CHAT, {"max_tokens": 9, "max_completion_tokens": 8, "min_tokens": 5}, limit=8).body)
    text = "".join(PIECES[:3])
    assert asked["messages"] == [*ASKED[CHAT]["messages"], {"role": "assistant", "content": text}]
    assert (asked["continue_final_message"], asked["add_generation_prompt"]) == (True, False)
    assert (asked["max_tokens"], asked["max_completion_tokens"], asked["min_tokens"]) == (5, 5, 2)


def test_white_space_at_the_end_of_a_message_is_written_again() -> None:
    found = rest(CHAT, {"max_tokens": 20}, after(CHAT, 5), limit=20)
    asked = orjson.loads(found.body)
    assert asked["messages"][-1]["content"] == "".join(PIECES[:4])
    assert (found.space, found.tokens, asked["max_tokens"]) == (PIECES[4], 4, 16)


def test_a_completion_goes_on_with_its_prompt() -> None:
    for prompt in ("go", ["go"]):
        asked = orjson.loads(rest(COMPLETION, {"prompt": prompt}).body)
        text = "go" + "".join(PIECES[:3])
        assert asked["prompt"] == (text if prompt == "go" else [text])
        assert asked["max_tokens"] == 13, "the engine's limit for a completion without one is 16"


@pytest.mark.parametrize("tokens", [3, 17])
def test_only_the_context_limits_a_completion_whose_limit_is_null(tokens: int) -> None:
    found = rest(COMPLETION, {"max_tokens": None}, Sent(text="so far", tokens=tokens))
    assert (orjson.loads(found.body)["max_tokens"], found.tokens, found.text_ended) == (None, tokens, False)


def test_more_tokens_than_the_default_prove_another_limit_of_the_engine() -> None:
    found = rest(COMPLETION, {}, Sent(text="so far", tokens=17))
    assert "max_tokens" not in orjson.loads(found.body)
    assert not found.text_ended
    assert rest(COMPLETION, {}, Sent(text="so far", tokens=16)).text_ended


def test_ids_are_used_where_the_engine_told_them() -> None:
    sent = after(COMPLETION, 7, ids=True)
    asked = orjson.loads(rest(COMPLETION, {"return_token_ids": True, "max_tokens": 20}, sent, 20).body)
    # The seventh token is a part of a character, whose id would confuse the engine.
    assert asked["prompt"] == [*range(PROMPT_TOKENS), *range(100, 106)]
    assert asked["max_tokens"] == 14


def test_ids_are_not_used_with_stop_strings_because_the_text_is_behind_them() -> None:
    sent = after(COMPLETION, 3, ids=True)
    assert rest(COMPLETION, {"stop": ["x"]}, sent).how is How.TEXT
    with pytest.raises(NotContinued, match="token ids"):
        rest(COMPLETION, {"stop": ["x"], "prompt": [1, 2]}, sent)


def test_several_ids_in_the_last_event_are_not_used_because_they_may_end_inside_a_character() -> None:
    choice = {"index": 0, "text": "ab", "token_ids": [7, 8], "prompt_token_ids": [1]}
    sent = drain(read_sent(b"data: " + orjson.dumps({"id": "x", "choices": [choice]}) + b"\n\n"))
    assert sent is not None
    assert sent.tokens == 2
    assert rest(COMPLETION, {}, sent).how is How.TEXT


@pytest.mark.parametrize("limit", [3, 2])
def test_a_full_answer_is_asked_for_its_end_only(limit: int) -> None:
    found = rest(CHAT, {"max_tokens": limit}, limit=limit)
    assert found.text_ended
    assert orjson.loads(found.body)["max_tokens"] == 1


@pytest.mark.parametrize("limit", [5.0, "5", True])
def test_a_limit_that_is_no_integer_is_not_reduced(limit: Any) -> None:
    for name in ("max_tokens", "min_tokens"):
        with pytest.raises(NotContinued, match=f"`{name}`"):
            rest(CHAT, {name: limit})


@pytest.mark.parametrize(
    ("kind", "body", "why"),
    [
        (CHAT, b'{"stream":true}', "messages"),
        (COMPLETION, b'{"stream":true}', "prompt"),
        (CHAT, b'{"messages":[{}],"logprobs":NaN}', "not valid JSON"),
    ],
)
def test_a_body_that_only_the_engine_understands_is_not_continued(kind: BodyKind, body: bytes, why: str) -> None:
    with pytest.raises(NotContinued, match=why):
        drain(write_rest(body, kind, after(kind, 3), None))


def test_ids_of_white_space_are_not_asked_for_again() -> None:
    with pytest.raises(NotContinued, match="white space"):
        rest(CHAT, {"return_token_ids": True}, after(CHAT, 5, ids=True))
