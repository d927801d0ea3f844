"""A form means the same to the proxy and to the engine, or it is refused.

The engine's framework is Starlette, which is asked itself. Releases of its form parser that engines still have read the
header of a part with the parser of Python's `email` package, which unfolds the parameters of RFC 2231 and pairs quotes
in its own way; a second reference here does the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from email.message import Message
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from starlette.datastructures import FormData, Headers
from starlette.formparsers import MultiPartException, MultiPartParser

from llmproxy.gateway.request.json_scan import BadBody, drain
from llmproxy.gateway.request.multipart import scan_form
from tests.fuzz.profile import FUZZED

TYPE = "multipart/form-data; boundary=cut"
WANTED = ("model", "stream")
PARAMS = st.sampled_from(
    [
        "name", "NAME", "name*", "name*0", "filename", "filename*", "x", "model", "stream", "form-data",
        "utf-8''model", "=", ";", '"', "\\", " ", "\t", "'", "*", "a", "%6d",
    ]
)  # fmt: skip
DISPOSITIONS = st.lists(PARAMS, max_size=9).map("".join) | st.lists(
    st.sampled_from(
        [
            'name="model"', "name=model", "name*=utf-8''model", 'x="\\"', 'x="a"b', 'x=a"b', 'filename="a"',
            "name*0=mo", "name*1=del", 'x="\\\\"', "filename*=utf-8''a", "name", 'name="str\\eam"', "name=stream",
        ]
    ),
    max_size=4,
).map(lambda params: "; ".join(["form-data", *params]))  # fmt: skip
FIELDS = st.sampled_from(
    ["Content-Disposition", "content-disposition", "Content-Type", "X", " X", "Content-Disposition "]
)
PARTS = st.lists(
    st.tuples(st.lists(st.tuples(FIELDS, DISPOSITIONS), max_size=3), st.sampled_from([b"a", b"b", b""])), max_size=4
)


def options(value: str) -> dict[str, str]:
    """The parameters of a header value as the engine's framework has them."""
    message = Message()
    message["content-type"] = value
    # An extended parameter comes as a tuple whose last part is its text, which the stubs do not know.
    found: list[tuple[str, Any]] = message.get_params() or []
    return {name: text[-1] if isinstance(text, tuple) else text for name, text in found[1:]}


def engines_view(parts: list[tuple[list[tuple[str, str]], bytes]]) -> dict[str, bytes] | None:
    """The plain fields of a form, the last of equal names; None if the engine refuses the form."""
    found: dict[str, bytes] = {}
    for fields, content in parts:
        disposition = None
        for name, value in fields:
            if " " in name:
                return None
            if name.lower() == "content-disposition":
                disposition = value
        if disposition is None:
            return None
        params = options(disposition)
        if "name" not in params:
            return None
        found.pop(params["name"], None)
        if "filename" not in params:
            found[params["name"]] = content
    return found


def in_starlette(body: bytes, content_type: str, chunk_bytes: int) -> FormData | None:
    """Returns Starlette's reading of a form that arrives in chunks; None if it refuses the form."""

    async def chunks() -> AsyncGenerator[bytes, None]:
        for at in range(0, len(body), chunk_bytes):
            yield body[at : at + chunk_bytes]

    headers = Headers(raw=[(b"content-type", content_type.encode("utf-8", "surrogateescape"))])
    try:
        return asyncio.run(MultiPartParser(headers, chunks()).parse())
    except (MultiPartException, UnicodeError):
        return None


def written(parts: list[tuple[list[tuple[str, str]], bytes]]) -> bytes:
    body = b""
    for fields, content in parts:
        head = "".join(f"{name}: {value}\r\n" for name, value in fields)
        body += b"--cut\r\n" + head.encode() + b"\r\n" + content + b"\r\n"
    return body + b"--cut--\r\n"


@FUZZED
@given(PARTS)
@example(
    [
        ([("Content-Disposition", 'form-data; name="model"')], b"a"),
        ([("Content-Disposition", "form-data; name*=utf-8''model")], b"b"),
    ]
)
@example([([("Content-Disposition", "form-data; name=x"), ("Content-Disposition", "form-data; name=model")], b"b")])
@example([([("Content-Disposition", 'form-data; x="a"b; name="model"')], b"b")])
def test_a_form_means_the_same_to_the_engine_or_is_refused(parts: list[tuple[list[tuple[str, str]], bytes]]) -> None:
    body = written(parts)
    try:
        members = drain(scan_form(body, TYPE, WANTED))
    except BadBody:
        return
    engine = engines_view(parts)
    if engine is not None:
        found = {name: body[member.start : member.end] for name, member in members.items()}
        assert found == {name: content for name, content in engine.items() if name in WANTED}


