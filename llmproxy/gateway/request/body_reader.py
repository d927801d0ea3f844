"""Reads the properties that scheduling needs from the bytes of a request body.

Small bodies are parsed once. Large and dense bodies are scanned in slices, because a parser blocks the event loop while
it runs, in any thread.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import orjson
from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder

from llmproxy.gateway.http.routes import BodyKind
from llmproxy.gateway.request.json_scan import (
    MEDIA_BYTES,
    MEDIA_HEAD_BYTES,
    PARSE_BYTES_MAX,
    BadBody,
    Kind,
    Member,
    Slices,
    T,
    drain,
    is_media,
    scan_every,
)
from llmproxy.gateway.request.multipart import scan_form
from llmproxy.gateway.request.parsed_body import (
    ABSENT,
    ARGUMENTS,
    FALSE,
    GUARDED,
    LIMITS,
    PROMPT_ALONE,
    RESPONSE_MEMBERS,
    STORE,
    TRANSFER,
    TRUE,
    ParsedBody,
    as_bool,
    guarded_members,
    with_sampling_limit,
)
from llmproxy.gateway.request.prefix_hash import SALT, Chain, prompt_chain
from llmproxy.gateway.request.prefix_hash_large import large_prompt_chain

# A body with more JSON values is scanned in slices. The parser makes an object for each value: parsing this many values
# blocks the event loop for 2 ms, and 128 KiB of brackets for 15 ms.
PARSE_VALUES_MAX = 16 * 1024
# A body with more bytes of member names (`_name_bytes`) is scanned in slices. Each name costs some 20 µs of Python, and
# some bodies are scanned four times. 1 KiB is about 150 names.
NAME_BYTES_MAX = 1024
TURN_S = 0.002
"""How long one body is scanned before the event loop runs other work.

