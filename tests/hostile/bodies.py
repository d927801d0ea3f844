"""Hostile JSON bodies: the backend must read the forwarded bytes with the same result as the sent bytes.

The engine's framework reads a body with Python's parser: the last of several members with one name counts, however the
names are spelt, and the bytes may be UTF-16. A client that may use one model must not reach another model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from tests.hostile.clients import Seen
from tests.hostile.edits import NASTY, everywhere, several
from tests.strictness.observe import ANSWER
from tests.strictness.reading import read_answers
from tests.strictness.vector import CHAT, HOST, JSON, head

PADDING = '"padding":[' + "0," * 17_000 + "0]"
"""With this many values a body is scanned, and not parsed."""
NAMES = (
    '"model"', '"model"', '"mod\\u0065l"', '"stream"', '"str\\u0065am"', '"stream_options"', '"messages"', '"user"',
    '"n"',
)  # fmt: skip
ODD_NAMES = (
    '"model\\u0000"', '"Model"', '" model"', '"priority"', '"cache_salt"', '""', '"\\"model\\""', "'model'", "model",
)  # fmt: skip
VALUES = (
    '"base"', '"base"', '"base"', '"b\\u0061se"', '"other"', "true", "true", "false", "null", "1", "[]", "{}",
    '{"include_usage":true}', '{"include_usage":null,"x":1}', '{"model":"other"}', '[{"role":"user","content":"é😀"}]',
)  # fmt: skip
ODD_VALUES = (
    '"base\\u0000"', '"base "', '"\\ud800"', '"\\ud83d\\ude00"', "0", "-0", '"true"', "True", "1e400", "1E5", "01",
    "+1", ".5", "5.", "NaN", "Infinity", "-", "9" * 400, "1" * 5000, '"\t"', '"\x00"', '"\\x41"', '"\\u12"', '"unended',
    "[" * 2000, "[" * 600 + "]" * 600, '{"a":' * 600 + "1" + "}" * 600, '["model","other"]', "/*x*/1",
    '"},\\"model\\":\\"other"',
)  # fmt: skip
SEPARATORS = (",", ",", " , ", "\n,\t")
ODD_SEPARATORS = (",,", "", ";", "\x0b,", "\xa0,")
BEHIND = ("", "", " ", "\r\n")
ODD_BEHIND = ("}", "{}", ',"model":"other"', "\x00", "\ufeff", '\n{"model":"other"}', "//")
BASE = (
    b'{"model":"base","messages":[{"role":"user","content":"a\\"b\\\\"}],"stream":true,'
    b'"stream_options":{"include_usage":false},"max_tokens":1,"x":{"model":"other"}}'
)


def _documents(random: Random, count: int, padding: str = "") -> Iterator[bytes]:
    def drawn(usual: Sequence[str], odd: Sequence[str]) -> str:
        return random.choice(usual if random.random() < 0.93 else odd)

    for _ in range(count):
        members = [
            drawn(NAMES, ODD_NAMES) + drawn((":", " : "), ("=", "")) + drawn(VALUES, ODD_VALUES)
            for _ in range(random.randint(1, 5))
        ]
        if padding:
            members.insert(random.randint(0, len(members)), padding)
        text = drawn(("{", " {"), ("\ufeff{", "[{", "")) + members[0]
        text += "".join(drawn(SEPARATORS, ODD_SEPARATORS) + member for member in members[1:])
        text += drawn(("}",), ("", ",}", "]")) + drawn(BEHIND, ODD_BEHIND)
        yield text.encode(drawn(("utf-8",), ("utf-16", "utf-16-le", "utf-32", "latin-1")), "replace")


def _members(random: Random) -> Iterator[bytes]:
    yield from _documents(random, 10_000)


def _edits(random: Random) -> Iterator[bytes]:
    yield from everywhere(BASE, NASTY)
    yield from several(BASE, random, 2000)
    yield from (BASE[:at] for at in range(len(BASE)))


def _large(random: Random) -> Iterator[bytes]:
    yield from _documents(random, 1500, PADDING)
    for body in several(BASE, random, 500):
        at = body.find(b"{") + 1
        yield body[:at] + PADDING.encode() + b"," + body[at:]


GROUPS: dict[str, Callable[[Random], Iterator[bytes]]] = {
    "bodies, members": _members,
    "bodies, edits": _edits,
    "bodies, large": _large,
}


def request_of(body: bytes) -> bytes:
    return head(HOST, JSON, b"content-length: %d" % len(body), line=b"POST " + CHAT + b" HTTP/1.1") + body


def engines_view(body: bytes) -> Any:
    """The body as the engine's framework reads it, or its exception if it refuses the body."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        return type(error)


def violations(body: bytes, seen: Seen) -> list[str]:
    """The violated rules. `seen` covers the request with this body and the sentinel after it."""
    answers = read_answers(seen.answered, closed=True).messages
    if not answers:
        return [f"no sound answer: {seen.answered!r}"]
    arrived = [request.partition(b"\r\n\r\n")[2] for request in seen.reached[: len(seen.reached) - (len(answers) > 1)]]
    served = answers[0].body == ANSWER
    if len(arrived) != served:
        return [f"{len(arrived)} requests reached the backend, and the answer is {answers[0].body[:200]!r}"]
    if not served:
        return [] if 400 <= answers[0].status < 500 else [f"status {answers[0].status}: {answers[0].body!r}"]
    return _wrong_edits(body, engines_view(body), arrived[0])


def _wrong_edits(body: bytes, sent: Any, arrived: bytes) -> list[str]:
    got = engines_view(arrived)
    if not isinstance(sent, dict):
        # The engine itself must refuse its bad bodies.
        return [] if not isinstance(got, dict) else [f"of a body that is no object came {str(got)[:300]}"]
    if sent.get("model") not in ("base", "", None):
        return [f"the engine is asked for {sent.get('model')!r}"]
    expected = dict(sent)
    # An engine takes some other values for true.
    if sent.get("stream") not in (None, False):
        options = sent.get("stream_options")
        # Any other value is wrong, and passes unchanged: the engine refuses it.
        options = {} if options is None else options
        if isinstance(options, dict) and not options.get("include_usage") and arrived != body:
            expected["stream_options"] = options | {"include_usage": True}
    # NaN is unequal to itself, so its spelling is compared.
    same = isinstance(got, dict) and json.dumps(got, sort_keys=True) == json.dumps(expected, sort_keys=True)
    return [] if same else [f"the engine reads {str(got)[:300]}, not {str(expected)[:300]}"]
