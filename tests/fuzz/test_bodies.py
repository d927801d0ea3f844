"""Any bytes as a JSON body: whatever the engine's parser accepts is read as the engine reads it."""

from __future__ import annotations

import json
from typing import Any

import orjson
from hypothesis import example, given
from hypothesis import strategies as st

from llmproxy.gateway.http.routes import BodyKind
from llmproxy.gateway.request.body_reader import read_large, read_small
from llmproxy.gateway.request.json_scan import BadBody, drain
from llmproxy.gateway.request.parsed_body import ParsedBody
from tests.fuzz.profile import FUZZED
from tests.gateway.request.test_json_scan import SPACES, written

JSON_KINDS = [kind for kind in BodyKind if kind is not BodyKind.FORM]
NAMES = st.sampled_from(
    [
        "model", "stream", "stream_options", "priority", "cache_salt", "user", "messages", "prompt", "n", "max_tokens",
        "include_usage", "continuous_usage_stats", "mod\\el", '"', "é",
    ]
)  # fmt: skip
TEXTS = st.text(alphabet=st.sampled_from('ab"\\[]{},:/\n\té漢😀'), max_size=10)
LEAVES: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers(-3, 2**60) | st.floats(-1e9, 1e9) | TEXTS | st.just({})
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES | TEXTS, inner, max_size=4), max_leaves=12
)
# Names may come twice, as no dictionary has them.
MEMBERS = st.lists(st.tuples(NAMES | TEXTS, VALUES), max_size=7) | st.lists(
    st.one_of(
        st.tuples(st.just("model"), TEXTS),
        st.tuples(st.just("stream"), st.just(True)),
        st.tuples(
            st.just("stream_options"),
            st.none() | st.dictionaries(st.sampled_from(["include_usage", "x"]), st.none() | st.booleans()),
        ),
        st.tuples(st.just("priority"), st.integers(-9, 9)),
    ),
    max_size=6,
)
CUTS = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 3), st.binary(max_size=3)), max_size=3)


def mutated(body: bytes, cuts: list[tuple[int, int, bytes]]) -> bytes:
    for at, gone, new in cuts:
        at = min(at, len(body))
        body = body[:at] + new + body[at + gone :]
    return body


def both(body: bytes, kind: BodyKind) -> list[ParsedBody | None]:
    """Returns the results of both readers; None for a reader that refuses the body."""
    found: list[ParsedBody | None] = []
    for parsed in (True, False):
        try:
            found.append(read_small(body, kind, "user") if parsed else drain(read_large(body, kind, True, "user")))
        except BadBody as bad:
            assert bad.message
            assert bad.status in (400, 413)
            found.append(None)
    return found


def engines_view(body: bytes) -> dict[str, Any] | None:
    """The object that the engine's framework finds in a body: Python's own parser reads it there, from the bytes.

    It takes UTF-16 and UTF-32 too, whatever the content type says, halves of surrogate pairs and NaN.
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


@FUZZED
@given(MEMBERS, SPACES, st.booleans(), CUTS, st.sampled_from(JSON_KINDS))
@example([("model", "a"), ("model", "b")], "", True, [], BodyKind.CHAT)
@example([("model", "a")], "", True, [(3, 1, rb"\u006f")], BodyKind.CHAT)
@example([("n", 1), ("model", "a")], "", True, [(5, 1, b"NaN")], BodyKind.OTHER)
@example([("x", "1"), ("model", "a")], "", True, [(6, 1, b"\xed\xa0\x80")], BodyKind.CHAT)
def test_both_readers_agree_with_the_engines_parser(
    members: list[tuple[str, Any]], space: str, ascii_only: bool, cuts: list[tuple[int, int, bytes]], kind: BodyKind
) -> None:
    body = mutated(written(members, space, ascii_only), cuts)
    small, large = both(body, kind)
    engine = engines_view(body)
    if small is not None:
        # A large body may hold broken values that are not needed here, but never the other way round.
        assert large is not None
        assert engine is not None
        assert (small.model, small.stream) == (large.model, large.stream)
        assert (small.max_tokens, small.sessions) == (large.max_tokens, large.sessions)
    for parsed in (small, large):
        if parsed is not None and engine is not None:
            assert (parsed.model or "") == (engine.get("model") or "")
            assert parsed.stream or engine.get("stream") is not True


@FUZZED
@given(
    MEMBERS,
    SPACES,
    st.booleans(),
    st.sampled_from(JSON_KINDS),
    st.none() | TEXTS,
    st.none() | st.integers(-9, 9),
    st.none() | st.just("a-salt"),
)
@example([], " ", True, BodyKind.CHAT, "b", -1, "a-salt")
@example([("stream", True), ("stream_options", {"include_usage": None})], "", True, BodyKind.CHAT, "b", 1, "a-salt")
def test_a_spliced_body_differs_only_by_the_edits(
    members: list[tuple[str, Any]],
    space: str,
    ascii_only: bool,
    kind: BodyKind,
    model: str | None,
    priority: int | None,
    salt: str | None,
) -> None:
    body = written(members, space, ascii_only)
    for parsed in both(body, kind):
        if parsed is None:
            continue
        spliced = parsed.spliced(model=model, want_usage=True, priority=priority, salt=salt)
        expected = orjson.loads(body)
        if model is not None and parsed.model is not None:
            expected["model"] = model
        if priority is not None and kind in (BodyKind.CHAT, BodyKind.COMPLETION, BodyKind.RESPONSES):
            expected["priority"] = priority
        if salt is not None:
            own = parsed.text("cache_salt")
            assert own == (expected.get("cache_salt") if isinstance(expected.get("cache_salt"), str) else None)
            expected["cache_salt"] = salt
        if spliced.hides_usage:
            assert parsed.stream
            assert kind in (BodyKind.CHAT, BodyKind.COMPLETION)
            options = expected.get("stream_options") or {}
            assert not options.get("include_usage")
            expected["stream_options"] = options | {"include_usage": True}
        assert json.loads(b"".join(spliced.parts)) == expected
        assert orjson.loads(b"".join(spliced.parts)) == expected


ENCODINGS = st.sampled_from(["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])


@FUZZED
@given(MEMBERS, ENCODINGS, st.binary(max_size=3), st.booleans())
def test_a_body_in_another_encoding_is_refused(
    members: list[tuple[str, Any]], encoding: str, before: bytes, doubled: bool
) -> None:
    text = written(members, "", True)
    body = before + (text if doubled else b"") + text.decode().encode(encoding)
    for parsed in both(body, BodyKind.CHAT):
        engine = engines_view(body)
        if parsed is not None and engine is not None:
            assert (parsed.model or "") == (engine.get("model") or "")
    assert both(text.decode().encode(encoding), BodyKind.CHAT) == [None, None]


@FUZZED
@given(st.binary(max_size=80) | st.text(alphabet='{}[]",:\\u1eE+-.tnf ', max_size=80).map(str.encode))
@example(b"[" * 3000)
@example(b'{"a":' * 3000)
@example(b'{"model":"\\ud800"}')
def test_no_bytes_raise_anything_but_bad_body(body: bytes) -> None:
    for kind in (BodyKind.CHAT, BodyKind.OTHER):
        both(body, kind)
