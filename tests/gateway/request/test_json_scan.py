"""The scan finds the same members as a parser, with any whitespace and slice size, and refuses everything else."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmproxy.gateway.request.json_scan import MEDIA_BYTES, MEMBERS_MAX, BadBody, Kind, drain, scan_members

NAMES = ["model", "messages", "prompt", 'we"ird\\', "é"]
TEXTS = st.text(alphabet=st.sampled_from('ab"\\[]{},:\n\té漢😀'), max_size=12)
LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5), max_leaves=40
)
MEMBERS = st.lists(st.tuples(st.sampled_from(NAMES) | TEXTS, VALUES), max_size=8)
SPACES = st.text(alphabet=" \t\r\n", max_size=3)


def written(members: list[tuple[str, Any]], space: str, ascii_only: bool) -> bytes:
    """An object with these members in this order, with repeated names, and `space` wherever JSON allows it."""

    def dump(value: Any) -> str:
        return json.dumps(value, ensure_ascii=ascii_only, separators=("," + space, space + ":" + space))

    inner = f"{space},{space}".join(f"{dump(name)}{space}:{space}{dump(value)}" for name, value in members)
    return f"{space}{{{space}{inner}{space}}}{space}".encode()


@given(MEMBERS, SPACES, st.booleans(), st.sampled_from([2, 3, 7, 64, 100, 1000, 65536]))
@example([("a", "x" * 300 + '"' + "\\" * 5)], "", False, 64)
def test_spans_equal_a_parsers_values(
    members: list[tuple[str, Any]], space: str, ascii_only: bool, slice_bytes: int
) -> None:
    body = written(members, space, ascii_only)
    expected = orjson.loads(body)
    found = drain(scan_members(body, NAMES, slice_bytes))
    assert set(found) == set(expected) & set(NAMES)
    for name, member in found.items():
        assert orjson.loads(body[member.start : member.end]) == expected[name]


@given(MEMBERS, st.sampled_from([2, 3, 64, 65536]))
def test_sums_count_the_content(members: list[tuple[str, Any]], slice_bytes: int) -> None:
    body = written(members, "", False)
    expected = orjson.loads(body)
    for name, member in drain(scan_members(body, NAMES, slice_bytes)).items():
        sums = Sums()
        sums.add(expected[name])
        if not sums.has_equal_names:
            assert (member.strings, member.arrays, member.objects) == (sums.strings, sums.arrays, sums.objects)
            assert member.commas == sums.commas
            assert member.text_bytes == sums.text_bytes


class Sums:
    def __init__(self) -> None:
        self.strings = self.arrays = self.objects = self.commas = self.text_bytes = 0
        self.has_equal_names = False

    def add(self, value: Any) -> None:
        if isinstance(value, str):
            self.strings += 1
            self.text_bytes += len(value.encode())
        elif isinstance(value, list):
            self.arrays += 1
            self.commas += max(0, len(value) - 1)
            for inner in value:
                self.add(inner)
        elif isinstance(value, dict):
            self.objects += 1
            self.commas += max(0, len(value) - 1)
            for name, inner in value.items():
                self.add(name)
                self.add(inner)


@given(st.binary(max_size=60) | st.text(alphabet='{}[]",:\\ a1', max_size=60).map(str.encode), st.sampled_from([2, 64]))
@example(b'{"a":"\\', 2)
@example(b'{"a":[1}', 64)
@example(b'{"\\u12":1}', 64)
def test_hostile_bytes_give_members_or_bad_body(body: bytes, slice_bytes: int) -> None:
    slices = scan_members(body, NAMES, slice_bytes)
    try:
        for _ in range(20 * len(body) + 20):
            next(slices)
        pytest.fail("the scan goes on for ever")
    except BadBody:
        return
    except StopIteration as done:
        for member in done.value.values():
            assert 0 < member.start < member.end < len(body)


@given(MEMBERS.filter(bool), st.data())
def test_a_cut_body_is_refused(members: list[tuple[str, Any]], data: st.DataObject) -> None:
    body = written(members, "", False)
    cut = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(BadBody):
        drain(scan_members(body[:cut], NAMES))


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (b"[]", "must be a JSON object"),
        (b'"x"', "must be a JSON object"),
        (b"{1:2}", "member name"),
        (b'{"a" 1}', "':'"),
        (b'{"a":1 "b":2}', "',' or '}'"),
        (b'{"a":1,}', "member name"),
        (b'{"a":}', "expected a value"),
        (b'{"a":1} x', "after the object"),
        (b'{"a":[1,2', "ends inside"),
        (b'{"a":[1,2}]}', "do not match"),
        (b'{"a":[@]}', "unexpected characters"),
        (b'{"a":[\\"]}', "unexpected characters"),
        (b'{"a":"x', "ends inside a string"),
        (b'{"a":[\x80"]}', "not valid JSON"),
        (b'{"a":[1,\xff,2],"b":1}', "not valid JSON"),
        (b'{"a":{"b":\xc3\x28"x"}}', "not valid JSON"),
        (b'{"a":[x"]}', "not valid JSON"),
    ],
)
def test_broken_structure_is_named(body: bytes, part: str) -> None:
    with pytest.raises(BadBody, match=part):
        drain(scan_members(body, ["a"]))


def test_the_last_of_equal_names_wins_however_it_is_spelled() -> None:
    body = rb'{"model":"a","\u006dodel":"b","nested":{"model":"c"}}'
    member = drain(scan_members(body, ["model"]))["model"]
    assert body[member.start : member.end] == b'"b"'
    assert member.kind is Kind.STRING


def test_too_many_members_are_refused() -> None:
    body = orjson.dumps({f"k{n}": 0 for n in range(MEMBERS_MAX + 1)})
    with pytest.raises(BadBody, match=f"more than {MEMBERS_MAX} members"):
        drain(scan_members(body, ["model"]))


@pytest.mark.parametrize("slice_bytes", [64, 1000, 65536])
@pytest.mark.parametrize("media", ["data:image/png;base64," + "iVBOR" * 3000, "Qk0+" * 5000])
def test_media_have_a_flat_size_wherever_they_are_split(media: str, slice_bytes: int) -> None:
    # Long enough that the first media string lies inside a slice of 64 KiB.
    text = "words and words " * 3000
    body = orjson.dumps({"messages": [text, media, text, media], "prompt": media})
    found = drain(scan_members(body, ["messages", "prompt"], slice_bytes))
    assert found["messages"].text_bytes == 2 * len(text) + 2 * MEDIA_BYTES
    assert found["prompt"].text_bytes == MEDIA_BYTES


@pytest.mark.parametrize("slice_bytes", [64, 65536])
def test_slashes_escaped_as_some_clients_do_are_still_media(slice_bytes: int) -> None:
    body = b'{"prompt":["data:image\\/png;base64,' + b"abc\\/" * 2000 + b'"]}'
    found = drain(scan_members(body, ["prompt"], slice_bytes))
    assert found["prompt"].text_bytes <= MEDIA_BYTES


@pytest.mark.parametrize("text", ["漢字かな" * 3000, "no break " * 2000, "\n" * 9000, '"' * 9000, "\\" * 9000])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_long_text_is_not_taken_for_media(text: str, ascii_only: bool) -> None:
    body = json.dumps({"prompt": text, "messages": [text]}, ensure_ascii=ascii_only).encode()
    for member in drain(scan_members(body, ["prompt", "messages"])).values():
        assert member.text_bytes == len(text.encode())


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":"' + b"x" * 10**6 + b'"}',
        b'{"' + b"x" * 10**6 + b'":1}',
        b'{"a":' + b" " * 10**6 + b"1}",
        b'{"a":' + b"1" * 10**6 + b"}",
        b'{"a":[' + b"1," * 500_000 + b"1]}",
        b'{"a":["' + b"x" * 10**6 + b'"]}',
    ],
    ids=["string", "name", "whitespace", "number", "array", "string in an array"],
)
def test_a_slice_is_bounded_whatever_is_long(body: bytes) -> None:
    assert sum(1 for _ in scan_members(body, ["a"], 1000)) >= 10**6 // 1000
