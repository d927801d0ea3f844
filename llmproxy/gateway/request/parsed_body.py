"""A parsed request body, and the edits to its bytes before they go to a backend.

A body is never serialised again. A change, such as the model behind an alias or the usage option of a stream, is
spliced into the bytes that the client sent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from llmproxy.core.domain import RequestFacts
from llmproxy.gateway.http.routes import BodyKind
from llmproxy.gateway.request.json_scan import BadBody, Kind, Member, Slices, drain, scan_every, scan_members
from llmproxy.gateway.request.prefix_hash import PREVIOUS, SALT, Chain

KV_TRANSFER = "kv_transfer_params"
TRANSFER = (KV_TRANSFER, "ec_transfer_params")
"""Members that are not taken from clients. They make an engine read or keep a KV cache for another engine, or crash."""
_SAMPLING = "sampling_params"
_SAMPLING_LIMIT = f"{_SAMPLING}.max_tokens"
# Member with arguments for the engine -> path to an object in it. TRANSFER members count in the member and the object.
ARGUMENTS = {"vllm_xargs": (), _SAMPLING: ("extra_args",)}
PRIORITY = "priority"
GUARDED = frozenset({*TRANSFER, *ARGUMENTS, PRIORITY})
"""Members that can change the work of an engine for other requests. The proxy checks, replaces or refuses them."""
# Members of a `/v1/responses` body: the id of the new response, and whether the engine stores the response.
REQUEST_ID, STORE = "request_id", "store"
RESPONSE_MEMBERS = (PREVIOUS, REQUEST_ID, STORE)

LIMITS: dict[BodyKind, tuple[str, ...]] = {
    BodyKind.CHAT: ("max_completion_tokens", "max_tokens"),
    BodyKind.COMPLETION: ("max_tokens",),
    BodyKind.RESPONSES: ("max_output_tokens",),
    BodyKind.MESSAGES: ("max_tokens",),
    BodyKind.OTHER: ("max_completion_tokens", "max_tokens"),
}
"""The members that limit the tokens of an answer.

The order is the engine's, which uses the first member that is present and not null.
"""
PROMPT_ALONE = {"stream": b"false", "stream_options": b"null", "min_tokens": b"0", STORE: b"false"}
"""The members that the proxy sets in the body of a prefill call, and their JSON values.

Such a call asks for one token without a stream, and the engine stores no response.
"""

ABSENT = object()
_USAGE_ON = b'"include_usage":true'
TRUE = frozenset({"true", "1", "on", "yes", "t", "y"})
FALSE = frozenset({"false", "0", "off", "no", "f", "n", ""})
_CLOSES = re.compile(rb"\s*\}")
_PRIORITISED = frozenset({BodyKind.CHAT, BodyKind.COMPLETION, BodyKind.RESPONSES})

Edit = tuple[int, int, bytes]  # A change of a body: the start and the end of the replaced bytes, and the new bytes.


@dataclass(frozen=True, slots=True)
class Spliced:
    """A body to send, as pieces in order. The client's bytes are not copied."""

    parts: tuple[bytes | memoryview, ...]
    # Whether the proxy, and not the client, asked the engine for a usage event.
    hides_usage: bool = False


