"""The reading desk: the bytes of one request become an `RequestFacts`, and the few edits that the bytes may need.

Nothing is ever serialised again. What must change (an alias, the usage option of a stream) is spliced into the bytes
that the client sent. Small bodies are parsed once; large and dense ones are scanned in slices, because a parser would
hold the event loop for as long as it runs, whatever thread it runs in.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from llmproxy.core.domain import RequestFacts
from llmproxy.gateway.http.routes import BodyKind
from llmproxy.gateway.request.body import GUARDED, PRIORITY, TRANSFER, guarded_in, parses_at_once
from llmproxy.gateway.request.json_scan import (
    MEDIA_BYTES,
    MEDIA_HEAD_BYTES,
    BadBody,
    Kind,
    Member,
    Slices,
    T,
    drain,
    is_media,
    scan_every,
    scan_members,
)
from llmproxy.gateway.request.multipart import scan_form
from llmproxy.gateway.request.prefix_hash import PREVIOUS, SALT, Chain, chain_of
from llmproxy.gateway.request.prefix_hash_large import chain_of_large

TURN_S = 0.002  # Long enough to make the switches cheap, short enough to be lost in the noise of a token stream.
OPTION_BYTES_MAX = 64 * 1024
# Escaped to the utmost, so long a text still is no longer than an option; whoever sends more names no session.
SESSION_CHARS_MAX = 4096
# More than any engine runs at once; a number that a client made up must not count as a fleet full of work.
SEQUENCES_MAX = 1024
# The most that an engine is believed to have run for one request, one after the other: a long list of prompts.
ANSWERED_MAX = 1 << 20
_NUMBER_CHARS_MAX = 64

# Members that hold what the engine tokenises, in whatever endpoint they occur.
_TEXT = (
    "messages", "prompt", "input", "system", "instructions", "query", "queries", "documents", "items", "text_1",
    "text_2", "data_1", "data_2", "texts", "inputs", "token_ids", "tokens", "tools",
)  # fmt: skip
# By the kind of body, as the engine looks for it: the first one given counts, and what it does not know is ignored.
_MAX_TOKENS: dict[BodyKind, tuple[str, ...]] = {
    BodyKind.CHAT: ("max_completion_tokens", "max_tokens"),
    BodyKind.COMPLETION: ("max_tokens",),
    BodyKind.RESPONSES: ("max_output_tokens",),
    BodyKind.MESSAGES: ("max_tokens",),
    BodyKind.OTHER: ("max_completion_tokens", "max_tokens"),
}
_OPTIONS = (
    "model", "stream", "stream_options", "n", "best_of", "max_completion_tokens", "max_tokens", "max_output_tokens",
)  # fmt: skip
# What `/v1/responses` says of responses that engines keep: which one it goes on from, the id of its own, whether to.
REQUEST_ID, STORE = "request_id", "store"
_KEPT = (PREVIOUS, REQUEST_ID, STORE)
# Inside messages: members that the chat template does not turn into text, and those that hold an image or a sound.
_NOT_TEXT = frozenset(
    {"role", "type", "id", "tool_call_id", "call_id", "cache_control", "detail", "format", "media_type", "status"}
)
_MEDIA = frozenset({"image_url", "image", "input_audio", "audio_url", "video_url", "image_embeds", "audio_embeds"})

_ABSENT = object()
_USAGE_ON = b'"include_usage":true'
_TRUE = frozenset({"true", "1", "on", "yes", "t", "y"})
_FALSE = frozenset({"false", "0", "off", "no", "f", "n", ""})
_PRIORITISED = frozenset({BodyKind.CHAT, BodyKind.COMPLETION, BodyKind.RESPONSES})


@dataclass(frozen=True, slots=True)
class Spliced:
    """The bytes to send on, in order, without a copy of what the client sent.

    `hides_usage` says that the engine was asked for a usage event which the client did not ask for.
    """

    parts: tuple[bytes | memoryview, ...]
    hides_usage: bool = False


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """What the desk noted of one body: the ask, what splices need to know, and the chain of its prompt if asked for.

    `sessions` are the texts of the members that name one, by member; one that is no text is not among them. `kept` are
    the members of a body for `/v1/responses` that speak of stored responses. `guarded` are the transfer
    parameters and priorities, all of equal names. `sequences` are all that the engine may run, however many.
    """

    facts: RequestFacts
    kind: BodyKind
    body: bytes = field(repr=False)
    stream_options: Any = _ABSENT
    members: Mapping[str, Member] | None = field(default=None, repr=False)
    chain: Chain | None = field(default=None, repr=False)
    sessions: Mapping[str, str] = field(default_factory=dict, repr=False)
    kept: Mapping[str, Any] = field(default_factory=dict, repr=False)
    guarded: tuple[tuple[str, Member], ...] = field(default=(), repr=False)
    sequences: int = 1

    @property
    def stores(self) -> bool:
        """Whether the engine may store its response: where nothing is said, it may."""
        return _truth(self.kept.get(STORE, True)) is True

    def text(self, name: str) -> str | None:
        """The text of the top-level member `name`, one of those that the desk looks for; None where it is none."""
        members = drain(scan_members(self.body, (name,))) if self.members is None else self.members
        member = members.get(name)
        if member is None or member.kind is not Kind.STRING:
            return None
        try:
            return str(orjson.loads(self.body[member.start : member.end]))
        except orjson.JSONDecodeError:
            return None  # The engine reads the same bytes, and says what is wrong with them.

    def spliced(
        self,
        *,
        model: str | None = None,
        want_usage: bool = False,
        priority: int | None = None,
        salt: str | None = None,
        trusted: bool = True,
    ) -> Spliced:
        """The body with `model` in the place of the name it gave, with the usage option of a stream, and with null in
        the place of transfer parameters.

        A body that names no model is left so. `want_usage` changes chat and completion streams alone, and only those
        whose client is not to be told of usage. `priority` is the engine's own, lower first; it takes the place of what
        the client said of it, where the endpoint knows such a field. Elsewhere a client that is not `trusted` has the
        usual one, 0. `salt` takes the place of its `cache_salt`.
        """
        if not self.body:
            return Spliced(())
        edits: list[_Edit] = [(member.start, member.end, b"null") for name, member in self.guarded if name in TRANSFER]
        added: list[bytes] = []
        if model is not None and model != self.facts.model and self.facts.model is not None:
            name = model.encode() if self.kind is BodyKind.FORM else orjson.dumps(model)
            edits.append(self._replacement("model", name))
        usage = self._usage_edit() if want_usage else None
        if usage is not None:
            edits.append(usage)
        own = str(priority).encode() if priority is not None and self.kind in _PRIORITISED else None
        given = [member for name, member in self.guarded if name == PRIORITY]
        if own is not None or not trusted:
            edits += [(member.start, member.end, own or b"0") for member in given]
        if own is not None and not given:
            added.append(b'"priority":' + own)
        if salt is not None:
            self._set(SALT, orjson.dumps(salt), edits, added)
        if added:
            start = self.body.index(b"{") + 1
            last = b"" if self.body[start:].lstrip().startswith(b"}") else b","
            edits.append((start, start, b",".join(added) + last))
        return _splice(self.body, sorted(edits), usage is not None)

    def _set(self, name: str, value: bytes, edits: list[_Edit], added: list[bytes]) -> None:
        """Put a value in the place that the top-level member `name` has; where there is none, one is added."""
        members = drain(scan_members(self.body, (name,))) if self.members is None else self.members
        found = members.get(name)
        if found is None:
            added.append(b'"' + name.encode() + b'":' + value)
        else:
            edits.append((found.start, found.end, value))

    def _usage_edit(self) -> _Edit | None:
        if not self.facts.stream or self.kind not in (BodyKind.CHAT, BodyKind.COMPLETION):
            return None
        options = self.stream_options
        if options is _ABSENT:
            start = self.body.index(b"{") + 1  # The object is not empty: it says `stream`.
            return start, start, b'"stream_options":{' + _USAGE_ON + b"},"
        if options is None:
            return self._replacement("stream_options", b"{" + _USAGE_ON + b"}")
        if not isinstance(options, dict) or _truth(options.get("include_usage")) is not False:
            return None
        asked = options | {"include_usage": True}
        if "continuous_usage_stats" in options:
            # It counts for nothing without usage; with it, the engine would put usage on every event.
            asked["continuous_usage_stats"] = False
        return self._replacement("stream_options", orjson.dumps(asked))

    def _replacement(self, name: str, value: bytes) -> _Edit:
        member = self._member(name)
        return member.start, member.end, value

    def _member(self, name: str) -> Member:
        members = drain(scan_members(self.body, (name,))) if self.members is None else self.members
        return members[name]


_Edit = tuple[int, int, bytes]


class BodyReader:
    """Reads the bodies of one event loop. Large ones take turns, so that many of them stall it no longer than one."""

    def __init__(self, *, prefixes: bool = False, session_members: Sequence[str] = ()) -> None:
        """With `prefixes`, the chain of every prompt is noted too; a placement that knows prefixes needs it.

        `session_members` are the top-level members that may name the session.
        """
        self._prefixes = prefixes
        self._session_members = tuple(session_members)
        self._turns = asyncio.Lock()

    async def read(self, body: bytes, kind: BodyKind, content_type: str = "") -> ParsedBody:
        """Read one body; `content_type` is needed for forms. Raises BadBody. No stretch on the loop exceeds 10 ms."""
        if kind is BodyKind.FORM:
            return await self._in_turns(read_form(body, content_type, self._session_members))
        if parses_at_once(body):
            return await self._small(body, kind)
        return await self._in_turns(read_large(body, kind, self._prefixes, self._session_members))

    async def _small(self, body: bytes, kind: BodyKind) -> ParsedBody:
        if not self._prefixes:
            return read_small(body, kind, self._session_members)
        began_s = time.perf_counter()
        fields = _parsed(body)
        if time.perf_counter() - began_s > TURN_S:
            # The body is dense, and its chain may take as long once more.
            await asyncio.sleep(0)
        return _noted(fields, body, kind, self._session_members, chain_of(fields, kind))

    async def _in_turns(self, slices: Slices[T]) -> T:
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
                # The lock is kept while the loop runs everybody else once.
                await asyncio.sleep(0)


def read_small(body: bytes, kind: BodyKind, session_members: Sequence[str] = ()) -> ParsedBody:
    """Parse a JSON body in one go; blocks for as long as that takes. Raises BadBody."""
    return _noted(_parsed(body), body, kind, session_members)


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


def _noted(
    fields: dict[str, Any], body: bytes, kind: BodyKind, session_members: Sequence[str], chain: Chain | None = None
) -> ParsedBody:
    sizes = [_measure(name, fields[name]) for name in _TEXT if name in fields]
    sessions = {name: text for name in session_members if (text := _session(fields.get(name))) is not None}
    options = fields.get("stream_options", _ABSENT)
    kept = {name: fields[name] for name in _KEPT if name in fields} if kind is BodyKind.RESPONSES else {}
    guarded: tuple[tuple[str, Member], ...] = ()
    if not GUARDED.isdisjoint(fields):
        guarded = drain(guarded_in(body, drain(scan_every(body, GUARDED))))
    sequences = _sequences(fields, sizes)
    facts = _ask(fields, sizes, kind, sequences)
    return ParsedBody(
        facts, kind, body, options, chain=chain, sessions=sessions, kept=kept, guarded=guarded, sequences=sequences
    )  # fmt: skip


def read_large(
    body: bytes, kind: BodyKind, prefixes: bool = False, session_members: Sequence[str] = ()
) -> Slices[ParsedBody]:
    """Scan a JSON body of any size in slices. Raises BadBody; broken values that nobody here asked for pass."""
    asked = (*_OPTIONS, *_KEPT) if kind is BodyKind.RESPONSES else _OPTIONS
    found = yield from scan_every(body, (*_TEXT, *asked, SALT, *GUARDED, *session_members))
    members = dict(found)
    fields = {name: _option(body, name, members[name]) for name in asked if name in members}
    sizes = [_measure_member(members[name]) for name in _TEXT if name in members]
    sequences = _sequences(fields, sizes)
    facts = _ask(fields, sizes, kind, sequences)
    chain = (yield from chain_of_large(body, members, kind)) if prefixes else None
    texts = ((name, _scanned_session(body, members[name])) for name in session_members if name in members)
    sessions = {name: text for name, text in texts if text is not None}
    kept = {name: fields[name] for name in _KEPT if name in fields}
    guarded = yield from guarded_in(body, found)
    options = fields.get("stream_options", _ABSENT)
    return ParsedBody(facts, kind, body, options, members, chain, sessions, kept, guarded, sequences)


def read_form(body: bytes, content_type: str, session_members: Sequence[str] = ()) -> Slices[ParsedBody]:
    """Find `model` and `stream` in a multipart form. Raises BadBody. A form counts like one sound."""
    found = yield from scan_form(body, content_type, ("model", "stream", *TRANSFER, *session_members))
    for name in TRANSFER:
        if name in found:
            raise BadBody(f"The form field {name} is not taken from clients.", f"body.{name}")
    values = {name: body[member.start : member.end] for name, member in found.items()}
    try:
        model = values.get("model", b"").decode() or None
    except UnicodeDecodeError:
        raise BadBody("The form field model must be UTF-8 text.", "body.model") from None
    said = values.get("stream", b"").decode(errors="replace").strip().lower()
    if said not in _TRUE | _FALSE:
        raise BadBody("The form field stream must be true or false.", "body.stream")
    texts = ((name, _session(values[name].decode(errors="replace"))) for name in session_members if name in values)
    sessions = {name: text for name, text in texts if text is not None}
    return ParsedBody(
        RequestFacts(model, said in _TRUE, MEDIA_BYTES), BodyKind.FORM, body, members=found, sessions=sessions
    )


@dataclass(frozen=True, slots=True)
class _Size:
    """The size of one text member: bytes of text, exact tokens where it is token ids, and how many prompts it holds."""

    text_bytes: int = 0
    tokens: int | None = None
    prompts: int = 1


def _ask(fields: Mapping[str, Any], sizes: list[_Size], kind: BodyKind, sequences: int) -> RequestFacts:
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise BadBody("The model must be a string: the name of a model or an adapter.", "body.model")
    stream = _truth(fields.get("stream"))
    if stream is None and kind is not BodyKind.OTHER:
        raise BadBody("The field stream must be true or false.", "body.stream")
    text_bytes = sum(size.text_bytes for size in sizes)
    tokens = [size.tokens for size in sizes if size.tokens is not None]
    said = next((fields[name] for name in _MAX_TOKENS[kind] if fields.get(name) is not None), None)
    return RequestFacts(
        model=model or None,
        stream=stream is True,
        prompt_bytes=text_bytes,
        prompt_tokens=sum(tokens) if tokens and not text_bytes else None,
        max_tokens=_count(said),
        sequences=min(SEQUENCES_MAX, sequences),
    )


def _sequences(fields: Mapping[str, Any], sizes: list[_Size]) -> int:
    sequences = max([1, *[size.prompts for size in sizes]])
    if "n" in fields or "best_of" in fields:
        sequences *= max(_number(fields.get("n")), _number(fields.get("best_of")))
    return min(ANSWERED_MAX, sequences)


def _truth(value: Any) -> bool | None:
    """The truth value of a JSON value, null being false, as generously as the engine reads it; None for no such."""
    if value is None or isinstance(value, bool):
        return bool(value)
    if isinstance(value, int | float) and value in (0, 1):
        return value == 1
    if isinstance(value, str) and value and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    return None


def _number(value: Any) -> int:
    """A count as the engine reads it, which takes "8" and 8.0 for 8; 1 for what is none."""
    if isinstance(value, str) and len(value) <= _NUMBER_CHARS_MAX:
        try:
            value = float(value)
        except ValueError:
            return 1
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return _count(value) or 1


def _count(value: Any) -> int | None:
    """A positive integer as it is, None for anything else: the engine will complain about it itself."""
    return value if type(value) is int and value > 0 else None


def _measure(name: str, value: Any) -> _Size:
    """The size of a parsed text member."""
    if not isinstance(value, list) or not value:
        return _Size(_text_bytes(value, name == "tools"))
    if type(value[0]) is int:
        return _Size(tokens=len(value))
    if type(value[0]) is list:
        if value[0] and type(value[0][0]) is int:
            return _Size(tokens=sum(len(ids) for ids in value if isinstance(ids, list)), prompts=len(value))
        return _Size(_text_bytes(value, False), prompts=len(value))
    prompts = len(value) if type(value[0]) is str else 1
    return _Size(_text_bytes(value, name == "tools"), prompts=prompts)


def _text_bytes(value: Any, with_names: bool) -> int:
    """UTF-8 bytes of the text in a parsed value, however deep it is nested."""
    total_bytes = 0
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
                    total_bytes += MEDIA_BYTES
                elif name not in _NOT_TEXT:
                    ahead.append(inner)
    return total_bytes


def _string_bytes(text: str) -> int:
    size_bytes = len(text) if text.isascii() else len(text.encode())
    if size_bytes > MEDIA_BYTES and is_media(text[:MEDIA_HEAD_BYTES].encode()):
        return MEDIA_BYTES
    return size_bytes


def _measure_member(member: Member) -> _Size:
    """The size of a scanned text member, from the sums over what lies inside it."""
    if member.kind is not Kind.ARRAY:
        return _Size(member.text_bytes)
    lists = member.arrays - 1
    if not member.strings and not member.objects:
        # Whether flat or in lists, ids are one more than the commas, those between the lists included.
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


def _session(value: Any) -> str | None:
    return value if isinstance(value, str) and 0 < len(value) <= SESSION_CHARS_MAX else None


def _scanned_session(body: bytes, member: Member) -> str | None:
    if member.end - member.start > OPTION_BYTES_MAX:
        return None
    try:
        return _session(orjson.loads(body[member.start : member.end]))
    except orjson.JSONDecodeError:
        return None  # The engine reads the same bytes, and says what is wrong with them.


def _splice(body: bytes, edits: list[_Edit], hides_usage: bool) -> Spliced:
    if not edits:
        return Spliced((body,))
    view = memoryview(body)
    parts: list[bytes | memoryview] = []
    at = 0
    for start, end, new in edits:
        parts += [view[at:start], new]
        at = end
    parts.append(view[at:])
    return Spliced(tuple(parts), hides_usage)
