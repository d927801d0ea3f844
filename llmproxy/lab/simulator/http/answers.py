"""The bytes of answers as vLLM 0.32 writes them: chat and text completions, their streams, usage and errors.

An `AnswerWriter` writes the answer to one request. A stream consists of `prologue` at acceptance, `opening` with the
first token, `delta` for each piece of text, and `closing` at the end, or `broken` after an error, still with status
200. The last delta of a choice has its `reason`. `whole` is an answer without a stream. Each list item is an event,
which the server sends as an HTTP chunk.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import orjson

from llmproxy.lab.simulator.server.metrics import unix_now_s
from llmproxy.lab.simulator.server.requests import (
    ApiError,
    Body,
    GenerationRequest,
    Limits,
    chat_request,
    completion_request,
)

FINGERPRINT = "vllm-0.32.0-51ab1e5d"
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
Ids = Sequence[int] | None  # Token ids; None if they are not requested.


@dataclass(frozen=True, slots=True)
class Head:
    """Values fixed when a request is accepted: its id without prefix, the Unix time, and whether usage has details."""

    id: str
    created: int
    count_details: bool


@dataclass(frozen=True, slots=True)
class AnswerUsage:
    """Token counts of an answer. `created_tokens` were added to the prefix cache."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    created_tokens: int = 0

    def body(self) -> Body:
        """Returns the fields at the start of every usage object: prompt, completion and total tokens."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
            "completion_tokens": self.output_tokens,
        }

    def details(self) -> Body:
        """Returns the member that a server with prompt-token details adds."""
        return {"cached_tokens": self.cached_tokens, "created_cache_tokens": self.created_tokens}


@dataclass(frozen=True, slots=True)
class Choice:
    """A sequence, or a part of it. At its end, `reason` is `length`, `stop` or `abort`, and `stop` a stop string."""

    text: str
    ids: Ids
    reason: str | None
    stop: str | None = None


class AnswerWriter(Protocol):
    """Writes the answer to the request with the public id `id`; see the module.

    By default, a stream has no event before the first token.
    """

    id: str

    def prologue(self) -> list[bytes]:
        return []

    def opening(self, usage: AnswerUsage) -> list[bytes]:  # noqa: ARG002 - a text has no role to begin with
        return []

    def delta(self, index: int, part: Choice, usage: AnswerUsage) -> list[bytes]: ...
    def closing(self, choices: list[Choice], usage: AnswerUsage) -> list[bytes]: ...
    def whole(self, choices: list[Choice], usage: AnswerUsage) -> Body: ...
    def broken(self, error: ApiError) -> list[bytes]: ...


class _OpenAiAnswer(AnswerWriter):
    prefix: ClassVar[str]
    noun: ClassVar[str]
    noun_chunk: ClassVar[str]

    def __init__(self, generation: GenerationRequest, head: Head) -> None:
        self._generation = generation
        self._details = head.count_details
        self.id = self.prefix + head.id
        self._begin = {"id": self.id, "object": self.noun, "created": head.created, "model": generation.model}
        self._chunk_begin = _dump({**self._begin, "object": self.noun_chunk})[:-1]

    def closing(self, choices: list[Choice], usage: AnswerUsage) -> list[bytes]:  # noqa: ARG002 - other dialects use it
        """Returns the usage chunk, if requested, and the end mark."""
        if not self._generation.include_usage:
            return [DONE]
        body = usage.body() | ({"prompt_tokens_details": usage.details()} if self._details else {})
        return [self._event('"choices":[],"usage":' + _dump(body), f',"system_fingerprint":"{FINGERPRINT}"'), DONE]

    def broken(self, error: ApiError) -> list[bytes]:
        return [stream_error(error), DONE]

    def _prompt_ids(self, index: int) -> Ids:
        """Returns the token ids of the prompt of a choice."""
        generation = self._generation
        return generation.prompts[index // generation.choices] if generation.return_token_ids else None

    def _event(self, choices: str, after: str = "") -> bytes:
        return f"data: {self._chunk_begin},{choices}{after}}}\n\n".encode()

    def _usage_now(self, usage: AnswerUsage) -> str:
        if not self._generation.continuous_usage:
            return ""
        return ',"usage":' + _dump(usage.body() | {"completion_tokens_details": None})

    def _last(self, reason: str | None) -> str:
        """Returns the fingerprint for the last chunk before the end mark; empty for an earlier chunk."""
        return f',"system_fingerprint":"{FINGERPRINT}"' if reason and not self._generation.include_usage else ""

    def _ending(self, usage: AnswerUsage, extra: Body) -> Body:
        details = usage.details() | extra if self._details else None
        usage_body = usage.body() | {"prompt_tokens_details": details, "completion_tokens_details": None}
        return {"service_tier": None, "system_fingerprint": FINGERPRINT, "usage": usage_body}


class ChatAnswer(_OpenAiAnswer):
    prefix = "chatcmpl-"
    noun = "chat.completion"
    noun_chunk = "chat.completion.chunk"
    parse = staticmethod(chat_request)

    def opening(self, usage: AnswerUsage) -> list[bytes]:
        after = self._usage_now(usage) + f',"prompt_token_ids":{_dump(self._prompt_ids(0))},"prompt_text":null'
        role = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return [self._event(f'"choices":[{{"index":{i},{role}}}]', after) for i in range(self._generation.choices)]

    def delta(self, index: int, part: Choice, usage: AnswerUsage) -> list[bytes]:
        if part.reason == "abort" and not usage.output_tokens:
            return []
        finish = f'"{part.reason}","stop_reason":{_dump(part.stop)}' if part.reason else "null"
        choice = f'"index":{index},"delta":{{"content":{_dump(part.text)}}},"logprobs":null,"finish_reason":{finish}'
        choices = f'"choices":[{{{choice},"token_ids":{_dump(part.ids)}}}]'
        return [self._event(choices, self._usage_now(usage) + self._last(part.reason))]

    def whole(self, choices: list[Choice], usage: AnswerUsage) -> Body:
        none = {"refusal": None, "annotations": None, "audio": None, "function_call": None, "reasoning": None}
        shown = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, **none},
                "logprobs": None,
                "finish_reason": choice.reason,
                "stop_reason": choice.stop,
                "token_ids": choice.ids,
                "routed_experts": None,
            }
            for index, choice in enumerate(choices)
        ]
        ending = self._ending(usage, {"multimodal_tokens": None})
        prompt = {"prompt_logprobs": None, "prompt_token_ids": self._prompt_ids(0), "prompt_text": None}
        return self._begin | {"choices": shown} | ending | prompt | dict.fromkeys(_ENDING_NULLS)


class CompletionAnswer(_OpenAiAnswer):
    prefix = "cmpl-"
    noun = "text_completion"
    noun_chunk = "text_completion"
    parse = staticmethod(completion_request)

    def __init__(self, generation: GenerationRequest, head: Head) -> None:
        super().__init__(generation, head)
        self._begun: set[int] = set()

    def delta(self, index: int, part: Choice, usage: AnswerUsage) -> list[bytes]:
        finish = f'"{part.reason}"' if part.reason else "null"
        choice = f'"index":{index},"text":{_dump(part.text)},"logprobs":null,"finish_reason":{finish}'
        choice += f',"stop_reason":{_dump(part.stop)}'
        prompt = None if index in self._begun else self._prompt_ids(index)
        self._begun.add(index)
        choices = f'"choices":[{{{choice},"prompt_token_ids":{_dump(prompt)},"token_ids":{_dump(part.ids)}}}]'
        return [self._event(choices, self._usage_now(usage) + self._last(part.reason))]

    def whole(self, choices: list[Choice], usage: AnswerUsage) -> Body:
        shown = [
            {
                "index": index,
                "text": choice.text,
                "logprobs": None,
                "finish_reason": choice.reason,
                "stop_reason": choice.stop,
                "token_ids": choice.ids,
                "prompt_logprobs": None,
                "prompt_token_ids": self._prompt_ids(index),
                "routed_experts": None,
            }
            for index, choice in enumerate(choices)
        ]
        return self._begin | {"choices": shown} | self._ending(usage, {}) | dict.fromkeys(_ENDING_NULLS)


_ENDING_NULLS = ("kv_transfer_params", "ec_transfer_params", "metrics")


def error_body(error: ApiError, anthropic: bool = False) -> Body:
    """Returns the JSON of an error, in the dialect of the endpoint."""
    if anthropic:
        return {"type": "error", "error": {"type": error.kind, "message": error.message}}
    shown = {"message": error.message, "type": error.kind, "param": error.param, "code": error.status}
    return {"error": shown}


def stream_error(error: ApiError) -> bytes:
    """Returns an error event. Unlike its other events, vLLM writes it with spaces in the JSON."""
    shown = f'{{"message": {_dump(error.message)}, "type": "{error.kind}", "param": null, "code": {error.status}}}'
    return f'data: {{"error": {shown}}}\n\n'.encode()


def models_body(limits: Limits, models: Mapping[str, str]) -> Body:
    """Returns the body of `/v1/models`: the base model, then its adapters in order of loading.

    `models` maps names to paths. As in vLLM, `created` is the time of the answer, and the id of `permission` is random.
    """
    cards = []
    created = int(unix_now_s())
    for name, root in models.items():
        permission: dict[str, Any] = {
            "id": f"modelperm-{secrets.token_hex(8)}",
            "object": "model_permission",
            "created": created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        cards.append(
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "vllm",
                "root": root,
                "parent": None if name == limits.model else limits.model,
                "max_model_len": limits.max_model_len if name == limits.model else None,
                "permission": [permission],
            }
        )
    return {"object": "list", "data": cards}


def _dump(value: object) -> str:
    return orjson.dumps(value).decode()
