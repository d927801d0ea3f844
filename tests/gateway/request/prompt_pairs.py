"""Pairs of bodies that differ in one thing before a long text, and how much of their prompts a real vLLM has alike.

`FACTS` were taken of vLLM 0.32 with a ChatML template: tokens of the one prompt, of the other, and of their common
start, by the render routes (`--enable-scale-out`). `tests/e2e/vllm/test_real_vllm_prompts.py` takes them again.
"""

from __future__ import annotations

from typing import Any

from llmproxy.gateway.http.routes import BodyKind

Body = dict[str, Any]
LONG = "All of this was said before, and nobody minds. " * 45
HEADER = "x-anthropic-billing-header: cc_version=2.1.7.{}; cc_entrypoint=cli; cch={};"
CACHED: Body = {"cache_control": {"type": "ephemeral"}}
SCHEMA: Body = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOL: Body = {"name": "Read", "description": "Reads a file. " + LONG, "input_schema": SCHEMA}
FUNCTION: Body = {"name": "Read", "description": "Reads. " + LONG, "parameters": SCHEMA}
CHAT_TOOL: Body = {"type": "function", "function": FUNCTION}
USE: Body = {"type": "tool_use", "id": "t1", "name": "Read", "input": {"path": "a"}}
RESULT: Body = {"type": "tool_result", "tool_use_id": "t1", "content": "ok"}
CALL: Body = {"id": "c1", "type": "function", "function": {"name": "Read", "arguments": '{"path": "a"}'}}
THOUGHT: Body = {"type": "thinking", "thinking": "hm", "signature": "s"}


def texts(*each: str, **more: Any) -> list[Body]:
    return [{"type": "text", "text": text, **more} for text in each]


def user(content: Any, **more: Any) -> Body:
    return {"role": "user", "content": content, **more}


def assistant(content: Any, **more: Any) -> Body:
    return {"role": "assistant", "content": content, **more}


def system(content: Any) -> Body:
    return {"role": "system", "content": content}


HI = user("Hi")
TALK = [user("x"), assistant("y")]


def messages(*each: Body, **more: Any) -> tuple[BodyKind, Body]:
    return BodyKind.MESSAGES, {"max_tokens": 4, "messages": list(each) or [HI], **more}


def chat(*each: Body, **more: Any) -> tuple[BodyKind, Body]:
    return BodyKind.CHAT, {"messages": list(each), **more}


def responses(given: Any, **more: Any) -> tuple[BodyKind, Body]:
    return BodyKind.RESPONSES, {"input": given, **more}


def used(call: Body, result: Body) -> tuple[BodyKind, Body]:
    return messages(user("x"), assistant([call]), user([result]), user(LONG))


def called(call: Body) -> tuple[BodyKind, Body]:
    return chat(user("x"), assistant(None, tool_calls=[call]), user(LONG))


def item(call_id: str, **more: Any) -> list[Body]:
    said = {"type": "function_call", "call_id": call_id, "name": "Read", "arguments": "{}", **more}
    return [user("x"), said, {"type": "function_call_output", "call_id": call_id, "output": "ok"}, user(LONG)]


