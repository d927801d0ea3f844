"""The identity of a prompt: a chain of block hashes over its canonical bytes, which prompts with equal starts share.

The *canonical bytes* hold what an engine would tokenise, in the order of a chat template: tools and system, then one
message after the other. A message is its mark, its text, whatever else it has that counts, its role and its name;
nothing depends on what comes later, so the chain of a conversation begins with the chain of every earlier turn of it,
answers included. Text is taken unescaped, so spelling and whitespace of the JSON do not matter, nor whether text comes
as a string or as one part of a list. Images and sounds count by a hash of their bytes. What vLLM drops before it asks
the template is left out: the attribution header of Claude Code, another in each run, which is the first line of a
system text; what tools and messages have for the API alone; empty members and parts. Equal bytes do not prove equal
tokens (a template may look ahead), and need not: the chain predicts, the engine decides.

The *chain* is that of prefix-caching routers, in bytes instead of tokens: hash 0 = H(`cache_salt`), hash n = H(hash
n-1, block n), with XXH64 and the hash before as its seed, over full blocks only. It is the same in every process. A
body is read before it is known what its model's name means, so model and adapter are mixed into the finished hashes.
It guards nothing: who crafts a collision spoils the prediction for prompts of the same model, adapter and salt.

Small bodies come parsed; `prompt_scan` reads large ones in slices, with the same result.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from xxhash import xxh64_digest, xxh64_intdigest

from llmproxy.gateway.http.routes import BodyKind

# About 120 tokens: what a half-matched block hides costs an engine a millisecond. Half of it costs 1.6 times the time.
BLOCK_BYTES = 512
ID_BYTES = array("I").itemsize
"""Of a token that comes as its id."""
# Half a million tokens, more than any engine takes; what follows has no identity and counts as never cached.
BLOCKS_MAX = 4096

# Members of a body that make the prompt, in the order of the canonical bytes. A large body is read from these.
PROMPT_MEMBERS: Mapping[BodyKind, tuple[str, ...]] = {
    BodyKind.CHAT: ("tools", "messages"),
    BodyKind.MESSAGES: ("system", "tools", "messages"),
    BodyKind.RESPONSES: ("instructions", "tools", "input"),
    BodyKind.COMPLETION: ("prompt",),
}
SALT = "cache_salt"
# The engine puts what it stored between the instructions and the input of such a body: nobody here knows it.
PREVIOUS = "previous_response_id"
# Of a text with the role `system`, or of the members above it, the engine drops the line that begins so.
HEADER = "x-anthropic-billing-header"
_HEADER_BYTES = HEADER.encode()

# Bounds the time on a parsed body of nothing but tiny values, to a few milliseconds; a message makes about three.
PIECES_MAX = 10_000
DEPTH_MAX = 8  # Deeper values are taken as they stand; no content goes that deep.
MESSAGE, PART, MEMBER, MEDIUM = b"\x1e", b"\x1d", b"\x1f", b"\x1c"  # What the canonical bytes put before each.
# Members of messages and their parts that hold the text, those that hold an image or a sound, and those that templates
# leave out: what the API needs for itself, and the reasoning of turns gone by.
TEXT = frozenset({"content", "text", "output"})
MEDIA = frozenset(
    {"image_url", "image", "input_audio", "audio_url", "video_url", "image_embeds", "audio_embeds", "source"}
)
# Members whose values are items again: an engine and its clients write those of a tool call in different orders.
CALLS = frozenset({"tool_calls", "function"})
# What is written last, in this order, because clients differ in where they put it.
LAST = ("role", "name")
SKIPPED = frozenset(
    {"type", "id", "tool_call_id", "call_id", "tool_use_id", "cache_control", "status", "detail", "index", "logprobs"}
    | {"reasoning", "reasoning_content", "thinking", "signature", "is_error"}
)
# What a message has beside all these and no engine knows, templates do not see; of a part it may be the content.
MESSAGE_DEPTH = 1
MESSAGE_MEMBERS = frozenset({"arguments", "input", "namespace"})
CACHE_CONTROL = "cache_control"
ROLES = {role: MEMBER + b'role"%b"' % role.encode() for role in ("system", "user", "assistant", "tool", "developer")}


@dataclass(frozen=True, slots=True)
class Chain:
    """The hashes of a prompt's full blocks, and what is needed to go on: the last hash and the bytes of no full block.

    At BLOCKS_MAX blocks a chain is full and stays as it is. `salt` is the one that the proxy puts into the body in the
    place of the client's own, None where it puts none.
    """

    hashes: tuple[int, ...]
    last: int
    tail: bytes = b""
    salt: str | None = None

    def extended(self, text: bytes) -> Chain:
        """The chain of this prompt and `text` after it; equal to that of both in one go. Costs what `text` costs."""
        data = self.tail + text
        blocks = min(len(data) // BLOCK_BYTES, BLOCKS_MAX - len(self.hashes))
        digest, last, hashes = xxh64_intdigest, self.last, []
        for start in range(0, blocks * BLOCK_BYTES, BLOCK_BYTES):
            last = digest(data[start : start + BLOCK_BYTES], last)
            hashes.append(last)
        full = len(self.hashes) + blocks == BLOCKS_MAX
        return Chain((*self.hashes, *hashes), last, b"" if full else data[blocks * BLOCK_BYTES :], self.salt)

    def hashes_on(self, model: str, adapter: str | None) -> tuple[int, ...]:
        """The hashes as `model` and `adapter` have them, who share no cached block with any other, nor do salts."""
        mark = xxh64_intdigest(orjson.dumps([model, adapter] if self.salt is None else [model, adapter, self.salt]))
        return tuple([block ^ mark for block in self.hashes])


class SystemText:
    """Gives `sink` a text that comes in pieces, less its first line where that is HEADER's."""

    def __init__(self, sink: Callable[[bytes], object]) -> None:
        self._sink = sink
        self._begin: bytes | None = b""
        self._headed = False

    def add(self, piece: bytes) -> None:
        if self._begin is None:
            self._sink(piece)
            return
        self._begin = b"" if self._headed else self._begin
        self._begin += piece
        if self._headed or self._begin.startswith(_HEADER_BYTES):
            self._headed = True
            _, found, rest = self._begin.partition(b"\n")
            if found:
                self._begin = None
                self._sink(rest)
        elif not _HEADER_BYTES.startswith(self._begin):
            self.end()

    def end(self) -> None:
        """There is no more of it."""
        begin, self._begin = self._begin, None
        if begin is not None and not self._headed:
            self._sink(begin)


