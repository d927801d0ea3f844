"""Decides whether another backend may generate the rest of a broken answer, and writes the request for it.

The rest must be a text that one backend alone could have written. With token ids this is exact: the prompt and the
answer so far are the new prompt. Without ids, the text so far is the end of the new prompt, and the engine tokenises it
again. A request whose client has received nothing but white space is sent again unchanged.

A grammar, a tool call, reasoning and log probabilities refer to the answer from its first token on, so an engine that
gets only the rest would write another text. A member of the body that is unknown here may have such an effect too, and
forbids the continuation.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import orjson
from msgspec import Struct

from llmproxy.gateway.http.routes import BodyKind
from llmproxy.gateway.proxying.continued.sent import Sent
from llmproxy.gateway.request.json_scan import BadBody, Kind, Member, Slices, scan_members
from llmproxy.gateway.request.parsed_body import LIMITS, Edit, spliced
from llmproxy.gateway.request.request_limits import COMPLETION_TOKENS

KINDS = frozenset({BodyKind.CHAT, BodyKind.COMPLETION})
"""The kinds of bodies whose streams may be continued."""

_VALUE_BYTES_MAX = 64 * 1024

_CARRIED = frozenset({
    "model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens",
    "temperature", "repetition_penalty", "top_p", "top_k", "min_p", "logit_bias", "bad_words", "allowed_token_ids",
    "stop_token_ids", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "stop",
    "tools", "parallel_tool_calls", "include_reasoning", "reasoning_effort", "chat_template", "chat_template_kwargs",
    "documents", "add_special_tokens", "mm_processor_kwargs", "media_io_kwargs", "return_token_ids", "priority",
    "cache_salt", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity",
    "request_id", "session_id", "length_penalty", "truncation_side", "top_logprobs",
})  # fmt: skip
"""Members that mean the same for the rest as for the whole answer, and the limits, which are reduced for the rest."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "use_beam_search": (False,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "suffix": ("",),
    # With several tokens in an event their number is unknown.
    "stream_interval": (1,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "return_tokens_as_token_ids": (False,),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "truncate_prompt_tokens": (-1,),
    "modalities": (["text"],),
}
"""Members that forbid a continuation, except with null or with the values here."""

_COUNTING: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "seed": (),
    "include_stop_str_in_output": (False,),
}
"""Members whose effect depends on the tokens of the answer so far.

With null or the values here, they have no effect. With other values, only `retry.continue: always` continues.
"""


class How(StrEnum):
    """How the rest of an answer is requested."""

    ANEW = "anew"  # The same request again: the client has received no text but white space.
    IDS = "ids"  # The prompt and the answer so far are sent as token ids.
    TEXT = "text"  # The prompt and the answer so far are sent as text.
    END = "end"  # No request: the client has received the whole answer except the end mark.


class NotContinued(Exception):  # noqa: N818 - a reason, not an error of this code
    """Another backend may not generate the rest of an answer. The text is the reason, for the log."""


class Rest(Struct, frozen=True):
    """The request for the rest of an answer."""

    how: How
    body: bytes
    # White space at the end of the text so far that is not in the new prompt: chat templates would remove it. So the
    # engine may write it again.
    space: str
    # The number of tokens of the answer so far that are in the new prompt.
    tokens: int
    # Whether the client has received the whole text, and only the end of the stream and its usage are missing. The
    # engine is then asked for one more token, which is not relayed.
    text_ended: bool = False
    # The token ids that the client has received and the engine has to generate again. The engine sends the ids of an
    # incomplete character at once, but its text only when the character is complete.
    repeated: tuple[int, ...] = ()


def write_rest(body: bytes, kind: BodyKind, sent: Sent, limit: int | None, *, always: bool = False) -> Slices[Rest]:
    """Returns the request for the rest of the answer to `body`. `sent` is the part that the client has received.

    A generator: it yields after at most about 2 ms of work. `limit` is the maximum of tokens of the whole answer, None
    without a limit. With `always`, members of `_COUNTING` may have any value. Raises NotContinued.
    """
    if sent.empty:
        return Rest(How.ANEW, body, sent.text, 0, repeated=tuple(sent.all_ids))
    if sent.other:
        raise NotContinued(f"the answer has more than text: {sent.other}")
    try:
        members: Mapping[str, Member] = yield from scan_members(body, None)
    except BadBody:
        raise NotContinued("the body of the request is not valid JSON") from None
    _check(body, members, always)
    how, tokens, space, edits = How.TEXT, sent.tokens, "", list[Edit]()
    if kind is BodyKind.CHAT:
        text = sent.text.rstrip()
        # The engine writes white space that ends another token, such as `.\n`, again as a token of its own.
        space, tokens = sent.text[len(text) :], tokens - sent.space_tokens - sent.space_torn
        if space and sent.all_ids:
            raise NotContinued("the client has got the ids of white space, which may be other ids the next time")
        edits += _chat(members, text)
    else:
        if limit is None and "max_tokens" not in members and tokens <= COMPLETION_TOKENS:
            # An answer of more tokens proves that the engine has another default.
            limit = COMPLETION_TOKENS
        how, edit = _completion(body, members, sent)
        edits.append(edit)
    left = None if limit is None else limit - tokens
    text_ended = sent.finished or (left is not None and left <= 0)
    edits += _limits(body, members, kind, tokens, 1 if text_ended else left)
    return Rest(how, b"".join(spliced(body, sorted(edits))), space, tokens, text_ended, tuple(sent.held_ids))