NAMED = st.sampled_from(
    ["model", "mod\\x65l", "+AG0AbwBkAGUAbA-", "Model", "model ", "m\x00del", "stream", "file", ""]
) | st.sampled_from(["model", "stream"]).flatmap(
    lambda name: st.sampled_from(["cp037", "utf-16-le", "utf-7"]).map(lambda code: name.encode(code).decode("latin-1"))
)
PARAMETERS = st.lists(
    st.sampled_from(
        [
            "; ", ";", " ;", ";\t", ";\xa0", ";\x85", ";\n", '"', '\\"', "\\", "name=model", 'name="model"',
            "name=stream", 'name="model', "name =model", "Name=model", "name=mod%65l", 'x="', "x=y", "x",
            'filename="a"', "filename=a", "\xa0", "\x00", "=",
        ]
    ),
    max_size=8,
).map("".join)  # fmt: skip
HEADS = st.one_of(
    NAMED.map('Content-Disposition: form-data; name="{}"'.format),
    NAMED.map("content-disposition:form-data;name={}".format),
    st.tuples(st.sampled_from(["form-data", 'a"', '"', "", "attachment", "form-data "]), PARAMETERS).map(
        lambda pair: f"Content-Disposition: {pair[0]}; {pair[1]}"
    ),
    st.sampled_from(
        [
            "Content-Type: text/plain; charset=utf-16", "Content-Transfer-Encoding: base64", "X: y", " name=model",
            "Content-Disposition", "Content-Disposition : form-data; name=model",
            'Content-Disposition: form-data; name="model"; filename="a"',
        ]
    ),
)  # fmt: skip
ENDS = st.sampled_from(["\r\n"] * 8 + ["\n", "\r", "\r\r\n", "\n\r\n", "\r\n "])
CONTENTS = st.sampled_from(
    [b"a", b"b", b"", b"true", b"\r\n", b"--cut", b"\r\n--cu", b"\x00", "é".encode("utf-16"), b"\xff"]
)


@st.composite
def whole_forms(draw: st.DrawFn) -> bytes:
    """Forms like those of clients, with something odd in a few places."""
    body = draw(
        st.sampled_from([b""] * 6 + [b"\r\n", b"\n", b"hello\r\n", b"\r\nx-\r\n", b"--", b"--cut", b"\r\n--cut\n"])
    )
    for _ in range(draw(st.integers(0, 4))):
        body += b"--cut" + draw(st.sampled_from([b"\r\n"] * 8 + [b"\n", b" \r\n", b"--", b"-", b"\r", b""]))
        for head in draw(st.lists(HEADS, min_size=1, max_size=2)):
            body += (head + draw(ENDS)).encode("latin-1", "replace")
        body += draw(st.sampled_from([b"\r\n"] * 8 + [b"\n", b"", b"\r"]))
        body += draw(CONTENTS) + draw(st.sampled_from([b"\r\n"] * 8 + [b"\n", b""]))
    body += draw(st.sampled_from([b"--cut--"] * 4 + [b"--cut--\r\n", b"--cut-", b"--cut", b""]))
    return body + draw(
        st.sampled_from([b"", b"\r\n", b'\r\n--cut\r\nContent-Disposition: form-data; name="model"\r\n\r\nx'])
    )


TYPES = st.sampled_from([TYPE] * 3) | st.lists(
    st.sampled_from(
        [
            "; ", ";", "boundary=cut", 'boundary="cut"', "Boundary=cut", "charset=utf-7", "charset=cp037",
            "Charset=utf-16", 'x="', '"', "\xa0",
        ]
    ),
    max_size=6,
).map(lambda pieces: "multipart/form-data;" + "".join(pieces))  # fmt: skip


@FUZZED
@given(whole_forms(), TYPES, st.integers(1, 200))
@example(
    b'--cut\r\nContent-Disposition: form-data; name="+AG0AbwBkAGUAbA-"\r\n\r\nb\r\n--cut--',
    TYPE + "; charset=utf-7",
    99,
)
def test_a_form_means_the_same_to_starlette_or_is_refused(body: bytes, content_type: str, chunk_bytes: int) -> None:
    try:
        members = drain(scan_form(body, content_type, WANTED))
    except BadBody:
        return
    engine = in_starlette(body, content_type, chunk_bytes)
    if engine is not None:
        ours = {name: body[member.start : member.end] for name, member in members.items()}
        try:
            expected = {name: value.decode() for name, value in ours.items()}
        except UnicodeDecodeError:
            return  # Refused where the values are read.
        assert {name: value for name, value in engine.items() if name in WANTED} == expected


@FUZZED
@given(
    st.lists(st.sampled_from(["boundary", "boundary*", "=", ";", '"', "cut", "utf-8''cot", "\\", " ", "x"]), max_size=9)
)
@example(["boundary", "=", "cut", ";", "boundary*", "=", "utf-8''cot"])
def test_boundary_is_read_as_by_the_engine_or_refused(pieces: list[str]) -> None:
    content_type = "multipart/form-data; " + "".join(pieces)
    for boundary in ("cut", "cot"):
        body = written([([("Content-Disposition", "form-data; name=model")], b"m")]).replace(b"cut", boundary.encode())
        try:
            assert drain(scan_form(body, content_type, WANTED))
        except BadBody:
            continue
        assert options(content_type).get("boundary", boundary) == boundary


@FUZZED
@given(
    st.lists(
        st.sampled_from(
            [b"--cut", b"\r\n", b"\r", b"\n", b"--", b"Content-Disposition: form-data; name=model", b":", b"x", b"\x00"]
        ),
        max_size=14,
    ),
    st.binary(max_size=20),
)
def test_no_form_raises_anything_but_bad_body(pieces: list[bytes], tail: bytes) -> None:
    try:
        drain(scan_form(b"".join(pieces) + tail, TYPE, WANTED))
    except BadBody as bad:
        assert bad.message
