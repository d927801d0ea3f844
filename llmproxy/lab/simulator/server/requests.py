"""Validates request bodies, with vLLM 0.32's messages and order of checks."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from llmproxy.lab.simulator.server import numbered
from llmproxy.lab.simulator.server.answer_text import Join
from llmproxy.lab.simulator.server.text import packed, tokens_of

Body = dict[str, Any]
_IMAGE_TOKENS = 256
_NOT_COMPATIBLE = (
    "continue_final_message and add_generation_prompt are not compatible. Use continue_final_message when you want "
    "the model to continue the final message, and add_generation_prompt when you want to add a header that will prompt "
    "it to start a new assistant message instead."
)


class ApiError(Exception):
    """An error response: HTTP status, and vLLM's `type` and `param`."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param


@dataclass(frozen=True, slots=True)
class Limits:
    """The properties of a replica by which a request is valid or not, such as models and context length."""

    model: str
    adapters: frozenset[str]
    max_model_len: int
    join: Join = "same"  # How an answer continues whose beginning is in the prompt; see `ReplicaOptions`.


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A valid generation request. `max_tokens` is always set, and fits the model together with every prompt."""

    model: str
    adapter: str | None
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    choices: int = 1
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    cache_salt: str | None = None
    return_token_ids: bool = False
    stops: tuple[str, ...] = ()
    join: Join = "same"  # How an answer continues whose beginning is in the prompt; see `ReplicaOptions`.
    body: Body = field(default_factory=dict)

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def kv_transfer_params(self) -> Body:
        """The body's `kv_transfer_params`: whether to keep KV for another engine, or where to fetch it."""
        return self.body.get("kv_transfer_params") or {}


def invalid(kind: str, loc: str, message: str, value: object, extra: str = "") -> ApiError:
    """Returns a validation error in the words of the framework. `loc` is dotted."""
    detail = f"{{'type': '{kind}', 'loc': '{loc}', 'msg': '{message}', 'input': '{value}'{extra}}}"
    return ApiError(400, f"1 validation error:\n  {detail}", "Bad Request", loc)