SPOKEN = {"type": "message", "id": "m1", "status": "completed", "role": "assistant"}
REASONING = {"type": "reasoning", "id": "r1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
ONE, TWO = HEADER.format("a1", "11"), HEADER.format("b2", "22")

PAIRS: dict[str, tuple[tuple[BodyKind, Body], tuple[BodyKind, Body]]] = {
    # Claude Code: the first block of each run is another.
    "header": (messages(system=texts(ONE, "You are.", LONG)), messages(system=texts(TWO, "You are.", LONG))),
    "header or none": (messages(system=texts(ONE, "You are.", LONG)), messages(system=texts("You are.", LONG))),
    "header, then a line": (messages(system=f"{ONE}\n{LONG}"), messages(system=f"{TWO}\n{LONG}")),
    "header of a user": (messages(user(texts(ONE, LONG))), messages(user(texts(TWO, LONG)))),
    "header within": (messages(HI, system(texts(ONE)), user(LONG)), messages(HI, system(texts(TWO)), user(LONG))),
    "header within as text": (messages(HI, system(ONE), user(LONG)), messages(HI, system(TWO), user(LONG))),
    "header in chat": (chat(system(texts(ONE, LONG)), HI), chat(system(texts(TWO, LONG)), HI)),
    "header in chat as text": (chat(system(f"{ONE}\n{LONG}"), HI), chat(system(f"{TWO}\n{LONG}"), HI)),
    "header in instructions": (
        responses("Hi", instructions=f"{ONE}\n{LONG}"),
        responses("Hi", instructions=f"{TWO}\n{LONG}"),
    ),
    # The system of Messages.
    "system as text": (messages(system=LONG), messages(system=texts(LONG))),
    "system in blocks": (messages(system=texts("You are.", LONG)), messages(system="You are." + LONG)),
    "system with an empty block": (messages(system=texts("", LONG)), messages(system=texts(LONG))),
    "system empty": (messages(user(LONG), system=""), messages(user(LONG))),
    "system without blocks": (messages(user(LONG), system=[]), messages(user(LONG))),
    "system cache_control": (messages(system=texts(LONG, **CACHED)), messages(system=texts(LONG))),
    "another system": (messages(system="a" + LONG), messages(system="b" + LONG)),
    "empty system within": (messages(user("x"), system(""), user(LONG)), messages(user("x"), user(LONG))),
    # Tools.
    "tool cache_control": (messages(user(LONG), tools=[TOOL | CACHED]), messages(user(LONG), tools=[TOOL])),
    "tool type": (messages(user(LONG), tools=[TOOL | {"type": "custom"}]), messages(user(LONG), tools=[TOOL])),
    "tool null": (messages(user(LONG), tools=[TOOL | {"strict": None}]), messages(user(LONG), tools=[TOOL])),
    "tool members": (messages(user(LONG), tools=[dict(reversed(TOOL.items()))]), messages(user(LONG), tools=[TOOL])),
    "tool order": (
        messages(user(LONG), tools=[TOOL, TOOL | {"name": "Write"}]),
        messages(user(LONG), tools=[TOOL | {"name": "Write"}, TOOL]),
    ),
    "tools empty": (messages(user(LONG), tools=[]), messages(user(LONG))),
    "tools added": (messages(system=LONG, tools=[TOOL]), messages(system=LONG, tools=[TOOL, TOOL | {"name": "W"}])),
    "chat tool cache_control": (chat(user(LONG), tools=[CHAT_TOOL | CACHED]), chat(user(LONG), tools=[CHAT_TOOL])),
    "chat function cache_control": (
        chat(user(LONG), tools=[CHAT_TOOL | {"function": FUNCTION | CACHED}]),
        chat(user(LONG), tools=[CHAT_TOOL]),
    ),
    "chat function members": (
        chat(user(LONG), tools=[{"type": "function", "function": dict(reversed(FUNCTION.items()))}]),
        chat(user(LONG), tools=[CHAT_TOOL]),
    ),
    # Messages and their parts.
    "cache_control": (messages(user(texts("x", **CACHED)), user(LONG)), messages(user(texts("x")), user(LONG))),
    "text or block": (messages(*TALK, user(LONG)), messages(user(texts("x")), TALK[1], user(LONG))),
    "empty block": (messages(user(texts("", "x")), user(LONG)), messages(user(texts("x")), user(LONG))),
    "two blocks": (messages(user(texts("x", "y")), user(LONG)), messages(user("xy"), user(LONG))),
    "two lines": (messages(user(texts("x", "y")), user(LONG)), messages(user("x\ny"), user(LONG))),
    "thinking": (messages(user("x"), assistant([THOUGHT, *texts("y")]), user(LONG)), messages(*TALK, user(LONG))),
    "thinking signature": (
        messages(user("x"), assistant([THOUGHT, *texts("y")]), user(LONG)),
        messages(user("x"), assistant([THOUGHT | {"signature": "t"}, *texts("y")]), user(LONG)),
    ),
    "tool ids": (used(USE, RESULT), used(USE | {"id": "t2"}, RESULT | {"tool_use_id": "t2"})),
    "is_error": (used(USE, RESULT | {"is_error": False}), used(USE, RESULT)),
    "result in blocks": (used(USE, RESULT | {"content": texts("ok")}), used(USE, RESULT)),
    "metadata": (messages(system=LONG, metadata={"user_id": "a"}), messages(system=LONG, metadata={"user_id": "b"})),
    "tool_choice": (
        messages(system=LONG, tools=[TOOL], tool_choice={"type": "auto"}),
        messages(system=LONG, tools=[TOOL]),
    ),
    "chat text or part": (chat(*TALK, user(LONG)), chat(user(texts("x")), TALK[1], user(LONG))),
    "chat null content": (called(CALL), chat(user("x"), {"role": "assistant", "tool_calls": [CALL]}, user(LONG))),
    "chat call ids": (called(CALL), called(CALL | {"id": "c2"})),
    "chat arguments": (called(CALL), called(CALL | {"function": {"name": "Read", "arguments": '{"path":"a"}'}})),
    "chat reasoning": (chat(user("x"), assistant("y", reasoning="hm"), user(LONG)), chat(*TALK, user(LONG))),
    "chat unknown member": (chat(user("x", timestamp=1), user(LONG)), chat(user("x"), user(LONG))),
    "chat null member": (chat(user("x"), assistant("y", refusal=None), user(LONG)), chat(*TALK, user(LONG))),
    "chat name": (chat(user("x", name="bob"), user(LONG)), chat(user("x"), user(LONG))),
    "chat user": (chat(user(LONG), user="a"), chat(user(LONG), user="b")),
    "responses text or item": (responses(LONG), responses([user(LONG)])),
    "responses part": (responses([user([{"type": "input_text", "text": LONG}])]), responses(LONG)),
    "responses instructions empty": (responses(LONG, instructions=""), responses(LONG)),
    "responses item ids": (
        responses(
            [user("x"), SPOKEN | {"content": [{"type": "output_text", "text": "y", "annotations": []}]}, user(LONG)]
        ),
        responses([*TALK, user(LONG)]),
    ),
    "responses reasoning": (responses([user("x"), REASONING, TALK[1], user(LONG)]), responses([*TALK, user(LONG)])),
    "responses call ids": (responses(item("c1")), responses(item("c2", id="f1", status="completed"))),
}

# The pairs whose prompts are the same tokens, by how many.
ALIKE: dict[int, tuple[str, ...]] = {
    599: (
        "system empty", "system without blocks", "tools empty", "chat user", "responses text or item",
        "responses part", "responses instructions empty",
    ),
    606: ("empty system within", "cache_control", "empty block", "two blocks", "chat unknown member", "chat name"),
    607: (
        "header, then a line", "header within", "header within as text", "header in chat",
        "header in chat as text", "header in instructions", "system as text", "system with an empty block",
        "system cache_control", "metadata",
    ),
    610: ("header", "header or none", "system in blocks"),
    614: ("chat null content", "chat call ids", "chat arguments"),
    615: (
        "text or block", "thinking", "thinking signature", "chat text or part", "chat reasoning",
        "chat null member", "responses item ids", "responses reasoning",
    ),
    621: ("tool ids", "is_error", "result in blocks", "responses call ids"),
    1254: ("chat tool cache_control", "chat function cache_control", "chat function members"),
    1256: ("tool cache_control", "tool type", "tool null", "tool members"),
    1264: ("tool_choice",),
}  # fmt: skip
FACTS = {name: (tokens, tokens, tokens) for tokens, names in ALIKE.items() for name in names} | {
    "header of a user": (643, 644, 31),
    "another system": (608, 608, 5),
    "tool order": (1902, 1902, 25),
    "tools added": (1264, 1908, 654),
    "two lines": (606, 608, 5),
}

# Where the chain and a template part ways, and why that stays.
LOST = {
    "tool type": "the same in all requests of one client",
    "tool null": "the same in all requests of one client",
    "tool members": "the same in all requests of one client",
    "chat function cache_control": "no client is known to write it there",
    "chat function members": "the same in all requests of one client",
    "empty system within": "no client sends one",
    "two blocks": "the template decides how parts are joined: others put lines between them",
    "chat arguments": "a client sends its arguments back unchanged; other templates show them",
    "chat name": "other templates show it",
    "responses reasoning": "other templates show it",
}
FALSE = {"tools added": "this template has tools before the system, others behind it"}