class _DenseError(Exception):
    """A body has more pieces than anybody writes."""


def chain_of(fields: Mapping[str, Any], kind: BodyKind) -> Chain:
    """The chain of a body as orjson parsed it. An endpoint without a prompt has an empty chain; bad values pass.

    It ends early after PIECES_MAX pieces.
    """
    out: list[bytes] = []
    try:
        for name in PROMPT_MEMBERS.get(kind, ()):
            if name == "input" and fields.get(PREVIOUS) is not None:
                break
            value = fields.get(name)
            if value not in (None, "", [], {}):
                _member(out, name, value)
    except orjson.JSONEncodeError:
        out = []
    except _DenseError:
        pass
    return empty_chain(fields.get(SALT)).extended(b"".join(out))


def answer_bytes(answer: Any, kind: BodyKind) -> bytes:
    """The canonical bytes of an answer, which extend the chain of its prompt to that of the next turn's start.

    `answer` is what the client will send back: the message of a chat choice, the `content` list of an Anthropic
    message, the `output` list of a response; of a completion the text, to which the next prompt only adds. Nothing
    where the prompt of such a turn would end early.
    """
    out: list[bytes] = []
    try:
        if kind is BodyKind.COMPLETION:
            _content(out, answer, 0)
        elif kind is BodyKind.MESSAGES:
            _messages(out, [{"role": "assistant", "content": answer}])
        else:
            _messages(out, answer if isinstance(answer, list) else [answer])
    except (orjson.JSONEncodeError, _DenseError):
        return b""
    return b"".join(out)


