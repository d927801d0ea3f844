"""Reads a stream of server-sent events while it is relayed: tokens, usage, errors, and the end of the stream.

Every chunk of every stream passes through `StreamTap.feed`, so an ordinary token event costs a few searches in C and no
parsing. The bytes stay unchanged, except that the usage event is removed if only the proxy asked for it. With
`holds`, an error event and everything after it are held back.
"""

from __future__ import annotations

import re
from collections.abc import Set
from typing import Any

import orjson

from llmproxy.core.domain import Usage
from llmproxy.gateway.proxying.error_words import ABORT, ABORTED, END_MARK, error_in

BUFFERED_BYTES_MAX = 1024 * 1024
"""The maximum size of an incomplete event, and of held-back events, that a tap buffers.

Longer events are relayed in pieces.
"""
USAGE_TAIL_BYTES = 64 * 1024  # How many of the last bytes of a long event are kept, to read its usage.

_USAGE_BYTES_MAX = 16 * 1024
_MARKS_MAX = 16 * 1024  # About 5 ms of scanning. Long data may follow the usage, such as log probabilities.
_HEAD_BYTES = 256
_TORN_BYTES_MAX = 64  # Overlap of two searches, for a choice that begins in one chunk and continues in the next.
_ORDINARY = b'data: {"id"'
# For streams with carriage returns. Possessive, so that one CRLF never counts as two line ends.
EVENT_END = re.compile(rb"\n\n|\r\n?+(?:\r\n?+|\n)|\n\r\n?+")
BOM = b"\xef\xbb\xbf"
_ERROR = re.compile(rb'\{\s*"(?:error"\s*:(?!\s*null\b)|(?:type|object)"\s*:\s*"(?:error|response\.failed)")')
_ERROR_BYTES_MAX = 64 * 1024
_ERROR_MEMBER = b'"error"'
_FINISH = re.compile(rb'"finish_reason"\s*:\s*"')
_FINISH_MEMBER = b'"finish_reason"'
_UNFINISHED = _FINISH_MEMBER + b":null"
_SOME_CHOICE = re.compile(rb'"choices"\s*:\s*\[\s*\{')
_MARK = re.compile(rb'["{}\[\]]')
# A reversed string. A quote inside the string is followed by an odd number of backslashes there.
_STRING = re.compile(rb'"[^"]*+(?:"(?=\\(?:\\\\)*+(?!\\))[^"]*+)*+"')
_OBJECT = re.compile(rb"\s*:\s*\{")
_USAGE = b'"usage"'
# The usage and the plain members between it and the closing brace of the answer. Nearly every answer matches.
_PLAIN = rb"""(?:[^{}"]|"[^"\\]*+")"""
_USAGE_AT_END = re.compile(
    _USAGE + rb"\s*+:\s*+(\{(?:" + _PLAIN + rb"|\{" + _PLAIN + rb"*+\})*+\})" + _PLAIN + rb"*+\}\s*+"
)
_HOLDERS = frozenset({b'"response"', b'"message"'})
"""Members of events that contain a whole answer, in the responses API and in Anthropic's messages API."""
_ERROR_EVENTS = frozenset({b"error", b"response.failed"})
_LAST_EVENTS = frozenset({b"response.completed", b"response.incomplete", b"response.failed", b"message_stop"})
# Events that acknowledge the request and come before the first token.
_ACCEPTED_EVENTS = frozenset({b"response.created", b"response.queued", b"response.in_progress", b"ping"})