class ParsedBody(RequestFacts, frozen=True, kw_only=True):
    """The properties of one body that scheduling needs, and its bytes."""

    kind: BodyKind
    body: bytes
    stream_options: Any = ABSENT
    # Top-level member name -> its value's position. None for a small body with few members, which is scanned only when
    # a change needs it.
    members: Mapping[str, Member] | None = None
    # The hash chain of the prompt; None if no chain was computed.
    chain: Chain | None = None
    # Member name -> text, for members that name a session.
    sessions: Mapping[str, str] = {}
    # The RESPONSE_MEMBERS of a `/v1/responses` body.
    response_members: Mapping[str, Any] = {}
    # Every transfer parameter and priority, repeated names included.
    guarded: tuple[tuple[str, Member], ...] = ()
    # The number of sequences that the client asks for. `sequences` is at most SEQUENCES_MAX, this number is not.
    sequences_asked: int = 1
    # Whether one engine may compute the prompt and another engine the answer.
    splittable: bool = False
    # The limit for the tokens of the answer that the proxy writes into the body; None for no change.
    written_limit: int | None = None

    def __repr__(self) -> str:
        # Without the text of the prompt.
        return f"<ParsedBody {self.kind.name} model={self.model!r} bytes={len(self.body)}>"

    @property
    def stores(self) -> bool:
        """Whether the engine may store the response to this request. An absent `store` means that it may."""
        return as_bool(self.response_members.get(STORE, True)) is True

    def text(self, name: str) -> str | None:
        """Returns the text of the top-level member `name`; None if the member is missing or no text."""
        member = self._member(name)
        if member is None or member.kind is not Kind.STRING:
            return None
        try:
            return str(orjson.loads(self.body[member.start : member.end]))
        except orjson.JSONDecodeError:
            return None  # The engine reads the same bytes and reports the error.

    def has(self, name: str) -> bool:
        """Returns whether there is a top-level member `name`.

        In a large body, only members that the reader looked for are found.
        """
        return self._member(name) is not None

    def answer_limits(self) -> list[tuple[str, bytes]]:
        """Returns the names and JSON values of the members that limit the answer.

        The result has at most one member, the effective limit. For a body of kind OTHER it has all of them, because it
        is unknown which one is effective.
        """
        names, members = LIMITS[self.kind], self.members
        if members is None:
            found = drain(scan_members(self.body, (*names, _SAMPLING)))
            members = drain(with_sampling_limit(self.body, found))
        given = [(name, self.body[members[name].start : members[name].end]) for name in names if name in members]
        given = [(name, value) for name, value in given if value != b"null"]
        if self.kind is not BodyKind.OTHER:
            return given[:1]
        inner = members.get(_SAMPLING_LIMIT)
        return given if inner is None else [*given, (_SAMPLING_LIMIT, self.body[inner.start : inner.end])]

    def spliced(
        self,
        *,
        model: str | None = None,
        want_usage: bool = False,
        priority: int | None = None,
        salt: str | None = None,
        trusted: bool = True,
        transfer: bytes | None = None,
        prompt_alone: bool = False,
    ) -> Spliced:
        """Returns the body with the changes below. Every transfer parameter of the client becomes null.

        `model` replaces the model name; a body without a model name gets none. `want_usage` asks for usage in chat and
        completion streams whose client did not ask for it. `priority` is the engine's priority; lower goes first. It
        replaces the client's priority if the endpoint has such a field. Otherwise, also without `priority`, the
        priority of a client that is not `trusted` becomes 0, the default. `salt` replaces `cache_salt`. `transfer` is
        the JSON value of the proxy's `kv_transfer_params`. `prompt_alone` asks for the prompt and one token, without a
        stream.
        """
        if not self.body:
            return Spliced(())
        params = dict.fromkeys(TRANSFER, b"null") | ({} if transfer is None else {KV_TRANSFER: transfer})
        edits: list[Edit] = []
        given: list[Member] = []
        for name, one in self.guarded:
            if name in params:
                edits.append((one.start, one.end, params[name]))
            elif name == PRIORITY:
                given.append(one)
        added: list[bytes] = []
        if transfer is not None and all(name != KV_TRANSFER for name, _ in self.guarded):
            added.append(b'"' + KV_TRANSFER.encode() + b'":' + transfer)
        if prompt_alone:
            self._alone(edits, added)
        if model is not None and model != self.model and self.model is not None:
            self._set("model", model.encode() if self.kind is BodyKind.FORM else orjson.dumps(model), edits, added)
        usage = self._usage_option() if want_usage and not prompt_alone else None
        if usage is not None and self.stream_options is ABSENT:
            added.append(b'"stream_options":' + usage)
        elif usage is not None:
            self._set("stream_options", usage, edits, added)
        own = str(priority).encode() if priority is not None and self.kind in _PRIORITISED else None
        if own is not None or not trusted:
            edits += [(member.start, member.end, own or b"0") for member in given]
        if own is not None and not given:
            added.append(b'"priority":' + own)
        if self.written_limit is not None and not prompt_alone:
            self._set(LIMITS[self.kind][-1], str(self.written_limit).encode(), edits, added)
        if salt is not None:
            self._set(SALT, orjson.dumps(salt), edits, added)
        if added:
            start = self.body.index(b"{") + 1
            # A streaming body has the member `stream`, so it is not empty.
            last = b"" if not self.stream and _CLOSES.match(self.body, start) else b","
            edits.append((start, start, b",".join(added) + last))
        return Spliced(spliced(self.body, sorted(edits)), usage is not None)

    def _alone(self, edits: list[Edit], added: list[bytes]) -> None:
        """Adds the changes of a prefill call: one token, no stream, nothing stored."""
        limits = LIMITS[self.kind]
        members = drain(scan_members(self.body, (*PROMPT_ALONE, *limits))) if self.members is None else self.members
        asked = PROMPT_ALONE | dict.fromkeys(limits, b"1")
        edits += [(members[name].start, members[name].end, new) for name, new in asked.items() if name in members]
        if self.kind is BodyKind.RESPONSES and STORE not in members:
            added.append(b'"' + STORE.encode() + b'":false')
        if not any(name in members for name in limits):
            added.append(b'"' + limits[-1].encode() + b'":1')

    def _usage_option(self) -> bytes | None:
        """Returns the `stream_options` that ask for usage; None if the body needs no change."""
        if not self.stream or self.kind not in (BodyKind.CHAT, BodyKind.COMPLETION):
            return None
        options = self.stream_options
        if options is ABSENT or options is None:
            return b"{" + _USAGE_ON + b"}"
        if not isinstance(options, dict) or as_bool(options.get("include_usage")) is not False:
            return None
        asked = options | {"include_usage": True}
        if "continuous_usage_stats" in options:
            # The client's option had no effect without usage. Now the engine would put usage on every event.
            asked["continuous_usage_stats"] = False
        return orjson.dumps(asked)

    def _set(self, name: str, value: bytes, edits: list[Edit], added: list[bytes]) -> None:
        """Adds the change that sets the top-level member `name` to the JSON `value`."""
        found = self._member(name)
        if found is None:
            added.append(b'"' + name.encode() + b'":' + value)
        else:
            edits.append((found.start, found.end, value))

    def _member(self, name: str) -> Member | None:
        members = drain(scan_members(self.body, (name,))) if self.members is None else self.members
        return members.get(name)