def empty_chain(salt: Any) -> Chain:
    """The chain of nothing, for a body with this `cache_salt`; one that is no string the engine refuses."""
    return Chain((), xxh64_intdigest(salt.encode() if isinstance(salt, str) else b""))


def _member(out: list[bytes], name: str, value: Any) -> None:
    if name == "tools":
        if type(value) is list and [tool for tool in value if type(tool) is dict and CACHE_CONTROL in tool]:
            value = [_tool(tool) for tool in value]
        out.append(MEMBER + orjson.dumps(value))
    elif name == "prompt":
        _prompt(out, value)
    elif name in ("messages", "input"):
        _messages(out, value)
    else:
        out.append(MEMBER)
        # The blocks of a `system` are one text to the engine.
        for block in value if type(value) is list else [value]:
            _content(out, block, 1, system=True)


def _tool(tool: Any) -> Any:
    """A tool without what it has for the API."""
    if type(tool) is not dict:
        return tool
    return {name: value for name, value in tool.items() if name != CACHE_CONTROL}


def _prompt(out: list[bytes], value: Any) -> None:
    """A prompt of a completion: text, token ids, or the first of a list of such."""
    first = value[0] if isinstance(value, list) and value else value
    if type(first) is int:
        first = value
    if isinstance(first, str):
        out.append(first.encode())
    elif isinstance(first, list):
        out.append(_ids(first))


def _messages(out: list[bytes], value: Any) -> None:
    for message in value if isinstance(value, list) else [{"content": value, "role": "user"}]:
        out.append(MESSAGE)
        _content(out, message, 1)


def _content(out: list[bytes], value: Any, depth: int, system: bool = False) -> None:
    if len(out) > PIECES_MAX:
        raise _DenseError
    if type(value) is str:
        if system and value.startswith(HEADER):
            value = value.partition("\n")[2]
        out.append(value.encode())
    elif depth == DEPTH_MAX and type(value) in (list, dict):
        out.append(MEMBER + orjson.dumps(value))
    elif type(value) is dict:
        _item(out, value, depth, system)
    elif type(value) is list:
        out.append(b"")  # It takes time like any other piece.
        if len(value) == 1:
            _content(out, value[0], depth + 1, system)
            return
        between = b""
        for part in value:
            at = len(out)
            out.append(between)
            _content(out, part, depth + 1, system)
            if any(out[at + 1 :]):
                between = PART
            else:
                out[at] = b""


def _item(out: list[bytes], item: dict[str, Any], depth: int, system: bool) -> None:
    """One message, one part of its content, or one of its tool calls."""
    last = dict.fromkeys(LAST, b"")
    for name, value in item.items():
        if len(out) > PIECES_MAX:
            raise _DenseError
        if name in TEXT:
            _content(out, value, depth + 1, system)
        elif name in SKIPPED or value is None or value == [] or value == {}:
            continue
        elif name in MEDIA:
            out += (MEDIUM, xxh64_digest(orjson.dumps(value)))
        elif name in last:
            if name == "role" and type(value) is str and value in ROLES:
                # Said behind the content, as no client does, it comes too late here.
                last[name], system = ROLES[value], value == "system"
            else:
                last[name] = MEMBER + name.encode() + orjson.dumps(value)
        elif name in CALLS:
            out.append(MEMBER + name.encode())
            _content(out, value, depth + 1)
        elif depth != MESSAGE_DEPTH or name in MESSAGE_MEMBERS:
            # What orjson returns is copied: to keep thousands of its shrunken buffers is slow, twenty times over.
            out.append(MEMBER + name.encode() + orjson.dumps(value))
    out.append(b"".join(last.values()))


def _ids(ids: list[Any]) -> bytes:
    try:
        return array("I", ids).tobytes()
    except (TypeError, OverflowError):
        return b""  # No token ids: the engine will refuse the body.
