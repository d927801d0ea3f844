"""Form fields are found, and broken forms are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmproxy.gateway.request import multipart
from llmproxy.gateway.request.json_scan import BadBody, drain
from llmproxy.gateway.request.multipart import FIELD_BYTES_MAX, PARTS_MAX, scan_form

TYPE = "multipart/form-data; boundary=cut"


def part(head: str, content: bytes) -> bytes:
    return b"--cut\r\nContent-Disposition: form-data; " + head.encode() + b"\r\n\r\n" + content + b"\r\n"


def fields(body: bytes, content_type: str = TYPE) -> dict[str, bytes]:
    found = drain(scan_form(body, content_type, ("model", "stream")))
    return {name: body[member.start : member.end] for name, member in found.items()}


CONTENTS = st.binary(max_size=80).filter(lambda content: b"\r\n--cut" not in b"\r\n" + content)


@given(st.lists(st.tuples(st.sampled_from(["model", "stream", "file", "language"]), CONTENTS), max_size=8))
def test_fields_are_found_unless_one_is_given_twice(parts: list[tuple[str, bytes]]) -> None:
    body = b"".join(part(f'name="{name}"', content) for name, content in parts) + b"--cut--\r\n"
    wanted = [(name, content) for name, content in parts if name in ("model", "stream")]
    if len(dict(wanted)) < len(wanted):
        with pytest.raises(BadBody, match="is given twice"):
            fields(body)
    elif parts:
        assert fields(body) == dict(wanted)


@pytest.mark.parametrize(
    ("head", "found"),
    [
        ('name="model"', True),
        ("name=model", True),
        ('NAME="model"', True),
        ('x="; name=\\"stream"; name="model"', True),
        ('name="file"; filename="a"', False),
        ("name=\"file\"; filename*=UTF-8''a", False),
        ('filename="; name=model"', False),
        ('name="models"', False),
        ("x=1", False),
    ],
)
def test_the_name_is_read_as_a_parameter(head: str, found: bool) -> None:
    assert fields(part(head, b"m") + b"--cut--") == ({"model": b"m"} if found else {})


@pytest.mark.parametrize(
    "head",
    [
        'name="mo\\del"', "name=model; name*=utf-8''stream", "name*0=mo; name*1=del", "name=model; NAME=stream",
        'x="a"b; name=model', "name=model\r\nContent-Disposition: form-data; name=stream", 'name="model"\n',
        "name=model\x0b", "name=\x85model", "name=model\xa0", ";\xa0name=model", 'name="model"; filename="a"',
        "name=\"model\"; filename*=UTF-8''a",
        'name="model"\r\n\r\na\r\n--cut\r\nContent-Disposition: form-data; name="model"',
        'x\r\n\r\na\r\n--cut\r\nContent-Disposition: form-data"; x="; name=model; y="',
    ],
)  # fmt: skip
def test_a_name_that_can_be_read_in_two_ways_is_refused(head: str) -> None:
    with pytest.raises(BadBody):
        fields(part(head, b"m") + b"--cut--")


def test_a_preamble_and_other_headers_are_skipped() -> None:
    body = b"hello\r\n--cut\r\nX-A: b\r\ncontent-disposition:form-data; name=model\r\nX: y\r\n\r\nm\r\n--cut--epilogue"
    assert fields(body) == {"model": b"m"}


def test_a_boundary_split_between_two_slices_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for slice_bytes in range(1, 40):
        monkeypatch.setattr(multipart, "SLICE_BYTES", slice_bytes)
        assert fields(part('name="file"; filename="a"', b"x" * 50) + part("name=model", b"m") + b"--cut--") == {
            "model": b"m"
        }


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "application/json",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        'multipart/form-data; boundary=""',
        "multipart/form-data; boundary=" + "x" * 300,
        "multipart/form-data; boundary=é",
        'multipart/form-data; boundary="c\\ut"',
        "multipart/form-data; boundary=cut; boundary=cot",
        "multipart/form-data; boundary=cut; boundary*=utf-8''cot",
        "multipart/form-data; boundary=cut; charset=iso-8859-1",
        "multipart/form-data; boundary=cut; charset=utf-8; charset=utf-7",
        "multipart/form-data; boundary=cut; charset=",
        "multipart/form-data; boundary=cut; charset*=utf-8''utf-7",
        "multipart/form-data; charset=utf-7; boundary=cut",
        "multipart/form-data; boundary=cut; x=y",
    ],
)
def test_a_missing_or_unusable_boundary_is_refused(content_type: str) -> None:
    with pytest.raises(BadBody) as bad:
        fields(part("name=model", b"m") + b"--cut--", content_type)
    assert bad.value.status == 400


@pytest.mark.parametrize(
    "content_type",
    [
        "multipart/form-data; boundary=cut; charset=UTF-8",
        "multipart/form-data;charset=utf8;boundary=cut",
        'multipart/form-data; charset="utf-8"; boundary=cut',
        'Multipart/Form-Data; BOUNDARY="cut"',
    ],
)
def test_a_quoted_boundary_and_the_charset_of_the_engine_are_taken(content_type: str) -> None:
    assert fields(part("name=model", "é".encode()) + b"--cut--", content_type) == {"model": "é".encode()}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        # No boundary, but two dashes where they would end the form behind one.
        b"here--nothing",
        b"x--cut\r\n\r\n\r\n--cut--",
        b"--cut",
        b"--cut\r\n",
        b"--cut\r\nname: x",
        b"--cutX: y\r\n\r\n\r\n--cut--",
        part("name=model", b"m"),
        part("name=model", b"m" * (FIELD_BYTES_MAX + 1)) + b"--cut--",
        part("name=a", b"") * (PARTS_MAX + 1) + b"--cut--",
        b"--cut\r\nX: " + b"y" * 20_000 + b"\r\n\r\n\r\n--cut--",
    ],
)
def test_broken_forms_are_refused(body: bytes) -> None:
    with pytest.raises(BadBody):
        fields(body)
