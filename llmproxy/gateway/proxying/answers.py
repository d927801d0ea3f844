"""Captures answers, for the index of cached prefixes and for the rest of a stream that breaks.

The next request of a conversation repeats the answer. After an answer, the prefix cache of the backend contains the
blocks of the prompt and of the answer. This module reads the answer, so that the index knows these blocks before the
next request comes. It reads the message that a client will send back: the first choice, joined from the events of a
stream. An answer after reasoning is skipped: chat templates drop earlier reasoning, so the next prompt does not match
the cached blocks.

A captured answer costs a reference to each of its chunks. It is parsed after its lease has been returned and its exit
recorded, in short steps between other work of the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson

from llmproxy.core.domain import Grant
from llmproxy.gateway.http.routes import BodyKind
from llmproxy.gateway.request.body_reader import TURN_S, parses_at_once
from llmproxy.gateway.request.json_scan import Slices
from llmproxy.gateway.request.parsed_body import ParsedBody
from llmproxy.gateway.request.prefix_hash import BLOCKS_MAX, PROMPT_MEMBERS, Chain, answer_bytes

ANSWER_BYTES_MAX = 1 << 20
"""The maximum size of a captured answer: 5,000 tokens of a chat stream.

A larger answer is neither indexed nor continued. The maximum takes 10 ms to parse, in steps of 2 ms.
"""
CAPTURED_BYTES_MAX = 64 << 20  # The maximum size of all captured answers together. Further bytes drop their answer.

EVENTS_BYTES = 4096  # About how many bytes of a stream's events are parsed in one call.

_RESPONSE_ENDS = frozenset({"response.completed", "response.incomplete"})


class CapturedAnswer:
    """A copy of the bytes of one answer. Further bytes are ignored after `drop`.

    `chain` is the hash chain of the prompt; None for an answer that cannot be indexed. `chunks` is None after `drop`,
    which `add` calls if the answer is too large.
    """

    __slots__ = ("_answers", "_bytes", "chain", "chunks", "kind")

    def __init__(self, answers: Answers, chain: Chain | None, kind: BodyKind) -> None:
        self._answers = answers
        self._bytes = 0
        self.chain = chain
        self.kind = kind
        self.chunks: list[bytes] | None = []

    def add(self, data: bytes) -> None:
        """Adds the next bytes of the answer. Drops the answer if it exceeds ANSWER_BYTES_MAX or CAPTURED_BYTES_MAX."""
        if self.chunks is None:
            return
        self.chunks.append(data)
        self._bytes += len(data)
        self._answers.captured_bytes += len(data)
        if self._bytes > ANSWER_BYTES_MAX or self._answers.captured_bytes > CAPTURED_BYTES_MAX:
            self.drop()

    def drop(self) -> None:
        """Discards the bytes. Later bytes are ignored."""
        self._answers.captured_bytes -= self._bytes
        self._bytes = 0
        self.chunks = None


class Answers:
    """Captures the answers of one event loop, and hashes complete answers.

    `on_read` gets the pool, the lease id, the backend, and the block hashes of prompt and answer together, in the form
    of `Request.prefix`. It is called later from the event loop, never within a call of a method. Without `on_read`, no
    answer is hashed.
    """

    def __init__(self, on_read: Callable[[str, int, str, Sequence[int]], None] | None) -> None:
        self._on_read = on_read
        self._due: deque[tuple[CapturedAnswer, Slices[None]]] = deque()
        self.captured_bytes = 0

    def capture(self, parsed: ParsedBody, continues: bool = False) -> CapturedAnswer | None:
        """Begins to capture the answer to `parsed`. Returns None if the answer is not needed.

        An answer is needed if another backend may continue its stream (`continues`), or if a later prompt can match it.
        No later prompt matches if the request has several choices or prompts (it is unknown which choice the client
        sends back), if its prompt is token ids (the answer is text), or if its prompt already has BLOCKS_MAX hashes of
        blocks.
        """
        chain = parsed.chain
        if (
            chain is None or self._on_read is None or parsed.kind not in PROMPT_MEMBERS or parsed.sequences > 1
            or parsed.prompt_tokens is not None or len(chain.hashes) == BLOCKS_MAX
        ):  # fmt: skip
            chain = None
        return CapturedAnswer(self, chain, parsed.kind) if continues or chain is not None else None

    def finish(self, captured: CapturedAnswer, grant: Grant | None) -> None:
        """Hashes an answer that was completed under `grant`; None drops the answer. Call this once for each answer."""
        if grant is None or not captured.chunks or captured.chain is None:
            captured.drop()
            return
        self._due.append((captured, self._read(captured.chain, captured.kind, captured.chunks, grant)))
        if len(self._due) == 1:
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        loop, until_s = asyncio.get_running_loop(), time.perf_counter() + TURN_S
        while self._due:
            captured, slices = self._due[0]
            try:
                next(slices)
            except StopIteration:
                self._due.popleft()
                captured.drop()
            except Exception as error:  # noqa: BLE001 - the request was served, and must not fail for this
                self._due.popleft()
                captured.drop()
                loop.call_exception_handler({"message": "an answer could not be indexed", "exception": error})
            if time.perf_counter() >= until_s:
                break
        if self._due:
            loop.call_soon(self._turn)

    def _read(self, prompt: Chain, kind: BodyKind, chunks: Sequence[bytes], grant: Grant) -> Slices[None]:
        answer = yield from parse_answer(b"".join(chunks), kind)
        if answer is None:
            return
        text = answer_bytes(answer, kind)
        yield
        chain = prompt.extended(text)
        if len(chain.hashes) > len(prompt.hashes) and self._on_read is not None:
            yield
            hashes = chain.hashes_on(grant.request.model, grant.request.adapter)
            self._on_read(grant.request.pool, grant.lease, grant.placed.backend, hashes)


class _UnreadError(Exception):
    """The answer cannot be continued by a later prompt, or would take too long to parse."""


def parse_answer(raw: bytes, kind: BodyKind) -> Slices[Any]:
    """Finds the part of an answer that the client repeats in its next prompt.

    `raw` is a JSON body or an event stream. Yields every few events, so that no step takes more than 2 ms. Returns the
    part in the form for `prefix_hash.answer_bytes`; None if it cannot be determined.
    """
    try:
        if raw.lstrip().startswith(b"{"):
            return _of_body(_parsed(raw), kind)
        return (yield from _STREAMS[kind](raw))
    except (_UnreadError, ValueError, LookupError, TypeError, AttributeError):
        return None  # The answer has an unknown shape.


def _parsed(data: bytes) -> Any:
    if not parses_at_once(data):
        raise _UnreadError
    return orjson.loads(data)


def _of_body(fields: dict[str, Any], kind: BodyKind) -> Any:
    if kind is BodyKind.MESSAGES:
        return _only_types(fields["content"], "text", "tool_use")
    if kind is BodyKind.RESPONSES:
        return _only_types(fields["output"], "message", "function_call")
    choice = fields["choices"][0]
    return choice["text"] if kind is BodyKind.COMPLETION else _unreasoned(choice["message"])


def _only_types(items: list[dict[str, Any]], *types: str) -> list[dict[str, Any]]:
    if any(item["type"] not in types for item in items):
        raise _UnreadError
    return items


def _unreasoned(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("reasoning") or message.get("reasoning_content"):
        raise _UnreadError
    return message


def parsed_events(raw: bytes) -> Iterator[list[Any]]:
    """Yields the parsed JSON data of several events at a time.

    This costs a third of parsing each event by itself. Expects the data of an event in one line, as engines write it.
    Leaves out the end mark.
    """
    lines = [line[5:].strip() for line in raw.split(b"\n") if line.startswith(b"data:")]
    if lines and lines[-1] == b"[DONE]":
        lines.pop()
    start, size_bytes = 0, 0
    for end, line in enumerate(lines, 1):
        size_bytes += len(line)
        if size_bytes >= EVENTS_BYTES or end == len(lines):
            yield _parsed(b"[%b]" % b",".join(lines[start:end]))
            start, size_bytes = end, 0


def _chat(raw: bytes) -> Slices[dict[str, Any]]:
    content: list[str] = []
    calls: dict[int, tuple[list[str], list[str]]] = {}
    for events in parsed_events(raw):
        for choice in [choice for event in events for choice in event["choices"]]:
            delta = _unreasoned(choice["delta"])
            content.append(delta.get("content") or "")
            for part in delta.get("tool_calls") or ():
                name, arguments = calls.setdefault(part["index"], ([], []))
                name.append(part["function"].get("name") or "")
                arguments.append(part["function"].get("arguments") or "")
        yield
    functions = [
        {"name": "".join(name), "arguments": "".join(arguments)} for _, (name, arguments) in sorted(calls.items())
    ]
    tool_calls = [{"function": function} for function in functions]
    return {"content": "".join(content), "tool_calls": tool_calls, "role": "assistant"}


def _completion(raw: bytes) -> Slices[str]:
    text: list[str] = []
    for events in parsed_events(raw):
        text += [choice["text"] for event in events for choice in event["choices"]]
        yield
    return "".join(text)


def _message(raw: bytes) -> Slices[list[dict[str, Any]]]:
    blocks: dict[int, dict[str, Any]] = {}
    grown: dict[int, list[str]] = {}
    for events in parsed_events(raw):
        for event in events:
            if event["type"] == "content_block_start":
                blocks[event["index"]], grown[event["index"]] = event["content_block"], []
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                grown[event["index"]].append(delta["text"] if delta["type"] == "text_delta" else delta["partial_json"])
        yield
    for at, block in blocks.items():
        more = "".join(grown[at])
        if block["type"] == "text":
            block["text"] += more
        elif more:
            block["input"] = orjson.loads(more)
    return _only_types([blocks[at] for at in sorted(blocks)], "text", "tool_use")


def _response(raw: bytes) -> Slices[Any]:
    """Parses the last event only, because it contains the whole answer."""
    yield
    event = _parsed(raw[raw.rindex(b"\ndata:") + 6 :])
    if event["type"] not in _RESPONSE_ENDS:
        raise _UnreadError
    return _of_body(event["response"], BodyKind.RESPONSES)


_STREAMS: dict[BodyKind, Callable[[bytes], Slices[Any]]] = {
    BodyKind.CHAT: _chat,
    BodyKind.COMPLETION: _completion,
    BodyKind.MESSAGES: _message,
    BodyKind.RESPONSES: _response,
}
