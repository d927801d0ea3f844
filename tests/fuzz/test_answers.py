"""Reading any answer for the prefix index never fails, because its request has been served."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from llmproxy.gateway.http.routes import BodyKind
from llmproxy.gateway.proxying.answers import parse_answer
from llmproxy.gateway.request.json_scan import drain
from llmproxy.gateway.request.prefix_hash import answer_bytes, empty_chain
from tests.fuzz.profile import FUZZED

KINDS = st.sampled_from([BodyKind.CHAT, BodyKind.COMPLETION, BodyKind.MESSAGES, BodyKind.RESPONSES])
NAMES = st.sampled_from(
    [
        "choices", "message", "delta", "content", "text", "tool_calls", "function", "index", "name", "arguments",
        "type", "content_block", "output", "response", "partial_json", "reasoning", "input", "id",
    ]
)  # fmt: skip
WORDS = st.sampled_from(
    [
        "text", "tool_use", "message", "function_call", "text_delta", "content_block_start", "content_block_delta",
        "response.completed", "input_json_delta", "{", "{}", "[DONE]", "é",
    ]
)  # fmt: skip
LEAVES = st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats(-9, 9) | WORDS
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=14
)
TOOL = st.fixed_dictionaries({"index": LEAVES, "function": VALUES})
CHAT = st.fixed_dictionaries(
    {
        "choices": st.lists(
            st.fixed_dictionaries(
                {"delta": st.fixed_dictionaries({"content": LEAVES, "tool_calls": st.lists(TOOL, max_size=2)})}
            ),
            max_size=2,
        )
    }
)
BLOCK = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["content_block_start", "content_block_delta"]),
        "index": st.integers(0, 2) | LEAVES,
        "content_block": st.fixed_dictionaries({"type": WORDS, "text": LEAVES}) | VALUES,
        "delta": st.fixed_dictionaries({"type": WORDS, "text": LEAVES, "partial_json": LEAVES}) | VALUES,
    }
)
RESPONSE = st.fixed_dictionaries(
    {"type": st.just("response.completed"), "response": st.fixed_dictionaries({"output": st.lists(VALUES, max_size=2)})}
)
EVENTS = st.one_of(VALUES, CHAT, BLOCK, RESPONSE).map(lambda event: b"data: " + json.dumps(event).encode())
LINES = EVENTS | st.sampled_from([b"", b"event: x", b"data: [DONE]", b"data:", b": x"]) | st.binary(max_size=10)


def read(raw: bytes, kind: BodyKind) -> None:
    answer = drain(parse_answer(raw, kind))
    if answer is not None:
        empty_chain(None).extended(answer_bytes(answer, kind))


@FUZZED
@given(st.lists(LINES, max_size=6), KINDS)
@example([b"event: response.completed"], BodyKind.RESPONSES)
def test_no_stream_makes_reading_fail(lines: list[bytes], kind: BodyKind) -> None:
    read(b"\n\n".join(lines), kind)


@FUZZED
@given(VALUES | CHAT | RESPONSE | st.dictionaries(NAMES, VALUES), KINDS, st.integers(0, 30))
def test_no_body_makes_reading_fail(fields: Any, kind: BodyKind, cut: int) -> None:
    body = json.dumps(fields).encode()
    read(body, kind)
    read(body[: len(body) - cut], kind)