class StreamTap:
    """Reads one event stream while it is relayed.

    With `hide_usage`, removes the usage event that the engine sends at the end. With `holds`, returns whole events
    only, and keeps an error event and everything after it in `held_back`, so that another stream can go on after the
    returned bytes.
    """

    __slots__ = (
        "_first_usage",
        "_handed_bytes",
        "_hide_usage",
        "_holds",
        "_last",
        "_last_usage",
        "_names_finish",
        "_partial",
        "_returns",
        "data_events",
        "done_seen",
        "error",
        "error_first",
        "error_seen",
        "error_sent",
        "finished",
        "first_event_complete",
        "first_token_seen",
        "held_back",
        "refused",
    )

    def __init__(self, hide_usage: bool = False, holds: bool = False) -> None:
        # Whether a whole event or comment was seen.
        self.first_event_complete = False
        # Whether an event was seen that is neither an error nor an acknowledgement of the request.
        self.first_token_seen = False
        # Whether the first event with data was an error, and whether any event was an error.
        self.error_first = False
        self.error_seen = False
        # Whether the client has got an error event, although the tap holds errors back.
        self.error_sent = False
        # The data of the last error event.
        self.error = b""
        # Whether the end of the answer was seen: `[DONE]`, or the last event of the responses or messages API.
        self.done_seen = False
        # Whether an event with a finish reason was seen. Certain only after `flush`.
        self.finished = False
        # The number of events with data, without comments and `[DONE]`.
        self.data_events = 0
        # With `holds`: an error event and everything after it, which were not returned.
        self.held_back = bytearray()
        # Whether an event cannot be joined to the answer so far, after which nothing more is relayed.
        self.refused = False
        self._hide_usage = hide_usage
        self._holds = holds
        self._first_usage: dict[str, Any] = {}
        self._last = b""  # The last event that was relayed unread.
        self._last_usage: dict[str, Any] = {}
        self._names_finish = False  # Whether an event had a finish reason, perhaps null.
        self._partial = bytearray()  # The incomplete event at the end.
        self._handed_bytes = 0  # How many bytes of `_partial` were returned already.
        self._returns = False  # Whether the stream has carriage returns.

    @property
    def at_boundary(self) -> bool:
        """Whether the returned bytes end between two events, so that another event may be appended."""
        # The line feed of the last event may still follow its carriage return.
        return self._handed_bytes == 0 or not self._partial.strip(b"\r\n")

    @property
    def cut_short(self) -> bool:
        """Whether the end of the answer is missing. If so at the end of the stream, another stream can go on.

        Always False without `holds`.
        """
        return self._holds and not (self.done_seen or self.finished or self.error_seen)

    @property
    def usage(self) -> Usage | None:
        """The latest token counts in the stream; None if no event reported the prompt tokens."""
        return _usage(self._first_usage | self._last_usage)

    def feed(self, data: bytes) -> bytes:
        """Takes bytes from the backend, and returns the bytes to send to the client now, perhaps none."""
        if (
            not self._partial
            and self.first_token_seen
            and not self.error_seen
            and data.startswith(_ORDINARY)
            and data.find(b"\n\n") == len(data) - 2
            and b'"usage"' not in data
            and _UNFINISHED in data
        ):
            self.data_events += 1
            self._last = data
            return data
        return self._feed_slowly(data)

    def flush(self) -> bytes:
        """Returns the buffered bytes at the regular end of a stream.

        Must not be called for a broken stream: the client would get its incomplete event, and `at_boundary` would be
        False.
        """
        self._note_end()
        rest = bytes(self._partial[self._handed_bytes :])
        if rest and self._note(bytes(self._partial)) and not self._handed_bytes:
            self._partial.clear()
            return b""
        if self.cut_short:
            return b""
        self._handed_bytes = len(self._partial)
        if self._holds and self.error_seen and not self.error_sent:
            self.held_back += rest
            return b""
        return rest

    def _feed_slowly(self, data: bytes) -> bytes:
        buffer = self._partial
        # The end of an event may be split between two chunks, so the search starts a little before the new bytes.
        known = len(buffer)
        search_from = max(0, known - 2)
        buffer += data
        returns = self._returns = self._returns or b"\r" in data
        out: list[bytes] = []
        start, handed = 0, self._handed_bytes
        while (end := _end_of_event(buffer, search_from) if returns else buffer.find(b"\n\n", search_from) + 2) > 1:
            event = bytes(buffer[start:end])
            if returns and self._hide_usage and end == len(buffer) and event.endswith(b"\r") and _USAGE in event:
                # The line feed that belongs to the last carriage return may still come.
                break
            hidden = self._note(event)
            if self._holds and self.error_seen and not handed:
                if not hidden and len(self.held_back) <= BUFFERED_BYTES_MAX:
                    self.held_back += event
            elif not hidden or handed:
                out.append(event[handed:])
            elif event.startswith((b"\r", b"\n")):
                # Blank lines before a hidden event end the event before it.
                out.append(event[: len(event) - len(event.lstrip(b"\r\n"))])
            start = search_from = end
            handed = 0
        del buffer[:start]
        if handed or not (self._holds_part() or (self._hide_usage and self._may_be_usage(max(0, known - start)))):
            out.append(bytes(buffer[handed:]))
            handed = len(buffer)
            if handed > BUFFERED_BYTES_MAX:
                # The beginning shows the kind of the event, and the end contains its usage.
                del buffer[_HEAD_BYTES:-USAGE_TAIL_BYTES]
                handed = len(buffer)
        self._handed_bytes = handed
        return out[0] if len(out) == 1 else b"".join(out)

    def _holds_part(self) -> bool:
        """Whether the incomplete event is held until it is complete."""
        return self._holds and len(self._partial) <= BUFFERED_BYTES_MAX

    def _may_be_usage(self, known: int) -> bool:
        """Whether the incomplete event may be the usage event.

        The first `known` bytes were searched before and are not searched again.
        """
        if not self._partial or len(self._partial) > BUFFERED_BYTES_MAX:
            return False
        return not _SOME_CHOICE.search(self._partial, max(0, known - _TORN_BYTES_MAX))

    def _note(self, event: bytes) -> bool:
        """Reads one whole event. Returns True for the usage event that is hidden from the client."""
        if not self.first_event_complete:
            self.first_event_complete = True
            event = event.removeprefix(BOM)
        at = event.find(b"\n") + 1 if event.startswith(b"event:") else 0
        if event.startswith(b"data:", at) and event.find(b"\n", at) == len(event) - 2 and not self._returns:
            # Nearly all events have at most a name and one line of data.
            name, payload = event[6:at].strip() if at else b"", event[at + 5 :].strip()
        else:
            name, payload = named_data(event)
        if not payload:
            return False
        if payload == END_MARK:
            self._note_end()
            self.done_seen = not self._ends_unfinished()
            return False
        # Some routers put an `id` before the error, or a choice beside it.
        error = (
            name in _ERROR_EVENTS
            or _ERROR.match(payload) is not None
            or (_ERROR_MEMBER in payload and error_in(payload) is not None)
            or (self._holds and ABORT in payload and ABORTED.search(payload) is not None)
        )
        if error:
            self._note_error(payload[:_ERROR_BYTES_MAX])
        self._names_finish = self._names_finish or _FINISH_MEMBER in payload
        self.finished = self.finished or (not error and _FINISH.search(payload) is not None)
        self.data_events += 1
        self.done_seen = self.done_seen or name in _LAST_EVENTS
        usage = _own_usage(payload, _HOLDERS) if _USAGE in payload else None
        if usage and usage.get("completion_tokens") == 0 and _is_usage_event(payload):
            self._ends_unfinished()
        if usage:
            self._last_usage = usage
            self._first_usage = self._first_usage or usage
        hidden = bool(usage) and self._hide_usage and _is_usage_event(payload)
        if not error and not hidden and name not in _ACCEPTED_EVENTS:
            self.first_token_seen = True
        return hidden

    def _ends_unfinished(self) -> bool:
        """Notes an error, and returns True, if the stream ends without the finish of its answer.

        A vLLM that shuts down ends a chat without a token in this way.
        """
        unfinished = self._holds and self._names_finish and not (self.finished or self.error_seen)
        if unfinished:
            self._note_error(END_MARK)
        return unfinished

    def _note_error(self, payload: bytes) -> None:
        self.error_seen, self.error = True, payload
        self.error_first = self.error_first or self.data_events == 0

    def _note_end(self) -> None:
        """Looks for an error or a finish reason in the last event, which was relayed unread.

        No event follows an error, so earlier events need no search.
        """
        last, self._last = self._last[5:].strip(), b""
        self._names_finish = self._names_finish or _FINISH_MEMBER in last
        self.finished = self.finished or _FINISH.search(last) is not None
        if _ERROR_MEMBER in last and error_in(last) is not None:
            self.error_seen, self.error_sent, self.error = True, True, last[:_ERROR_BYTES_MAX]


