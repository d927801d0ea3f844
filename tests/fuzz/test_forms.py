"""A form says the same here and in the engine, or it is refused: nobody gets past a rule by saying it in two ways.

The engine's framework reads the header of a part with the parser of Python's `email` package, which unfolds the
parameters of RFC 2231 and pairs quotes in its own way; the reference here does the same.
"""

from __future__ import annotations

from email.message import Message
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from llmproxy.gateway.multipart import scan_form
from llmproxy.gateway.scan import BadBody, drain
from tests.fuzz.profile import FUZZED

TYPE = "multipart/form-data; boundary=cut"
WANTED = ("model", "stream")
PARAMS = st.sampled_from(
    [
        "name",
        "NAME",
        "name*",
        "name*0",
        "filename",
        "filename*",
        "x",
        "model",
        "stream",
        "form-data",
        "utf-8''model",
        "=",
        ";",
        '"',
        "\\",
        " ",
        "\t",
        "'",
        "*",
        "a",
        "%6d",
    ]
)
DISPOSITIONS = st.lists(PARAMS, max_size=9).map("".join) | st.lists(
    st.sampled_from(
        [
            'name="model"',
            "name=model",
            "name*=utf-8''model",
            'x="\\"',
            'x="a"b',
            'x=a"b',
            'filename="a"',
            "name*0=mo",
            "name*1=del",
            'x="\\\\"',
            "filename*=utf-8''a",
            "name",
            'name="str\\eam"',
            "name=stream",
        ]
    ),
    max_size=4,
).map(lambda params: "; ".join(["form-data", *params]))
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
    """The plain fields of a form, of equal names the last; None where the engine refuses the form."""
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
        told = options(disposition)
        if "name" not in told:
            return None
        found.pop(told["name"], None)
        if "filename" not in told:
            found[told["name"]] = content
    return found


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


@FUZZED
@given(
    st.lists(st.sampled_from(["boundary", "boundary*", "=", ";", '"', "cut", "utf-8''cot", "\\", " ", "x"]), max_size=9)
)
@example(["boundary", "=", "cut", ";", "boundary*", "=", "utf-8''cot"])
def test_a_boundary_is_that_of_the_engine_or_is_refused(pieces: list[str]) -> None:
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
