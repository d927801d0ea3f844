"""Writes the streams of an engine that knows its whole answer, token by token."""

from __future__ import annotations

from typing import Any

import orjson

from llmproxy.gateway.http.routes import BodyKind

PIECES = ("Once", " upon", ' a "time"', " \\n", "\n\n", " Zo", "", "ë", " {", "}", " 数", "é", "\t", " end", ".")
"""The texts of the tokens. The empty one is part of a character, which comes with the next token."""
PROMPT_TOKENS = 7


def events(
    kind: BodyKind,
    sent: int = 0,
    *,
    until: int | None = None,
    usage: bool = True,
    ids: bool = False,
    name: str = "first",
) -> list[bytes]:
    """Returns the events of the answer from the token number `sent` on, at most up to `until` tokens of the whole."""
    chat = kind is BodyKind.CHAT
    last = len(PIECES) if until is None else min(until, len(PIECES))
    head = {"id": name, "object": "chunk", "created": len(name), "model": "tiny"}
    out = []
    if chat:
        role = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        out.append(head | {"choices": [{"index": 0} | role]})
    for number in range(sent, last):
        text = PIECES[number]
        choice: dict[str, Any] = {"index": 0} | ({"delta": {"content": text}} if chat else {"text": text})
        choice["finish_reason"] = ("stop" if last == len(PIECES) else "length") if number == last - 1 else None
        choice["token_ids"] = [100 + number] if ids else None
        if ids and not chat and number == sent:
            choice["prompt_token_ids"] = list(range(PROMPT_TOKENS + sent))
        out.append(head | {"choices": [choice]})
    if sent >= last:
        empty: dict[str, Any] = {"delta": {"content": ""}} if chat else {"text": ""}
        out.append(head | {"choices": [{"index": 0, "finish_reason": "stop"} | empty]})
    if usage:
        tokens = {"prompt_tokens": PROMPT_TOKENS + sent, "completion_tokens": last - sent}
        out.append(head | {"choices": [], "usage": tokens | {"total_tokens": sum(tokens.values())}})
    return [b"data: " + orjson.dumps(event) + b"\n\n" for event in out] + [b"data: [DONE]\n\n"]