Long enough to make the switches cheap, and short compared with the gaps between the tokens of a stream.
"""
OPTION_BYTES_MAX = 64 * 1024
"""The maximum length of the value of an option, such as `model`, in a large body. A longer value gets 400."""
# The longest text that names a session; a longer text names none. It fits into OPTION_BYTES_MAX even with every
# character escaped.
SESSION_CHARS_MAX = 4096
# The highest `ParsedBody.sequences`, more than any engine runs at once. Without a maximum, a client could claim the
# work of a whole fleet.
SEQUENCES_MAX = 1024
# The highest `ParsedBody.sequences_asked`, which also counts the sequences that an engine runs one after the other.
ANSWERED_MAX = 1 << 20
_NUMBER_CHARS_MAX = 64

# Members with text or tokens of the prompt, in any endpoint.
_TEXT = (
    "messages", "prompt", "input", "system", "instructions", "query", "queries", "documents", "items", "text_1",
    "text_2", "data_1", "data_2", "texts", "inputs", "token_ids", "tokens", "tools",
)  # fmt: skip
_OPTIONS = (
    "model", "stream", "stream_options", "n", "best_of", "max_completion_tokens", "max_tokens", "max_output_tokens",
)  # fmt: skip
# With these members, a request cannot be split into prefill and decode: the engine that answers has to compute the
# prompt itself, or answers in several turns.
_INDIVISIBLE = ("echo", "prompt_logprobs", "use_beam_search", "background")
_SPLITTABLE = frozenset({BodyKind.CHAT, BodyKind.COMPLETION, BodyKind.RESPONSES, BodyKind.MESSAGES})
# Members of messages that the chat template does not turn into text.
_NOT_TEXT = frozenset(
    {"role", "type", "id", "tool_call_id", "call_id", "cache_control", "detail", "format", "media_type", "status"}
)
_LABEL_CHARS_MAX = 256  # Some templates write roles and call ids into the prompt. Longer values count as text.
# Members that make the engine compile a grammar first.
_GRAMMAR = frozenset(
    {"response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "text"}
)
# Members that contain an image or a sound.
_MEDIA = frozenset({"image_url", "image", "input_audio", "audio_url", "video_url", "image_embeds", "audio_embeds"})
_MEDIA_KEY = re.compile(rb'"(?:%s)"' % b"|".join(name.encode() for name in sorted(_MEDIA)))


class BodyReader:
    """Reads the request bodies of one event loop.

    Large bodies are scanned in slices, and only one slice of all bodies is scanned between two iterations of the event
    loop. So many large bodies block the event loop for no longer than one.
    """

    def __init__(self, *, prefixes: bool = False, session_members: Sequence[str] = ()) -> None:
        """With `prefixes`, computes the hash chain of every prompt, for a placement that uses prefixes.

        `session_members` are the top-level members that may name the session.
        """
        self._prefixes = prefixes
        self._session_members = tuple(session_members)
        self._turns = asyncio.Lock()

    async def read(self, body: bytes, kind: BodyKind, content_type: str = "") -> ParsedBody:
        """Reads one request body. Raises BadBody.

        A form needs the `content_type` of the request. This method blocks the event loop for at most about 10 ms, as do
        the methods of the result.
        """
        if kind is BodyKind.FORM:
            return await self.in_turns(read_form(body, content_type, self._session_members))
        if not parses_at_once(body) or (len(body) > NAME_BYTES_MAX and _name_bytes(body) > NAME_BYTES_MAX):
            return await self.in_turns(read_large(body, kind, self._prefixes, self._session_members))
        if not self._prefixes:
            return read_small(body, kind, self._session_members)
        began_s = time.perf_counter()
        fields = _parsed(body)
        if time.perf_counter() - began_s > TURN_S:
            # The body is dense, and its chain may take as long again.
            await asyncio.sleep(0)
        return _of_fields(fields, body, kind, self._session_members, prompt_chain(fields, kind))

    async def in_turns(self, slices: Slices[T]) -> T:
        """Runs a computation slice by slice and returns its result. Raises its exceptions.

        Several computations take turns of TURN_S, and after each turn the event loop runs everything else.
        """
        while True:
            async with self._turns:
                until_s = time.perf_counter() + TURN_S
                try:
                    next(slices)
                    while time.perf_counter() < until_s:
                        next(slices)
                except StopIteration as done:
                    result: T = done.value
                    return result
                # The lock is kept while the loop runs everything else once.
                await asyncio.sleep(0)


def parses_at_once(body: bytes) -> bool:
    """Returns whether parsing `body` takes at most about 2 ms.

    The result may be False for a body that parses faster, if it is long or its text contains many brackets or commas.
    """
    if len(body) <= 2 * PARSE_VALUES_MAX:
        return True
    # Every value except the outermost follows an opening bracket or a comma.
    return len(body) <= PARSE_BYTES_MAX and sum(map(body.count, (b"[", b"{", b","))) <= PARSE_VALUES_MAX


def read_small(body: bytes, kind: BodyKind, session_members: Sequence[str] = ()) -> ParsedBody:
    """Parses a JSON body in one call, which blocks the event loop. Raises BadBody."""
    return _of_fields(_parsed(body), body, kind, session_members)


_values = Decoder(dict[str, Raw]).decode  # Finds the values of the top-level members without parsing them.


def _name_bytes(body: bytes) -> int:
    """Returns how many bytes are outside the values of distinct members, or in arguments for the engine.

    Of a repeated member, all values but the last are outside too. Raises BadBody for a body that is no JSON object.
    """
    try:
        values = _values(body)
    except (DecodeError, RecursionError):
        _parsed(body)
        return len(body)  # Only this decoder cannot read the body.
    size_bytes = len(body) - sum(map(len, values.values()))
    for name in ARGUMENTS.keys() & values:
        size_bytes += len(values[name])
    return size_bytes


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if not body.strip():
            raise BadBody("The request body is empty; send a JSON object.") from None
        what = error.msg.split(": line", 1)[0]
        where = f"line {error.lineno} column {error.colno}"
        raise BadBody(f"The request body is not valid JSON: {what} ({where}).", f"body.{error.pos}") from None
    if not isinstance(fields, dict):
        raise BadBody("The request body must be a JSON object.")
    return fields


def _of_fields(
    fields: dict[str, Any], body: bytes, kind: BodyKind, session_members: Sequence[str], chain: Chain | None = None
) -> ParsedBody:
    sizes = []
    for name in _TEXT:
        if name in fields:
            sizes.append(_parsed_size(name, fields[name]))  # noqa: PERF401 - a comprehension is one more call
    guarded: tuple[tuple[str, Member], ...] = ()
    if not GUARDED.isdisjoint(fields):
        guarded = drain(guarded_members(body, drain(scan_every(body, GUARDED))))
    return _assembled(body, kind, fields, sizes, _sessions(fields, session_members), guarded, None, chain)


def read_large(
    body: bytes, kind: BodyKind, prefixes: bool = False, session_members: Sequence[str] = ()
) -> Slices[ParsedBody]:
    """Scans a JSON body of any size in slices.

    Raises BadBody for broken structure. Invalid values that are not read raise nothing: the engine reads the same bytes
    and reports them.
    """
    options = (*_OPTIONS, *_INDIVISIBLE, *PROMPT_ALONE, *(RESPONSE_MEMBERS if kind is BodyKind.RESPONSES else ()))
    grammar = (*_GRAMMAR, "tool_choice")
    found = yield from scan_every(body, (*_TEXT, *options, SALT, *GUARDED, *PROMPT_ALONE, *grammar, *session_members))
    members = yield from with_sampling_limit(body, dict(found))
    fields = {name: _option(body, name, members[name]) for name in options if name in members}
    sizes = [_scanned_size(members[name]) for name in _TEXT if name in members]
    chain = (yield from large_prompt_chain(body, members, kind)) if prefixes else None
    named = {name: _scanned_text(body, members[name]) for name in session_members if name in members}
    guarded = yield from guarded_members(body, found)
    fields |= {name: ABSENT for name in ("tools", *_GRAMMAR) if name in members}
    if "tool_choice" in members:
        fields["tool_choice"] = _scanned_text(body, members["tool_choice"])
    if len(body) <= PARSE_BYTES_MAX and _MEDIA_KEY.search(body) is not None:
        sizes.append(_Size(media=True))
    return _assembled(body, kind, fields, sizes, _sessions(named, session_members), guarded, members, chain)


def _assembled(
    body: bytes,
    kind: BodyKind,
    fields: Mapping[str, Any],
    sizes: list[_Size],
    sessions: dict[str, str],
    guarded: tuple[tuple[str, Member], ...],
    members: Mapping[str, Member] | None,
    chain: Chain | None,
) -> ParsedBody:
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise BadBody("The model must be a string: the name of a model or an adapter.", "body.model")
    stream = as_bool(fields.get("stream"))
    if stream is None and kind is not BodyKind.OTHER:
        raise BadBody("The field stream must be true or false.", "body.stream")
    text_bytes, tokens, max_tokens = 0, list[int](), None
    for size in sizes:
        text_bytes += size.text_bytes
        if size.tokens is not None:
            tokens.append(size.tokens)
    for name in LIMITS[kind]:
        if (max_tokens := fields.get(name)) is not None:
            break
    sequences = _sequences(fields, sizes)
    # A tool that must be called is a grammar too.
    grammar = not _GRAMMAR.isdisjoint(fields) or fields.get("tool_choice") not in (None, "auto", "none")
    stored = {}
    if kind is BodyKind.RESPONSES:
        stored = {name: fields[name] for name in RESPONSE_MEMBERS if name in fields}
    return ParsedBody(
        model=model or None,
        stream=stream is True,
        prompt_bytes=text_bytes,
        prompt_tokens=sum(tokens) if tokens and not text_bytes else None,
        max_tokens=_count(max_tokens),
        sequences=min(SEQUENCES_MAX, sequences),
        prepared=grammar or len(body) > PARSE_BYTES_MAX or any(map(_has_media, sizes)),
        kind=kind,
        body=body,
        stream_options=fields.get("stream_options", ABSENT),
        members=members,
        chain=chain,
        sessions=sessions,
        response_members=stored,
        guarded=guarded,
        sequences_asked=sequences,
        splittable=sequences == 1 and _is_splittable(kind, fields),
    )


def _is_splittable(kind: BodyKind, fields: Mapping[str, Any]) -> bool:
    if kind not in _SPLITTABLE:
        return False
    # With tools, the engine may answer one request for a response in several turns, each with a prompt of its own.
    for name in (*_INDIVISIBLE, "tools") if kind is BodyKind.RESPONSES else _INDIVISIBLE:
        if fields.get(name) is not None and fields[name] is not False:
            return False
    return _is_alike(kind, fields)


def _is_alike(kind: BodyKind, fields: Mapping[str, Any]) -> bool:
    """Returns whether an engine that accepts the prefill call also accepts the decode call of this body.

    If an engine rejects the decode call, the KV blocks of the prompt stay until their lease expires. Only members that
    differ between the two calls are checked: other bad values already fail the prefill.
    """
    for name in (*LIMITS[kind], "min_tokens"):
        if fields.get(name) is not None and type(fields[name]) is not int:
            return False
    streams, options = fields.get("stream"), fields.get("stream_options")
    flags = [streams, fields.get(STORE)]
    if options is not None:
        if streams is not True or not isinstance(options, dict):
            return False
        flags += options.values()
    for flag in flags:  # noqa: SIM110 - a generator costs more calls, for each request
        if flag not in (None, False, True):
            return False
    return True


def read_form(body: bytes, content_type: str, session_members: Sequence[str] = ()) -> Slices[ParsedBody]:
    """Finds `model`, `stream` and `session_members` in a multipart form. Raises BadBody.

    The size of the prompt is set to MEDIA_BYTES, because the form usually has one sound.
    """
    found = yield from scan_form(body, content_type, ("model", "stream", *TRANSFER, *session_members))
    for name in TRANSFER:
        if name in found:
            raise BadBody(f"The form field {name} is not taken from clients.", f"body.{name}")
    values = {name: body[member.start : member.end] for name, member in found.items()}
    try:
        model = values.get("model", b"").decode() or None
    except UnicodeDecodeError:
        raise BadBody("The form field model must be UTF-8 text.", "body.model") from None
    texts = {name: value.decode(errors="replace") for name, value in values.items()}
    stream = texts.get("stream", "").strip().lower()
    if stream not in TRUE | FALSE:
        raise BadBody("The form field stream must be true or false.", "body.stream")
    return ParsedBody(
        model=model,
        stream=stream in TRUE,
        prompt_bytes=MEDIA_BYTES,
        prepared=True,
        kind=BodyKind.FORM,
        body=body,
        members=found,
        sessions=_sessions(texts, session_members),
    )


class _Size(Struct, frozen=True):
    text_bytes: int = 0
    # The exact number of tokens, if the member contains token ids.
    tokens: int | None = None
    prompts: int = 1
    # Whether there are images or sounds.
    media: bool = False


_has_media = attrgetter("media")


def _sequences(fields: Mapping[str, Any], sizes: list[_Size]) -> int:
    sequences = 1
    for size in sizes:
        sequences = max(sequences, size.prompts)
    if "n" in fields or "best_of" in fields:
        sequences *= max(_number(fields.get("n")), _number(fields.get("best_of")))
    return min(ANSWERED_MAX, sequences)


def _number(value: Any) -> int:
    """Converts a count as the engine does: "8" and 8.0 are 8. Returns 1 for anything else."""
    if isinstance(value, str) and len(value) <= _NUMBER_CHARS_MAX:
        try:
            value = float(value)
        except ValueError:
            return 1
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return _count(value) or 1


def _count(value: Any) -> int | None:
    """Returns `value` if it is a positive integer, else None. An invalid value is refused by the engine, not here."""
    return value if type(value) is int and value > 0 else None


def _parsed_size(name: str, value: Any) -> _Size:
    if not isinstance(value, list) or not value:
        return _text_size(value, name == "tools")
    if type(value[0]) is int:
        return _Size(tokens=len(value))
    if type(value[0]) is list:
        if value[0] and type(value[0][0]) is int:
            return _Size(tokens=sum(len(ids) for ids in value if isinstance(ids, list)), prompts=len(value))
        return _text_size(value, False, len(value))
    return _text_size(value, name == "tools", len(value) if type(value[0]) is str else 1)


def _text_size(value: Any, with_names: bool, prompts: int = 1) -> _Size:
    """Returns the size of all text in a parsed value, at any depth. `with_names`: names of members count too."""
    total_bytes, media = 0, False
    ahead = [value]
    while ahead:
        value = ahead.pop()
        if type(value) is str:
            total_bytes += _string_bytes(value)
        elif type(value) is list:
            ahead.extend(value)
        elif type(value) is dict:
            if with_names:
                ahead.extend(value)
                ahead.extend(value.values())
                continue
            for name, inner in value.items():
                if name in _MEDIA:
                    total_bytes, media = total_bytes + MEDIA_BYTES, True
                elif name not in _NOT_TEXT or (type(inner) is str and len(inner) > _LABEL_CHARS_MAX):
                    ahead.append(inner)
    return _Size(total_bytes, None, prompts, media)


def _string_bytes(text: str) -> int:
    size_bytes = len(text) if text.isascii() else len(text.encode())
    if size_bytes > MEDIA_BYTES and is_media(text[:MEDIA_HEAD_BYTES].encode()):
        return MEDIA_BYTES
    return size_bytes


def _scanned_size(member: Member) -> _Size:
    """Returns the size of a scanned text member, from the counts in `member`."""
    if member.kind is not Kind.ARRAY:
        return _Size(member.text_bytes)
    lists = member.arrays - 1
    if not member.strings and not member.objects:
        # The number of ids is one more than the number of commas, also in nested lists.
        return _Size(tokens=member.commas + 1, prompts=max(1, lists))
    prompts = 1 if member.objects else max(member.strings, lists)
    return _Size(member.text_bytes, prompts=prompts)


def _option(body: bytes, name: str, member: Member) -> Any:
    if member.end - member.start > OPTION_BYTES_MAX:
        raise BadBody(f"The field {name} is longer than {OPTION_BYTES_MAX} bytes.", f"body.{name}")
    try:
        return orjson.loads(body[member.start : member.end])
    except orjson.JSONDecodeError:
        raise BadBody(f"The request body is not valid JSON: bad value of {name}.", f"body.{member.start}") from None


def _scanned_text(body: bytes, member: Member) -> Any:
    """Returns the value of a member; None if it is too long or invalid."""
    try:
        return _option(body, "", member)
    except BadBody:
        return None  # The engine reads the same bytes and reports the error.


def _sessions(fields: Mapping[str, Any], members: Sequence[str]) -> dict[str, str]:
    sessions = {}
    for name in members:
        if isinstance(text := fields.get(name), str) and 0 < len(text) <= SESSION_CHARS_MAX:
            sessions[name] = text
    return sessions
