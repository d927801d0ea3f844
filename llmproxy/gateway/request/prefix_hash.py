"""Identifies a prompt by a chain of block hashes over its canonical bytes. Prompts with the same start share hashes.

The *canonical bytes* contain the text that an engine would tokenise, in the order of a chat template: tools and system,
then one message after the other, each with its text, its other relevant members, its role and its name. No byte depends
on later content, so the chain of a conversation begins with the chain of every earlier request, answers included. Text
is unescaped, so the spelling and whitespace of the JSON do not matter. A list with one text part equals the text.
Images and sounds count by a hash of their bytes. Content that vLLM drops before it applies the template is left out,
such as the attribution header of Claude Code (the first line of a system text, different in each run). Equal bytes do
not prove equal tokens, because a template may look ahead. The chain is only a prediction.

The *chain* is computed as in prefix-caching routers, over bytes instead of tokens: hash 0 = H(`cache_salt`), hash n =
H(hash n-1, block n), with XXH64 and the previous hash as its seed, over full blocks only. The chain is the same in
every process. A body is read before its model name is resolved, so model and adapter are mixed into the finished
hashes. A crafted collision only spoils predictions for the same model, adapter and salt.

This module reads parsed bodies; `prefix_hash_large` reads large bodies in slices, with the same result.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import orjson
from msgspec import Struct
from xxhash import xxh64_digest, xxh64_intdigest

from llmproxy.gateway.http.routes import BodyKind

# The length of a hashed block: about 120 tokens, which an engine prefills in a millisecond. Blocks of half the size
# take 1.6 times as long to hash.
BLOCK_BYTES = 512
ID_BYTES = array("I").itemsize  # Bytes of one token id in the canonical bytes.
# The maximum number of blocks in a chain: half a million tokens, more than engines take. The rest of a longer prompt
# has no hashes and counts as not cached.
BLOCKS_MAX = 4096

# The members of a body that make up the prompt, in the order of the canonical bytes.
PROMPT_MEMBERS: Mapping[BodyKind, tuple[str, ...]] = {
    BodyKind.CHAT: ("tools", "messages"),
    BodyKind.MESSAGES: ("system", "tools", "messages"),
    BodyKind.RESPONSES: ("instructions", "tools", "input"),
    BodyKind.COMPLETION: ("prompt",),
}
SALT = "cache_salt"
# The member of a `/v1/responses` body that names a stored conversation. The engine inserts that conversation, which the
# proxy does not know, between the instructions and the input.
PREVIOUS = "previous_response_id"
# The beginning of a line that the engine drops if it is the first line of a system text.
HEADER = "x-anthropic-billing-header"
_HEADER_BYTES = HEADER.encode()

# The chain of a parsed body ends after this many pieces, so that a body of tiny values takes only a few milliseconds. A
# message makes about three pieces.
PIECES_MAX = 10_000
DEPTH_MAX = 8  # A value at this depth of a message is hashed as JSON; no real content is that deep.
MESSAGE, PART, MEMBER, MEDIUM = b"\x1e", b"\x1d", b"\x1f", b"\x1c"
"""The byte before each message, each further part of a content, each other member, and each image or sound."""
# Members of messages and their parts: TEXT, MEDIA (an image or a sound), and SKIPPED, which templates leave out
# (members for the API, and the reasoning of earlier turns).
TEXT = frozenset({"content", "text", "output"})
MEDIA = frozenset(
    {"image_url", "image", "input_audio", "audio_url", "video_url", "image_embeds", "audio_embeds", "source"}
)
# Members with tool calls (see `_item`). Engines and clients write the members of a tool call in different orders.
CALLS = frozenset({"tool_calls", "function"})
# Members that are written last, in this order, because clients put them in different places.
LAST = ("role", "name")
SKIPPED = frozenset(
    {"type", "id", "tool_call_id", "call_id", "tool_use_id", "cache_control", "status", "detail", "index", "logprobs"}
    | {"reasoning", "reasoning_content", "thinking", "signature", "is_error"}
)
# The depth of a message itself, where only MESSAGE_MEMBERS count in addition to text, media and calls: templates see no
# other members. Other members of a part may be its content.
MESSAGE_DEPTH = 1
MESSAGE_MEMBERS = frozenset({"arguments", "input", "namespace"})
CACHE_CONTROL = "cache_control"
ROLES = {role: MEMBER + b'role"%b"' % role.encode() for role in ("system", "user", "assistant", "tool", "developer")}


class Chain(Struct, frozen=True):
    """The hash chain of a prompt. A chain of BLOCKS_MAX blocks is full and does not change."""

    # The hashes of the full blocks, without model and adapter (see `hashes_on`).
    hashes: tuple[int, ...]
    # The last hash, and in `tail` the bytes after the last full block. The chain continues from both.
    last: int
    tail: bytes = b""
    # The proxy's salt that replaces the client's salt in the body; None if the proxy sets no salt.
    salt: str | None = None

    def extended(self, text: bytes) -> Chain:
        """Returns the chain of this prompt followed by `text`. The cost depends only on the length of `text`."""
        data = self.tail + text
        blocks = min(len(data) // BLOCK_BYTES, BLOCKS_MAX - len(self.hashes))
        digest, last, hashes = xxh64_intdigest, self.last, []
        for start in range(0, blocks * BLOCK_BYTES, BLOCK_BYTES):
            last = digest(data[start : start + BLOCK_BYTES], last)
            hashes.append(last)
        full = len(self.hashes) + blocks == BLOCKS_MAX
        return Chain((*self.hashes, *hashes), last, b"" if full else data[blocks * BLOCK_BYTES :], self.salt)

    def hashes_on(self, model: str, adapter: str | None) -> tuple[int, ...]:
        """Returns the block hashes for `model` and `adapter` (None: no adapter).

        Different models, adapters or salts share no hash.
        """
        if not self.hashes:
            return ()
        mark = xxh64_intdigest(orjson.dumps([model, adapter] if self.salt is None else [model, adapter, self.salt]))
        return tuple([block ^ mark for block in self.hashes])


class SystemText:
    """Passes a system text that arrives in pieces to `sink`, without a first line that begins with HEADER.

    Call `end` after the last piece.
    """

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
        begin, self._begin = self._begin, None
        if begin is not None and not self._headed:
            self._sink(begin)


class _DenseError(Exception):
    """A body has more than PIECES_MAX pieces."""


def prompt_chain(fields: Mapping[str, Any], kind: BodyKind) -> Chain:
    """Returns the chain of a parsed body; empty for an endpoint without a prompt.

    Invalid values raise nothing: the engine reports them. The chain ends early after PIECES_MAX pieces.
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
    """Returns the canonical bytes of an answer.

    The next prompt of a conversation begins with the previous prompt and these bytes. `answer` is the part that the
    client will send back: the message of a chat choice, the `content` list of an Anthropic message, the `output` list
    of a response, or the text of a completion. Empty if the answer has more than PIECES_MAX pieces or cannot be
    encoded.
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
    """Returns a chain without blocks for a body with this `cache_salt`.

    A salt that is not a string counts as absent.
    """
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
        # The engine joins the blocks of a `system` to one text.
        for block in value if type(value) is list else [value]:
            _content(out, block, 1, system=True)


def _tool(tool: Any) -> Any:
    """Returns a tool without `cache_control`, which vLLM ignores."""
    if type(tool) is not dict:
        return tool
    return {name: value for name, value in tool.items() if name != CACHE_CONTROL}


def _prompt(out: list[bytes], value: Any) -> None:
    """Adds a prompt of a completion: text, token ids, or the first prompt of a list."""
    first = value[0] if isinstance(value, list) and value else value
    if type(first) is int:
        first = value
    if isinstance(first, str):
        out.append(first.encode())
    elif isinstance(first, list):
        with suppress(TypeError, OverflowError):
            out.append(id_bytes(first))


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
        out.append(b"")  # Counts as a piece, because it takes as much time.
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
    """Adds a message, a part of its content, or a tool call."""
    last = dict.fromkeys(LAST, b"")
    for name, value in item.items():
        if len(out) > PIECES_MAX:
            raise _DenseError
        if name in TEXT and type(value) is str and not system:
            # Most content is one text.
            out.append(value.encode())
        elif name in TEXT:
            _content(out, value, depth + 1, system)
        elif name in SKIPPED or value is None or value == [] or value == {}:
            continue
        elif name in MEDIA:
            out += (MEDIUM, xxh64_digest(orjson.dumps(value)))
        elif name in last:
            if name == "role" and type(value) is str and value in ROLES:
                # A role after the content, which no client sends, comes too late to mark the content as system text.
                last[name], system = ROLES[value], value == "system"
            else:
                last[name] = MEMBER + name.encode() + orjson.dumps(value)
        elif name in CALLS:
            out.append(MEMBER + name.encode())
            _content(out, value, depth + 1)
        elif depth != MESSAGE_DEPTH or name in MESSAGE_MEMBERS:
            # Copies the output of orjson: keeping thousands of its oversized buffers is twenty times slower.
            out.append(MEMBER + name.encode() + orjson.dumps(value))
    out.append(b"".join(last.values()))


def id_bytes(ids: list[Any]) -> bytes:
    """Returns the canonical bytes of token ids.

    Raises TypeError or OverflowError for values that no engine accepts as ids.
    """
    if bool in map(type, ids):
        raise TypeError("an array takes true for 1")
    return array("I", ids).tobytes()