class EncodedTap(StreamTap):
    """The tap of a compressed stream, which cannot be read."""

    __slots__ = ()

    def feed(self, data: bytes) -> bytes:
        self.first_event_complete = self.first_token_seen = True
        return data


def usage_in_tail(tail: bytes) -> Usage | None:
    """Returns the usage in the last bytes of a JSON answer (USAGE_TAIL_BYTES suffice); None if there is none."""
    return _usage(_own_usage(tail))


def _end_of_event(buffer: bytearray, search_from: int) -> int:
    """Returns the position after the first blank line from `search_from` on; 0 if there is none.

    A line may end with a line feed, a carriage return, or both.
    """
    match = EVENT_END.search(buffer, search_from)
    return match.end() if match is not None else 0


def named_data(event: bytes) -> tuple[bytes, bytes]:
    """Returns the name and the data of an event, with any line ends and any order of fields (WHATWG HTML, 9.2.6).

    A missing name or missing data is empty. A comment has neither.
    """
    name, data = b"", []
    for line in event.splitlines():
        if line.startswith(b"data:"):
            data.append(line[5:])
        elif line.startswith(b"event:"):
            name = line[6:].strip()
    return name, b"\n".join(data).strip()


def _is_usage_event(payload: bytes) -> bool:
    """Whether an event contains usage only, without a choice or an error."""
    if _SOME_CHOICE.search(payload):
        return False
    try:
        fields = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return False
    return isinstance(fields, dict) and not fields.get("choices", True) and not fields.get("error")


