"""Hostile backends: each case answers a request, the next request gets a sound answer, and rules are checked.

A strict reader decides whether the case contains exactly one answer. If so, the client gets the answer. If not, the
client gets an error or a visibly incomplete answer. The next request gets its own answer.
"""

from __future__ import annotations

import re
from typing import Any

from tests.e2e.proxies import ProxyUnderTest
from tests.e2e.scripted import Scripted
from tests.strictness.answers import NEXT, Got, observe_answer
from tests.strictness.reading import End, Message, Reading, read_answers

TIMEOUTS: dict[str, Any] = {"connect_s": 5, "first_byte_s": 2, "stall_s": 2, "total_s": 3}
"""Time limits that no case here may reach: it is found to be wrong, or the connection is closed, before that."""


def closes(sent: bytes) -> bool:
    """Whether the backend closes the connection after a case, as always if the proxy would wait for more of it."""
    given = read_answers(sent, closed=False)
    return given.end is End.SHORT or (_final(given) is None and given.end is End.CLEAN) or len(sent) % 2 == 0


async def play(proxy: ProxyUnderTest, backend: Scripted, sent: bytes) -> Got:
    """Answer one request with the case, and the next one soundly. Raises TimeoutError if there is no outcome."""
    return await observe_answer(proxy, backend, sent, closes(sent), stream=b"event-stream" in sent)


def violations(sent: bytes, got: Got, *, sound: bool = False) -> list[str]:
    """The violated rules. A `sound` case must also be passed on."""
    given = read_answers(sent, closes(sent))
    answer = _final(given)
    seen = read_answers(got.data, closed=True)
    wrong = []
    if seen.end is End.CLEAN and len(seen.messages) == 1 and seen.messages[0].strict:
        wrong += _wrong_whole(seen.messages[0], answer, given.begun)
    elif seen.end is End.SHORT and seen.begun is not None and not seen.messages:
        wrong += _wrong_beginning(seen.begun, answer or given.begun)
    else:
        wrong.append(f"no answer, no sound one or more than one: {got.data!r}")
    # Bytes after an answer may invalidate it; extensions of chunks, and tabs behind a coding, may be refused.
    odd = b";" in sent or b"chunked\t" in sent
    plain = given.end is End.CLEAN and given.messages[-1:] == (answer,) and not odd
    if (
        answer is not None
        and (sound or plain)
        and answer.status < 300
        and [m.body for m in seen.messages] != [answer.body]
    ):
        wrong.append(f"a sound answer was not passed on: {got.data!r}")
    if sound and answer is None:
        wrong.append("the reader takes a sound answer for something else")
    following = read_answers(got.next, closed=True)
    if following.end is not End.CLEAN or [message.body for message in following.messages] != [NEXT]:
        wrong.append(f"the next request got: {got.next!r}")
    return wrong


_DONE = re.compile(rb"^data: ?\[DONE\](\r\n?|\n){2}", re.MULTILINE)
"""The last event of a stream, with any line ends of an event stream."""


def _final(given: Reading) -> Message | None:
    return next((message for message in given.messages if message.status >= 200), None)


def _wrong_whole(seen: Message, answer: Message | None, begun: Message | None) -> list[str]:
    """The violated rules for a whole answer to the client. The backend gave this answer or its beginning only."""
    given = answer
    if given is None and begun is not None and _DONE.search(seen.body) and begun.body.startswith(seen.body):
        # A stream with its end needs nothing more.
        return [] if seen.status == begun.status else [f"the status of an answer that was not given: {seen.status}"]
    if given is not None and (seen.status, seen.body) == (given.status, given.body):
        return []
    own = seen.body.startswith(b'{"error":{') and bool(seen.values(b"x-request-id"))
    if own and seen.status == 502:
        return []
    if own and seen.status == 504:
        return ["nothing was seen to be wrong until a time limit"]
    return [f"an answer that was not given: {seen.status} {seen.body!r}"]


def _wrong_beginning(seen: Message, meant: Message | None) -> list[str]:
    """The violated rules for a visibly incomplete answer."""
    body = seen.body.partition(b'data: {"error":{"message":"The stream broke')[0]
    if meant is None or seen.status != meant.status or not (meant.body + b"\n\n").startswith(body):
        return [f"the beginning of an answer that was not given: {seen.status} {seen.body!r}"]
    return []