def parse_object(raw: bytes, content_type: str) -> Body:
    """Returns the JSON object of a body. Raises ApiError for any other body."""
    if content_type.partition(";")[0].strip().lower() != "application/json":
        message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise ApiError(400, message, "Bad Request")
    if not raw:
        raise invalid("missing", "body", "Field required", None)
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        # Clients see the error messages of the standard library, and it accepts more than orjson.
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as error:
            position = getattr(error, "pos", 0)
            reason = f", 'ctx': {{'error': '{getattr(error, 'msg', error)}'}}"
            loc = f"body.{position}"
            raise invalid("json_invalid", loc, "JSON decode error", "<dict of 0 items>", reason) from None
    if not isinstance(body, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise invalid("model_attributes_type", "body", message, _shown(body))
    return body


def chat_request(body: Body, limits: Limits) -> GenerationRequest:
    messages = _messages(body)
    limit = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    if body.get("tools") and body.get("tool_choice") in (None, "auto"):
        message = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
        raise ApiError(400, message)
    continues = body.get("continue_final_message") is True
    if continues and body.get("add_generation_prompt") is True:
        message = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        raise ApiError(400, message)
    if continues and body.get("add_generation_prompt") is None:
        # The default of `add_generation_prompt` is true, which the chat template refuses.
        raise ApiError(400, _NOT_COMPATIBLE)
    prompts, join = _conversation(body, messages, limits, continues)
    return _checked(body, limits, prompts, limit, max(_integer(body, "n") or 1, 1), join=join)


def completion_request(body: Body, limits: Limits) -> GenerationRequest:
    """Validates a body of `/v1/completions`. The default of `max_tokens` is 16, as in vLLM."""
    prompts, text = _prompts(body.get("prompt"))
    if text:
        prompts = [_joined(prompt, limits) for prompt in prompts]
    choices = max(_integer(body, "n") or 1, 1)
    return _checked(body, limits, prompts, "max_tokens", choices, 16, limits.join if text else "same")


def responses_request(body: Body, limits: Limits) -> GenerationRequest:
    given = body.get("input")
    if given is None:
        raise invalid("missing", "body.input", "Field required", _shown(body))
    if not isinstance(given, str | list):
        raise invalid("string_type", "body.input", "Input should be a valid string", _shown(given))
    if not isinstance(body.get("request_id", ""), str):
        value = _shown(body["request_id"])
        raise invalid("string_type", "body.request_id", "Input should be a valid string", value)
    messages = [*items(given)]
    if isinstance(body.get("instructions"), str):
        messages.insert(0, {"role": "system", "content": body["instructions"]})
    # As in vLLM, an assistant's message that is not complete is continued.
    last = messages[-1] if messages else None
    continues = isinstance(last, dict) and last.get("status") in ("in_progress", "incomplete")
    prompts, join = _conversation(body, messages, limits, continues)
    return _checked(body, limits, prompts, "max_output_tokens", join=join)


def items(given: str | list[Any]) -> list[Any]:
    """Returns the `input` of `/v1/responses` as a list."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def messages_request(body: Body, limits: Limits, counting: bool = False) -> GenerationRequest:
    """Validates a body of `/v1/messages`, or when `counting`, of `/count_tokens`, which needs no `max_tokens`."""
    messages = _messages(body)
    if not counting and body.get("max_tokens") is None:
        raise invalid("missing", "body.max_tokens", "Field required", _shown(body))
    if body.get("system") is not None:
        messages = [{"role": "system", "content": body["system"]}, *messages]
    prompts, join = _conversation(body, messages, limits)
    return _checked(body, limits, prompts, "max_tokens", join=join)


def resolve(body: Body, limits: Limits) -> tuple[str, str | None]:
    """Returns (model name as given, adapter or None). A body without a model means the base model.

    Raises ApiError, with status 404 for an unknown name.
    """
    name = body.get("model")
    if name is not None and not isinstance(name, str):
        raise invalid("string_type", "body.model", "Input should be a valid string", _shown(name))
    if not name or name == limits.model:
        return limits.model, None
    if name not in limits.adapters:
        message = f"The model `{name}` does not exist. Valid aliases: {limits.model}."
        raise ApiError(404, message, "NotFoundError", "model")
    return name, name


def chat_tokens(messages: Sequence[Any], continues: bool = False) -> tuple[int, ...]:
    """Returns the prompt of a conversation. Parts share no token, so a longer conversation extends the prompt.

    With `continues`, the answer goes on from the last message.
    """
    tokens: list[int] = []
    for message in messages:
        if not isinstance(message, dict):
            raise invalid("dict_type", "body.messages.0", "Input should be a valid dictionary", _shown(message))
        role = message.get("role", "user")
        tokens += tokens_of(f"<|{role}|>")
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            tokens += _part_tokens(_without_header(part) if role == "system" else part)
    if not continues:
        tokens += tokens_of("<|assistant|>")
    return tuple(tokens)


def _conversation(
    body: Body, messages: Sequence[Any], limits: Limits, continues: bool = False
) -> tuple[list[tuple[int, ...]], Join]:
    """Returns the prompt of a conversation, and its join.

    As in vLLM, token ids in `kv_transfer_params` replace the messages, unless these have parts that are no text.
    """
    prompt = chat_tokens(messages, continues)
    params = body.get("kv_transfer_params")
    ids = params.get("prompt_token_ids") if isinstance(params, dict) else None
    parts = [part for message in messages if isinstance(content := message.get("content"), list) for part in content]
    if ids is None or any(isinstance(part, dict) and part.get("text") is None for part in parts):
        return [_joined(prompt, limits)], limits.join
    if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
        name = "kv_transfer_params.prompt_token_ids"
        message = "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers."
        raise ApiError(400, f"{message} (parameter={name})", param=name)
    return [tuple(ids)], "same"


def _joined(prompt: tuple[int, ...], limits: Limits) -> tuple[int, ...]:
    """Returns `prompt`; if `limits.join` is not `same`, with other tokens for the text of a numbered last token."""
    if limits.join == "same" or prompt[-1] < numbered.FIRST_ID or not numbered.number_of(prompt[-1]):
        return prompt
    return (*prompt[:-1], *packed(numbered.bytes_of(prompt[-1])))


def _without_header(part: object) -> object:
    """Removes Claude Code's attribution line, which differs in each run, from a system message."""
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str) or not text.startswith("x-anthropic-billing-header"):
        return part
    return text.partition("\n")[2]


def _part_tokens(part: object) -> Sequence[int]:
    """Returns the tokens of a text. Other parts (images, audio) become a fixed number of tokens from a content hash."""
    if part is None:
        return ()
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        part = part["text"]
    if isinstance(part, str):
        return tokens_of(part)
    return [zlib.crc32(orjson.dumps(part))] * _IMAGE_TOKENS


def _messages(body: Body) -> list[Any]:
    messages = body.get("messages")
    if messages is None:
        raise invalid("missing", "body.messages", "Field required", _shown(body))
    if not isinstance(messages, list):
        raise invalid("list_type", "body.messages", "Input should be a valid list", _shown(messages))
    if not messages:
        message = "Cannot apply chat template to an empty conversation. Provide at least one message."
        raise ApiError(400, message)
    return messages