def _own_usage(text: bytes, holders: Set[bytes] = frozenset()) -> dict[str, Any]:
    """Returns the members of the top-level `usage` of the JSON object `text`; empty if there are none.

    Without a top-level `usage`, the `usage` inside the last top-level member that is named in `holders` counts. Any
    other `usage` may be an echo of the client's own data. `text` may lack the beginning of the object, so it is read
    backwards. Levels count open brackets: 1 is the answer itself or an event, 2 is the answer in an event.
    """
    if (last := text.rfind(_USAGE)) < 0:
        return {}
    if (at_end := _USAGE_AT_END.fullmatch(text, last)) is not None:
        return _usage_fields(at_end[1])
    back, at, level = text[::-1], 0, 0
    ends = [0, 0, 0]  # level -> the end of the value that was entered last
    nested = inner = b""
    for _ in range(_MARKS_MAX):
        mark = _MARK.search(back, at)
        if mark is None:
            break
        at = mark.end()
        match mark[0]:
            case b"}" | b"]":
                if level < len(ends):
                    ends[level] = len(text) - mark.start()
                level += 1
            case b"{" | b"[":
                level -= 1
                if level < 0:
                    # More brackets open than close: not JSON, but audio or binary vectors.
                    break
            case _:
                string = _STRING.match(back, mark.start())
                if string is None:
                    break
                at = string.end()
                if level not in (1, 2):
                    continue
                name = string[0][::-1]
                found = _OBJECT.match(text, len(text) - string.start())
                if level == 1 and found is not None and name in holders:
                    inner = inner or nested
                if level == 1:
                    nested = b""
                if name != _USAGE or found is None:
                    continue
                nested = text[found.end() - 1 : ends[level]]
                if level == 1:
                    return _usage_fields(nested)
    return _usage_fields(inner)


def _usage_fields(usage: bytes) -> dict[str, Any]:
    """Returns the members of a usage object that are not null; empty if the object has no token count."""
    try:
        fields = orjson.loads(usage) if len(usage) <= _USAGE_BYTES_MAX else {}
    except orjson.JSONDecodeError:
        return {}
    for name in ("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens"):
        if type(fields.get(name)) is int:
            return {name: one for name, one in fields.items() if one is not None} if None in fields.values() else fields
    return {}


def _usage(fields: dict[str, Any]) -> Usage | None:
    """Returns the usage in the format of OpenAI's chat, completions or responses API, or of Anthropic's messages.

    Returns None without a count of prompt tokens. Anthropic's `input_tokens` exclude the tokens that were read from or
    written to the cache, so these are added.
    """
    prompt = fields.get("prompt_tokens", fields.get("input_tokens"))
    output = fields.get("completion_tokens", fields.get("output_tokens", 0))
    if type(prompt) is not int or type(output) is not int:
        return None
    details = fields.get("prompt_tokens_details", fields.get("input_tokens_details"))
    cached = details.get("cached_tokens") if isinstance(details, dict) else fields.get("cache_read_input_tokens")
    if "prompt_tokens" not in fields and not isinstance(details, dict):
        beside = (fields.get("cache_read_input_tokens"), fields.get("cache_creation_input_tokens"))
        prompt += sum(tokens for tokens in beside if type(tokens) is int)
    return Usage(prompt, output, cached if type(cached) is int else None)