def spliced(body: bytes, edits: list[Edit]) -> tuple[bytes | memoryview, ...]:
    """Returns the pieces of `body` with these changes, which must be in order and must not overlap."""
    if not edits:
        return (body,)
    view = memoryview(body)
    parts: list[bytes | memoryview] = []
    at = 0
    for start, end, new in edits:
        parts += [view[at:start], new]
        at = end
    parts.append(view[at:])
    return tuple(parts)


def with_sampling_limit(body: bytes, members: dict[str, Member]) -> Slices[dict[str, Member]]:
    """Adds the inner member `sampling_params.max_tokens` to the top-level `members`, and returns them."""
    outer = members.get(_SAMPLING)
    if outer is not None and outer.kind is Kind.OBJECT:
        inner = yield from scan_members(body[outer.start : outer.end], ("max_tokens",))
        for limit in inner.values():
            limit.start, limit.end = outer.start + limit.start, outer.start + limit.end
            members[_SAMPLING_LIMIT] = limit
    return members


def guarded_members(body: bytes, found: list[tuple[str, Member]]) -> Slices[tuple[tuple[str, Member], ...]]:
    """Returns the transfer parameters and priorities in `found`.

    Raises BadBody if the arguments for the engine in `found` contain transfer parameters.
    """
    for name, member in found:
        if name in ARGUMENTS:
            yield from _check_arguments(body[member.start : member.end], name, *ARGUMENTS[name])
    return tuple((name, member) for name, member in found if name in TRANSFER or name == PRIORITY)


def _check_arguments(value: bytes, name: str, *path: str) -> Slices[None]:
    """Raises BadBody if `value`, the JSON value of `name`, or the object at `path` in it has transfer parameters."""
    if not value.startswith(b"{"):
        return
    for inner, member in (yield from scan_every(value, path[:1] or TRANSFER)):
        if inner in TRANSFER:
            raise BadBody(f"The field {name}.{inner} is not taken from clients.", f"body.{name}.{inner}")
        yield from _check_arguments(value[member.start : member.end], f"{name}.{inner}", *path[1:])


def as_bool(value: Any) -> bool | None:
    """Returns a JSON value as the engine reads a boolean: null is false, `"yes"` and 1 are true.

    Returns None for a value that the engine rejects.
    """
    if value is None or isinstance(value, bool):
        return bool(value)
    if isinstance(value, int | float) and value in (0, 1):
        return value == 1
    if isinstance(value, str) and value and value.lower() in TRUE | FALSE:
        return value.lower() in TRUE
    return None
