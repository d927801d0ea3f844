"""A completed answer extends the chain of its prompt, and the chain of the next turn begins with the result."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from msgspec.structs import replace
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from llmproxy.core.domain import Grant, GrantReason, Placed
from llmproxy.gateway.http.routes import BodyKind
from llmproxy.gateway.proxying import answers as answers_module
from llmproxy.gateway.proxying.answers import ANSWER_BYTES_MAX, Answers, CapturedAnswer, parse_answer
from llmproxy.gateway.request.body_reader import BodyReader
from llmproxy.gateway.request.json_scan import drain
from llmproxy.gateway.request.prefix_hash import BLOCK_BYTES, BLOCKS_MAX, prompt_chain
from tests.core.make import request

CHAT, COMPLETION, MESSAGES, RESPONSES = BodyKind.CHAT, BodyKind.COMPLETION, BodyKind.MESSAGES, BodyKind.RESPONSES

ASKED = "What was said before? " * 40
SAID = 'Nothing "at all",\n\tor hardly: déjà vu 😀. ' * 60
SPOKEN = [SAID[at : at + 7] for at in range(0, len(SAID), 7)]
"""The answer in the pieces in which it streams."""
ARGUMENTS = orjson.dumps({"city": "Köln", "days": list(range(300))}).decode()
OTHERS = '{"city": "Bonn"}'
TOOL = {"name": "get_weather", "description": "Weather.", "parameters": {"type": "object"}}
GRANT = Grant(7, request(), Placed("a", 0.0, (), 1), 0.0, 0, GrantReason((), 0, (), 0, False))


# --- answers as vLLM 0.32 sends them ----------------------------------------------------------------------------------


def sse(events: Sequence[dict[str, Any]], *, named: bool = False) -> bytes:
    lines = [
        (b"event: %s\n" % one["type"].encode() if named else b"") + b"data: " + orjson.dumps(one) for one in events
    ]
    return b"".join(line + b"\n\n" for line in lines)


def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason, "token_ids": None}
    head = {"id": "chatcmpl-a9", "object": "chat.completion.chunk", "created": 1795225636, "model": "tiny"}
    return head | {"choices": [choice]}


def chat_stream(*deltas: dict[str, Any]) -> bytes:
    role = chunk({"role": "assistant", "content": ""}) | {"prompt_token_ids": None, "prompt_text": None}
    usage = chunk({}) | {"choices": [], "usage": {"prompt_tokens": 32, "total_tokens": 44, "completion_tokens": 12}}
    last = chunk({"content": ""}, "stop")
    return b": keep-alive\n\n" + sse([role, *map(chunk, deltas), last, usage]) + b"data: [DONE]\n\n"


def chat_body(**message: Any) -> bytes:
    nothing = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
    choice = {
        "index": 0, "message": {"role": "assistant", "content": None, **nothing, **message}, "logprobs": None,
        "finish_reason": "stop", "stop_reason": None, "token_ids": None,
    }  # fmt: skip
    head = {"id": "chatcmpl-a7", "object": "chat.completion", "created": 1795225635, "model": "tiny"}
    return orjson.dumps(head | {"choices": [choice], "usage": {"prompt_tokens": 32, "completion_tokens": 12}})


def spoken() -> bytes:
    return chat_stream(*({"content": piece} for piece in SPOKEN))


def called() -> bytes:
    """Two calls after a word, the arguments of each in pieces."""
    first = {"id": "chatcmpl-tool-8f", "type": "function", "index": 0, "function": {"name": "get_weather"}}
    second = first | {"id": "chatcmpl-tool-90", "index": 1}
    pieces = [ARGUMENTS[at : at + 5] for at in range(0, len(ARGUMENTS), 5)]

    def part(index: int, piece: str) -> dict[str, Any]:
        return {"content": None, "tool_calls": [{"index": index, "function": {"arguments": piece}}]}

    return chat_stream(
        {"content": "Let me look."},
        {"content": None, "tool_calls": [first]}, *(part(0, piece) for piece in pieces),
        {"content": None, "tool_calls": [second]}, part(1, OTHERS[:5]), part(1, OTHERS[5:]),
    )  # fmt: skip


def text_events(texts: Sequence[str]) -> bytes:
    head = {"id": "cmpl-b8", "object": "text_completion", "created": 1795225664, "model": "tiny"}
    choice = {"index": 0, "logprobs": None, "finish_reason": None, "stop_reason": None, "token_ids": None}
    usage = head | {"choices": [], "usage": {"prompt_tokens": 4, "total_tokens": 16, "completion_tokens": 12}}
    return sse([*(head | {"choices": [choice | {"text": text}]} for text in texts), usage]) + b"data: [DONE]\n\n"


def text_body() -> bytes:
    choice = {"index": 0, "text": SAID, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    head = {"id": "cmpl-b3", "object": "text_completion", "created": 1795225664, "model": "tiny"}
    return orjson.dumps(head | {"choices": [choice], "usage": {"prompt_tokens": 4, "completion_tokens": 12}})


ONE_TEXT: tuple[dict[str, Any], list[dict[str, Any]]] = (
    {"type": "text", "text": ""}, [{"type": "text_delta", "text": SAID}]
)  # fmt: skip
USE = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {}}


def messages_stream(*blocks: tuple[dict[str, Any], Sequence[dict[str, Any]]]) -> bytes:
    message = {"id": "chatcmpl-ab", "type": "message", "role": "assistant", "content": [], "model": "tiny"}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": message}]
    for index, (block, deltas) in enumerate(blocks):
        events.append({"type": "content_block_start", "content_block": block, "index": index})
        events += [{"type": "content_block_delta", "delta": delta, "index": index} for delta in deltas]
        events.append({"type": "content_block_stop", "index": index})
    events.append({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 8}})
    return sse([*events, {"type": "message_stop"}], named=True)


def messages_spoken() -> bytes:
    use = [{"type": "input_json_delta", "partial_json": ARGUMENTS[at : at + 9]} for at in range(0, len(ARGUMENTS), 9)]
    said = [{"type": "text_delta", "text": piece} for piece in SPOKEN]
    return messages_stream(({"type": "text", "text": ""}, said), (USE, use), (USE | {"id": "toolu_2"}, []))


def messages_body() -> bytes:
    content = [{"type": "text", "text": SAID}, USE | {"input": orjson.loads(ARGUMENTS)}, USE | {"id": "toolu_2"}]
    return orjson.dumps({"id": "chatcmpl-97", "type": "message", "role": "assistant", "content": content})


OUTPUT = [
    {"id": "msg_aa", "content": [{"annotations": [], "text": SAID, "type": "output_text", "logprobs": None}],
     "role": "assistant", "status": "completed", "type": "message", "phase": None},
    {"arguments": ARGUMENTS, "call_id": "call_b4", "name": "get_weather", "type": "function_call", "id": "fc_b4",
     "status": "completed"},
]  # fmt: skip
RESPONSE: dict[str, Any] = {
    "id": "resp_82", "created_at": 1795225665, "model": "tiny", "object": "response", "output": OUTPUT, "tools": [],
    "parallel_tool_calls": True, "tool_choice": "auto", "status": "completed",
}  # fmt: skip


def responses_stream(end: str = "response.completed") -> bytes:
    begun = {"response": RESPONSE | {"output": [], "status": "in_progress"}, "type": "response.created"}
    deltas = [{"delta": piece, "output_index": 0, "type": "response.output_text.delta"} for piece in SPOKEN]
    return sse([begun, *deltas, {"response": RESPONSE, "sequence_number": 9, "type": end}], named=True)


# --- what clients send back -------------------------------------------------------------------------------------------


def sent_by_sdk(raw: bytes) -> dict[str, Any]:
    """The message that the OpenAI SDK makes of an answer and sends back."""
    if raw.startswith(b"{"):
        return ChatCompletion.construct(**orjson.loads(raw)).choices[0].message.to_dict()
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for line in raw.split(b"\n"):
        if line.startswith(b"data: {"):
            state.handle_chunk(ChatCompletionChunk.construct(**orjson.loads(line[6:])))
    return state.get_final_completion().choices[0].message.to_dict()


def by_hand(content: str = SAID, *calls: str) -> dict[str, Any]:
    """The message as clients write it that send back no more than they must."""
    functions = [{"name": "get_weather", "arguments": call} for call in calls]
    made = [{"id": "x", "type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": content} | ({"tool_calls": made} if calls else {})


def after_chat(*said: Any) -> dict[str, Any]:
    return {"model": "m", "tools": [TOOL], "messages": [{"role": "user", "content": ASKED}, *said]}


def after_message(*said: Any) -> dict[str, Any]:
    return {"model": "m", "system": "Be brief.", "messages": [{"role": "user", "content": ASKED}, *said]}


def after_response(*said: Any) -> dict[str, Any]:
    return {"model": "m", "input": [{"role": "user", "content": ASKED}, *said]}


CALLED = chat_body(
    content="Let me look.",
    tool_calls=[
        {"id": "chatcmpl-tool-a", "type": "function", "function": {"name": "get_weather", "arguments": given}}
        for given in (ARGUMENTS, OTHERS)
    ],
)
AGAIN = {"role": "user", "content": "And then?"}
# As the Anthropic SDK writes the blocks of a message: in the order of its fields, null members included.
BLOCKS = [
    {"citations": None, "text": SAID, "type": "text"},
    {"id": "toolu_1", "input": orjson.loads(ARGUMENTS), "name": "get_weather", "type": "tool_use"},
    {"id": "toolu_2", "input": {}, "name": "get_weather", "type": "tool_use"},
]
ITEMS = [item.to_dict() for item in Response.construct(**RESPONSE).output]


class Reading:
    """Captured answers, and the hashes that were read from them."""

    def __init__(self) -> None:
        self.notified: list[tuple[tuple[str, int, str], tuple[int, ...]]] = []
        self.answers = Answers(lambda *said: self.notified.append((said[:3], tuple(said[3]))))

    async def capture(self, first: dict[str, Any], kind: BodyKind) -> CapturedAnswer | None:
        return self.answers.capture(await BodyReader(prefixes=True).read(orjson.dumps(first), kind))

    async def captured(
        self, raw: bytes = b"", first: dict[str, Any] | None = None, kind: BodyKind = CHAT
    ) -> CapturedAnswer:
        """Returns a captured answer with the bytes `raw`."""
        captured = await self.capture(first or after_chat(), kind)
        assert captured is not None
        captured.add(raw)
        return captured

    async def read(self, first: dict[str, Any], raw: bytes, kind: BodyKind) -> tuple[int, ...]:
        captured = await self.captured(b"", first, kind)
        for at in range(0, len(raw), 1000):
            captured.add(raw[at : at + 1000])
        assert self.answers.captured_bytes == len(raw)
        self.answers.finish(captured, GRANT)
        assert not self.notified, "the reading runs in later turns"
        await self.all_read()
        return self.notified.pop()[1] if self.notified else ()

    async def all_read(self) -> None:
        async with asyncio.timeout(10):
            while self.answers.captured_bytes:  # noqa: ASYNC110 - the reading has no event of its own
                await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("kind", "first", "raw", "second"),
    [
        (CHAT, after_chat(), spoken(), after_chat(sent_by_sdk(spoken()), AGAIN)),
        (CHAT, after_chat(), spoken(), after_chat(by_hand(), AGAIN)),
        (CHAT, after_chat(), chat_body(content=SAID), after_chat(sent_by_sdk(chat_body(content=SAID)), AGAIN)),
        (CHAT, after_chat(), called(), after_chat(sent_by_sdk(called()), AGAIN)),
        (CHAT, after_chat(), called(), after_chat(by_hand("Let me look.", ARGUMENTS, OTHERS), AGAIN)),
        (CHAT, after_chat(), CALLED, after_chat(sent_by_sdk(CALLED), AGAIN)),
        (COMPLETION, {"prompt": ASKED}, text_events(SPOKEN), {"prompt": ASKED + SAID + "And then?"}),
        (COMPLETION, {"prompt": ASKED}, text_body(), {"prompt": ASKED + SAID + "And then?"}),
        (MESSAGES, after_message(), messages_spoken(),
         after_message({"role": "assistant", "content": BLOCKS}, AGAIN)),
        (MESSAGES, after_message(), messages_body(), after_message({"content": BLOCKS, "role": "assistant"}, AGAIN)),
        (MESSAGES, after_message(), messages_stream(ONE_TEXT),
         after_message({"role": "assistant", "content": SAID}, AGAIN)),
        (RESPONSES, after_response(), responses_stream(), after_response(*ITEMS, AGAIN)),
        (RESPONSES, after_response(), responses_stream("response.incomplete"), after_response(*ITEMS, AGAIN)),
        (RESPONSES, after_response(), orjson.dumps(RESPONSE), after_response(*ITEMS, AGAIN)),
        (RESPONSES, {"input": ASKED}, orjson.dumps(RESPONSE), after_response(*OUTPUT, AGAIN)),
    ],
)  # fmt: skip
async def test_the_next_turn_begins_with_the_hashes_of_this_one(
    kind: BodyKind, first: dict[str, Any], raw: bytes, second: dict[str, Any]
) -> None:
    before = prompt_chain(first, kind)
    known = await Reading().read(first, raw, kind)
    turn = prompt_chain(second, kind)
    asked = GRANT.request
    assert known == turn.hashes_on(asked.model, asked.adapter)[: len(known)]
    # All blocks before the end of the answer.
    assert len(before.hashes) < len(turn.hashes) - 1 <= len(known)


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        # Templates drop the reasoning of earlier turns, so later prompts do not match blocks after it.
        (CHAT, chat_stream({"reasoning": "Hm."}, {"content": SAID})),
        (CHAT, chat_stream({"reasoning_content": "Hm."}, {"content": SAID})),
        (CHAT, chat_body(content=SAID, reasoning="Hm.")),
        (MESSAGES, messages_stream(({"type": "thinking", "thinking": ""}, []), ({"type": "text", "text": SAID}, []))),
        (MESSAGES, orjson.dumps({"content": [{"type": "thinking", "thinking": SAID}]})),
        (RESPONSES, orjson.dumps(RESPONSE | {"output": [{"type": "reasoning", "content": []}, *OUTPUT]})),
        # Broken, foreign, cut off.
        (CHAT, chat_stream({"content": SAID})[:-100] + b'data: {"error": {"code": 500}}\n\n'),
        (CHAT, chat_stream({"content": SAID})[:-200] + b"\n\n"),
        (CHAT, b'{"choices":[]}'),
        (CHAT, b'{"choices":[{"message":'),
        (CHAT, b"data: []\n\n"),
        (CHAT, b"data: 5\n\n"),
        (COMPLETION, b'{"choices":null}'),
        (MESSAGES, messages_stream((USE, [{"type": "input_json_delta", "partial_json": '{"city": "K'}]))),
        (MESSAGES, messages_stream(({"type": "text", "text": ""}, [{"type": "signature_delta", "signature": "x"}]))),
        (RESPONSES, responses_stream("response.failed")),
        (RESPONSES, b"data:"),
        # A single event that would block the loop.
        (CHAT, chat_stream({"content": SAID, "logprobs": [0] * 40_000})),
        (CHAT, chat_body(content=SAID, logprobs=[0] * 40_000)),
    ],
)  # fmt: skip
async def test_an_answer_that_no_prompt_continues_is_not_read(kind: BodyKind, raw: bytes) -> None:
    first = {CHAT: after_chat, MESSAGES: after_message, RESPONSES: after_response}.get(kind, lambda: {"prompt": ASKED})
    assert await Reading().read(first(), raw, kind) == ()


@pytest.mark.parametrize(
    ("first", "kind"),
    [
        (after_chat() | {"n": 2}, CHAT),
        ({"prompt": [ASKED, ASKED]}, COMPLETION),
        ({"prompt": list(range(1000))}, COMPLETION),
        ({"prompt": "x" * (BLOCKS_MAX * BLOCK_BYTES)}, COMPLETION),
        ({"input": ASKED}, BodyKind.OTHER),
    ],
)
async def test_an_answer_with_several_ways_on_is_not_kept(first: dict[str, Any], kind: BodyKind) -> None:
    assert await Reading().capture(first, kind) is None
    assert Answers(lambda *_: None).capture(await BodyReader().read(orjson.dumps(after_chat()), CHAT)) is None


async def test_an_answer_within_the_last_block_tells_nothing_new() -> None:
    assert await Reading().read({"prompt": "x" * BLOCK_BYTES}, text_events(["a" * 100]), COMPLETION) == ()
    assert len(await Reading().read({"prompt": "x" * (BLOCK_BYTES - 1)}, text_events(["a"]), COMPLETION)) == 1


async def test_model_and_adapter_count_as_in_the_prompt() -> None:
    reading = Reading()
    captured = await reading.captured(spoken())
    grant = replace(GRANT, request=request(model="poet", adapter="poet"))
    reading.answers.finish(captured, grant)
    await reading.all_read()
    ((lease, hashes),) = reading.notified
    turn = prompt_chain(after_chat(by_hand()), CHAT)
    assert (lease, hashes) == ((grant.request.pool, grant.lease, grant.placed.backend), turn.hashes_on("poet", "poet"))


# --- bounds -----------------------------------------------------------------------------------------------------------


async def test_an_answer_that_is_too_long_is_forgotten_at_once() -> None:
    reading = Reading()
    captured = await reading.captured()
    for _ in range(ANSWER_BYTES_MAX // 1024):
        captured.add(b" " * 1024)
    assert reading.answers.captured_bytes == ANSWER_BYTES_MAX
    captured.add(b"x")
    assert (captured.chunks, reading.answers.captured_bytes) == (None, 0)
    captured.add(spoken())
    reading.answers.finish(captured, GRANT)
    await asyncio.sleep(0)
    assert (reading.notified, reading.answers.captured_bytes) == ([], 0)


async def test_all_answers_together_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers_module, "CAPTURED_BYTES_MAX", len(spoken()) + 10)
    reading = Reading()
    first, second = await reading.captured(spoken()), await reading.captured(b"data: more than the rest")
    assert reading.answers.captured_bytes == len(spoken())
    reading.answers.finish(second, GRANT)
    reading.answers.finish(first, GRANT)
    await reading.all_read()
    assert len(reading.notified) == 1


async def test_uncompleted_answer_is_forgotten() -> None:
    reading = Reading()
    reading.answers.finish(await reading.captured(spoken()), None)
    assert reading.answers.captured_bytes == 0
    await asyncio.sleep(0)
    assert reading.notified == []


async def test_a_long_answer_is_read_in_turns_with_everybody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers_module, "TURN_S", 0.0)
    reading, others = Reading(), 0
    reading.answers.finish(await reading.captured(spoken()), GRANT)
    while not reading.notified:
        others += 1
        await asyncio.sleep(0)
    assert others > len(spoken()) / answers_module.EVENTS_BYTES


async def test_a_fault_of_the_callback_stops_no_other_answer() -> None:
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    reading = Reading()
    on_read = reading.answers._on_read

    def failing_once(*_: Any) -> None:
        reading.answers._on_read = on_read
        raise ValueError("a policy's fault")

    reading.answers._on_read = failing_once
    for _ in range(2):
        reading.answers.finish(await reading.captured(spoken()), GRANT)
    await reading.all_read()
    assert len(reading.notified) == 1
    assert [str(fault["exception"]) for fault in faults] == ["a policy's fault"]


def test_a_stream_with_carriage_returns_is_the_same() -> None:
    assert drain(parse_answer(spoken().replace(b"\n", b"\r\n"), CHAT)) == drain(parse_answer(spoken(), CHAT))
    assert Completion.construct(**orjson.loads(text_body())).choices[0].text == drain(
        parse_answer(text_body(), COMPLETION)
    )
