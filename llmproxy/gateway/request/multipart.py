"""Finds the small fields of a multipart/form-data body, without copying or reading its files.

A header of a part that two parsers could read in different ways is refused. The engine reads the same bytes with its
own parser, and the proxy and the engine must find the same `model`.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from llmproxy.gateway.request.json_scan import BadBody, Kind, Member, Slices

PARTS_MAX = 256
PART_HEAD_BYTES_MAX = 16 * 1024
FIELD_BYTES_MAX = 4096
SLICE_BYTES = 1024 * 1024

_BOUNDARY_BYTES_MAX = 256
# Only space and tab may surround a parameter: parsers differ about other white space.
_PARAM = re.compile(
    r"""[ \t]*+;[ \t]*+([\w!#$%&'*+.^`|~-]++)[ \t]*+=[ \t]*+("(?:[^"\\]|\\.)*+"|[!#-:<-\[\]-~]*+)[ \t]*+""", re.ASCII
)
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_UTF_8 = ("utf-8", "utf8")
# The only extended parameter (RFC 8187) that clients send. Some parsers read others, such as `name*`, as plain.
_EXTENDED = "filename*"


def scan_form(body: bytes, content_type: str, wanted: Collection[str]) -> Slices[dict[str, Member]]:
    """Returns the positions of the values of the `wanted` fields of a form.

    Yields after each megabyte searched. Raises BadBody if the boundary is missing, the parts are not well-formed, or a
    wanted field is longer than FIELD_BYTES_MAX, given twice, or given as a file.
    """
    delimiter = b"--" + _boundary(content_type)
    found: dict[str, Member] = {}
    at = yield from _find(body, delimiter, 0)
    # The first delimiter may follow a preamble. Every later delimiter begins with a line break.
    if at < 0 or (at > 0 and body[at - 2 : at] != b"\r\n"):
        raise BadBody("The form does not begin with the boundary that its content-type names.")
    at += len(delimiter)
    for _ in range(PARTS_MAX):
        if body.startswith(b"--", at):
            return found
        head_end = body.find(b"\r\n\r\n", at, at + PART_HEAD_BYTES_MAX)
        if head_end < 0 or not body.startswith(b"\r\n", at):
            raise BadBody(f"A part of the form has no proper header (byte {at}).", f"body.{at}")
        start = head_end + 4
        end = yield from _find(body, b"\r\n" + delimiter, start)
        if end < 0:
            raise BadBody(f"The form ends inside the part at byte {at}; its closing boundary is missing.", f"body.{at}")
        name, is_file = _field(body[at:head_end])
        if name in wanted:
            if is_file or name in found:
                raise BadBody(f"The form field {name} is given {'as a file' if is_file else 'twice'}.", f"body.{name}")
            if end - start > FIELD_BYTES_MAX:
                raise BadBody(f"The form field {name} is longer than {FIELD_BYTES_MAX} bytes.", f"body.{name}")
            found[name] = Member(Kind.STRING, start, end)
        at = end + 2 + len(delimiter)
        yield
    raise BadBody(f"The form has more than {PARTS_MAX} parts.")


def _boundary(content_type: str) -> bytes:
    kind, _, _ = content_type.partition(";")
    if kind.strip().lower() != "multipart/form-data":
        raise BadBody("This endpoint takes multipart/form-data.", "content-type")
    params = _params(content_type)
    boundary = params.pop("boundary", "")
    # With another charset, the engine's framework would decode names and values differently.
    if params.pop("charset", "utf-8").lower() not in _UTF_8:
        raise BadBody("The charset of a form has to be utf-8.", "content-type")
    if params:
        message = f"The content-type of a form takes boundary and charset only: leave out {', '.join(params)[:200]}."
        raise BadBody(message, "content-type")
    if not boundary or len(boundary) > _BOUNDARY_BYTES_MAX or not boundary.isascii() or "\\" in boundary:
        raise BadBody("The content-type names no usable boundary for the form.", "content-type")
    return boundary.encode()


def _params(header: str) -> dict[str, str]:
    """Returns the parameters of a header value, with names in lower case.

    Raises BadBody if the text after the first `;` is not a list of parameters, or has a parameter twice.
    """
    params: dict[str, str] = {}
    header = header.rstrip("; \t")
    at = len(header.partition(";")[0])
    while at < len(header):
        match = _PARAM.match(header, at)
        name = match.group(1).lower() if match is not None else ""
        if match is None or name in params or ("*" in name and name != _EXTENDED):
            raise BadBody("A header of the form has parameters that can be read in more than one way.")
        value = match.group(2)
        params[name] = value[1:-1] if value.startswith('"') else value
        at = match.end()
    return params


def _field(head: bytes) -> tuple[str, bool]:
    """Returns the name of a form field ("" if it has none), and whether the field is a file."""
    lines = head.decode("utf-8", "replace").split("\r\n")
    if any(map(_CONTROL.search, lines)):
        raise BadBody("The header of a part of the form has a control character.")
    fields = [(name.strip().lower(), value) for name, _, value in (line.partition(":") for line in lines)]
    dispositions = [value for name, value in fields if name == "content-disposition"]
    if len(dispositions) > 1:
        raise BadBody("A part of the form has more than one Content-Disposition.")
    # A stray quote before the parameters would turn quoted text into names, and names into quoted text.
    if dispositions and dispositions[0].partition(";")[0].strip(" \t").lower() != "form-data":
        raise BadBody("The Content-Disposition of a part of the form is not form-data.")
    params = _params(dispositions[0]) if dispositions else {}
    name = params.get("name", "")
    if "\\" in name:
        raise BadBody("The name of a form field must not hold a backslash.")
    return name, "filename" in params or _EXTENDED in params


def _find(body: bytes, what: bytes, at: int) -> Slices[int]:
    """Returns the position of `what` in `body` from `at`, or -1. Yields after each megabyte searched."""
    while at < len(body):
        found = body.find(what, at, at + SLICE_BYTES + len(what) - 1)
        if found >= 0:
            return found
        at += SLICE_BYTES
        yield
    return -1