def _prompts(prompt: object) -> tuple[list[tuple[int, ...]], bool]:
    """Returns the prompts of the field `prompt`, and whether they are texts.

    The field is a text, a list of texts, token ids, or a list of token id lists.
    """
    if isinstance(prompt, str) and prompt:
        return [tokens_of(prompt)], True
    if isinstance(prompt, list) and prompt:
        if all(isinstance(part, str) and part for part in prompt):
            return [tokens_of(part) for part in prompt], True
        if all(isinstance(part, int) for part in prompt):
            return [tuple(prompt)], False
        if all(isinstance(part, list) and part and all(isinstance(token, int) for token in part) for part in prompt):
            return [tuple(part) for part in prompt], False
    message = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
    raise ApiError(400, message, param="prompt")


def _checked(
    body: Body,
    limits: Limits,
    prompts: Sequence[tuple[int, ...]],
    limit_name: str,
    choices: int = 1,
    default_tokens: int | None = None,
    join: Join = "same",
) -> GenerationRequest:
    """Returns the request after the checks that all endpoints share, in vLLM's order. Raises ApiError.

    `limit_name` is the field with the most output tokens, and `default_tokens` its default (None: as many as fit).
    """
    wanted = _integer(body, limit_name)
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise invalid("model_attributes_type", "body.stream_options", "Input should be an object", _shown(options))
    stream = body.get("stream") is True
    if options and not stream:
        message = "Stream options can only be defined when `stream=True`. (parameter=stream_options)"
        raise ApiError(400, message, param="stream_options")
    temperature = body.get("temperature")
    if isinstance(temperature, int | float) and temperature < 0:
        shown = float(temperature)
        message = f"temperature must be non-negative, got {shown}. (parameter=temperature, value={shown})"
        raise ApiError(400, message, param="temperature")
    if not isinstance(params := body.get("kv_transfer_params"), dict | None):
        raise invalid("dict_type", "body.kv_transfer_params", "Input should be a valid dictionary", _shown(params))
    model, adapter = resolve(body, limits)
    longest = max(map(len, prompts))
    max_tokens = _fitting_tokens(wanted, limit_name, longest, limits.max_model_len, default_tokens)
    min_tokens = _integer(body, "min_tokens") or 0
    if min_tokens > max_tokens:
        message = f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}."
        raise ApiError(400, message)
    include_usage = stream and bool(options.get("include_usage"))
    return GenerationRequest(
        model=model,
        adapter=adapter,
        prompts=tuple(prompts),
        max_tokens=max_tokens,
        choices=choices,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and bool(options.get("continuous_usage_stats")),
        ignore_eos=body.get("ignore_eos") is True,
        min_tokens=min_tokens,
        cache_salt=body.get("cache_salt"),
        return_token_ids=body.get("return_token_ids") is True,
        stops=_stops(body.get("stop")),
        join=join,
        body=body,
    )


def _fitting_tokens(wanted: int | None, name: str, prompt_tokens: int, max_len: int, default: int | None) -> int:
    if wanted is not None and wanted < 1:
        raise ApiError(400, f"{name} must be at least 1, got {wanted}. (parameter={name}, value={wanted})", param=name)
    if wanted is not None and wanted > max_len:
        message = f"{name}={wanted} cannot be greater than max_model_len={max_len}. Please request fewer output tokens."
        raise ApiError(400, f"{message} (parameter={name}, value={wanted})", param=name)
    room = max_len - prompt_tokens
    if room < 1 or (wanted is not None and wanted > room):
        at_least = max_len + 1 if room < 1 else prompt_tokens
        too_long = f"your prompt contains at least {at_least} input tokens"
        what = (
            f"{too_long}, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt."
            if room < 1
            else f"you requested {wanted} output tokens and {too_long}. "
            "Please reduce the length of the input prompt or the number of requested output tokens."
        )
        message = f"This model's maximum context length is {max_len} tokens. However, {what}"
        raise ApiError(400, f"{message} (parameter=input_tokens, value={at_least})", param="input_tokens")
    if wanted is None:
        return room if default is None else min(default, room)
    return wanted


def _stops(stop: object) -> tuple[str, ...]:
    stops = stop if isinstance(stop, list) else [stop]
    return tuple(one for one in stops if isinstance(one, str) and one)


def _integer(body: Body, name: str) -> int | None:
    value = body.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    try:
        return int(value)
    except OverflowError:
        raise invalid("finite_number", f"body.{name}", "Input should be a finite number", value) from None
    except (TypeError, ValueError):
        message = "Input should be a valid integer, unable to parse string as an integer"
        raise invalid("int_parsing", f"body.{name}", message, value) from None


def _shown(value: object) -> str:
    """Formats a value as the framework does, without repeating the client's data."""
    if isinstance(value, dict | list):
        return f"<{type(value).__name__} of {len(value)} items>"
    return str(value)
