"""The bytes of `/v1/responses` and `/v1/messages`, whose streams consist of named events."""

from __future__ import annotations

import secrets

import orjson

from llmproxy.lab.simulator.http.answers import DONE, AnswerUsage, AnswerWriter, Choice, Head, error_body, stream_error
from llmproxy.lab.simulator.server.requests import (
    ApiError,
    Body,
    GenerationRequest,
    messages_request,
    responses_request,
)


class ResponsesAnswer(AnswerWriter):
    """Writes answers of `/v1/responses`. A stream begins at acceptance, before any token, and has no end mark."""

    parse = staticmethod(responses_request)

    def __init__(self, generation: GenerationRequest, head: Head) -> None:
        self._generation = generation
        self._created = head.created
        self._sequence = 0
        self._item = f"msg_{secrets.token_hex(8)}"
        # Unlike other endpoints, this one takes the request id only from the body, not from the header.
        self.id = generation.body.get("request_id", f"resp_{secrets.token_hex(8)}")

    def prologue(self) -> list[bytes]:
        """Returns the two first events, with the response without output."""
        body = self._body("in_progress", [], None)
        return [self._event("response.created", response=body), self._event("response.in_progress", response=body)]

    def opening(self, usage: AnswerUsage) -> list[bytes]:  # noqa: ARG002 - the completions count here
        """Returns the events that open the only output item and its only part."""
        part = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
        item = self._message([], "in_progress")
        return [
            self._event("response.output_item.added", item=item, output_index=0),
            self._event("response.content_part.added", content_index=0, item_id=self._item, output_index=0, part=part),
        ]

    def delta(self, index: int, part: Choice, usage: AnswerUsage) -> list[bytes]:  # noqa: ARG002
        return [self._text_event("response.output_text.delta", delta=part.text)]

    def closing(self, choices: list[Choice], usage: AnswerUsage) -> list[bytes]:
        """Returns the final events. A truncated answer also ends in `response.completed`."""
        text = choices[0].text
        part = _part(text)
        item = self._message([part], "completed")
        done = self.whole(choices, usage)
        return [
            self._text_event("response.output_text.done", text=text),
            self._event("response.content_part.done", content_index=0, item_id=self._item, output_index=0, part=part),
            self._event("response.output_item.done", item=item, output_index=0),
            self._event("response.completed", response=done),
        ]

    def whole(self, choices: list[Choice], usage: AnswerUsage) -> Body:
        status = "incomplete" if choices[0].reason == "length" else "completed"
        return self._body(status, [self._message([_part(choices[0].text)], "completed")], usage)

    def broken(self, error: ApiError) -> list[bytes]:
        return [stream_error(error), DONE]

    def _message(self, content: list[Body], status: str) -> Body:
        item = {"id": self._item, "content": content, "role": "assistant", "status": status}
        return item | {"type": "message", "phase": None}

    def _body(self, status: str, output: list[Body], usage: AnswerUsage | None) -> Body:
        body = self._generation.body
        return {
            "id": self.id,
            "created_at": self._created,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata"),
            "model": self._generation.model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": True,
            "temperature": float(body.get("temperature") or 0.0) if "temperature" in body else 1.0,
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0,
            "background": False,
            "max_output_tokens": self._generation.max_tokens,
            "max_tool_calls": None,
            "previous_response_id": body.get("previous_response_id"),
            **dict.fromkeys(("prompt", "reasoning")),
            "service_tier": "auto",
            "status": status,
            "text": None,
            "top_logprobs": None,
            "truncation": "disabled",
            "usage": None if usage is None else _responses_usage(usage),
            "user": body.get("user"),
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "input_messages", "output_messages")),
        }

    def _text_event(self, kind: str, **text: str) -> bytes:
        where: Body = {"content_index": 0, "item_id": self._item, "logprobs": [], "output_index": 0}
        return self._event(kind, **where, **text)

    def _event(self, kind: str, **fields: object) -> bytes:
        data = fields | {"sequence_number": self._sequence, "type": kind}
        self._sequence += 1
        return _event(kind, {name: data[name] for name in sorted(data)})


class MessagesAnswer(AnswerWriter):
    """Writes answers of `/v1/messages` in Anthropic's dialect."""

    parse = staticmethod(messages_request)

    def __init__(self, generation: GenerationRequest, head: Head) -> None:
        self._model = generation.model
        self.id = "chatcmpl-" + head.id
        self._count_details = head.count_details

    def opening(self, usage: AnswerUsage) -> list[bytes]:
        """Returns the events of the empty message and its only text block."""
        message: Body = {"id": self.id, "type": "message", "role": "assistant", "content": [], "model": self._model}
        counted = {"input_tokens": usage.prompt_tokens, "output_tokens": 0}
        message |= {"stop_reason": None, "stop_sequence": None, "usage": counted}
        return [
            _event("message_start", {"type": "message_start", "message": message}),
            _block("start", {"content_block": {"type": "text", "text": ""}}),
        ]

    def delta(self, index: int, part: Choice, usage: AnswerUsage) -> list[bytes]:  # noqa: ARG002
        return [_block("delta", {"delta": {"type": "text_delta", "text": part.text}})]

    def closing(self, choices: list[Choice], usage: AnswerUsage) -> list[bytes]:
        """Returns the final events: end of the block, stop reason and usage."""
        delta = {"stop_reason": _stop_reason(choices[0]), "stop_sequence": None}
        last = {"type": "message_delta", "delta": delta, "usage": self._usage(usage)}
        return [_block("stop", {}), _event("message_delta", last), _event("message_stop", {"type": "message_stop"})]

    def whole(self, choices: list[Choice], usage: AnswerUsage) -> Body:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": choices[0].text}],
            "model": self._model,
            "stop_reason": _stop_reason(choices[0]),
            "usage": self._usage(usage),
        }

    def broken(self, error: ApiError) -> list[bytes]:
        return [_event("error", error_body(error, anthropic=True))]

    def _usage(self, usage: AnswerUsage) -> Body:
        counted: Body = {"input_tokens": usage.prompt_tokens, "output_tokens": usage.output_tokens}
        if not self._count_details:
            return counted
        counted["input_tokens"] -= usage.created_tokens + usage.cached_tokens
        cache = {"cache_creation_input_tokens": usage.created_tokens, "cache_read_input_tokens": usage.cached_tokens}
        return counted | cache


def _part(text: str) -> Body:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}


def _stop_reason(choice: Choice) -> str | None:
    if choice.reason == "abort":
        return None
    return "max_tokens" if choice.reason == "length" else "end_turn"


def _responses_usage(usage: AnswerUsage) -> Body:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": 0,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }


def _block(kind: str, fields: Body) -> bytes:
    name = f"content_block_{kind}"
    return _event(name, {"type": name, **fields, "index": 0})


def _event(name: str, data: Body) -> bytes:
    return f"event: {name}\ndata: ".encode() + orjson.dumps(data) + b"\n\n"