def _check(body: bytes, members: Mapping[str, Member], always: bool) -> None:
    """Raises NotContinued for a member that forbids a continuation."""
    for name, member in members.items():
        if name in _CARRIED:
            continue
        if member.end - member.start > _VALUE_BYTES_MAX:
            raise NotContinued(f"the request has `{name}`")
        value = _value(body, member, name)
        neutral = _NEUTRAL.get(name, _COUNTING.get(name))
        if neutral is None:
            raise NotContinued(f"the request has `{name}`, which is not known to allow it")
        # `logprobs: 0` asks for log probabilities, `logprobs: false` does not, and 0 == False.
        allowed = value is None or any(
            value == one and isinstance(one, bool) is isinstance(value, bool) for one in neutral
        )
        if not allowed and not (always and name in _COUNTING):
            raise NotContinued(f"the request has `{name}`")


def _value(body: bytes, member: Member, name: str) -> Any:
    """Returns the value of a member. Raises NotContinued if it is not valid JSON."""
    try:
        return orjson.loads(body[member.start : member.end])
    except orjson.JSONDecodeError:
        raise NotContinued(f"the request has a `{name}` that is not valid JSON") from None


def _limits(body: bytes, members: Mapping[str, Member], kind: BodyKind, tokens: int, left: int | None) -> list[Edit]:
    """Returns the edits that limit the rest to `left` tokens, and reduce `min_tokens` by `tokens`.

    `left` is None without a limit. Raises NotContinued for a limit that is no whole number.
    """
    edits = []
    for name in (*LIMITS[kind], "min_tokens"):
        if name in members and type(_value(body, members[name], name)) not in (int, type(None)):
            # Some engines read "8" and 8.0 as 8.
            raise NotContinued(f"the request has a `{name}` that is no whole number")
    given = [members[name] for name in LIMITS[kind] if name in members]
    if left is not None:
        edits += [(member.start, member.end, b"%d" % left) for member in given]
        if not given:
            start = body.index(b"{") + 1
            edits.append((start, start, b'"%b":%d,' % (LIMITS[kind][-1].encode(), left)))
    least = members.get("min_tokens")
    if least is not None:
        value = _value(body, least, "min_tokens")
        if type(value) is int:
            rest = max(0, value - tokens) if left is None else min(left, max(0, value - tokens))
            edits.append((least.start, least.end, b"%d" % rest))
    return edits


def _chat(members: Mapping[str, Member], text: str) -> list[Edit]:
    """Returns the edits that append the text so far as the last message, which the engine continues."""
    messages = members.get("messages")
    if messages is None or messages.kind is not Kind.ARRAY or not messages.objects:
        raise NotContinued("the request has no list of messages")
    part = orjson.dumps({"role": "assistant", "content": text})
    edits = [(messages.end - 1, messages.end - 1, b"," + part)]
    for name, value in (("continue_final_message", b"true"), ("add_generation_prompt", b"false")):
        if name in members:
            edits.append((members[name].start, members[name].end, value))
        else:
            edits.append((messages.end, messages.end, b',"%b":%b' % (name.encode(), value)))
    return edits


def _completion(body: bytes, members: Mapping[str, Member], sent: Sent) -> tuple[How, Edit]:
    """Returns how the rest of a completion is requested, and the edit of its prompt.

    Raises NotContinued if neither token ids nor a text can be continued.
    """
    prompt, stop = members.get("prompt"), members.get("stop")
    if prompt is None:
        raise NotContinued("the request has no prompt")
    # An engine that looks for a stop string holds text back, but not its ids.
    stops = stop is not None and body[stop.start : stop.end] not in (b"null", b"[]")
    if sent.ids and sent.prompt_ids and not stops:
        return How.IDS, (prompt.start, prompt.end, orjson.dumps(sent.prompt_ids + sent.ids))
    if prompt.strings != 1 or prompt.objects:
        raise NotContinued("the prompt is token ids, and the ids of the answer are unknown")
    end = body.rindex(b'"', prompt.start, prompt.end)
    return How.TEXT, (end, end, orjson.dumps(sent.text)[1:-1])
