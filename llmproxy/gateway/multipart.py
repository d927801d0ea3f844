"""Where the small fields of a multipart/form-data body lie, found without copying or reading the files in it."""

from __future__ import annotations

import re
from collections.abc import Collection

from llmproxy.gateway.scan import BadBody, Kind, Member, Slices

PARTS_MAX = 256
PART_HEAD_BYTES_MAX = 16 * 1024
FIELD_BYTES_MAX = 4096
SLICE_BYTES = 1024 * 1024

_BOUNDARY_BYTES_MAX = 256
_PARAM = re.compile(r';\s*([^\s=;"]+)\s*=\s*("(?:[^"\\]|\\.)*"|[^;\s]*)\s*')


def scan_form(body: bytes, content_type: str, wanted: Collection[str]) -> Slices[dict[str, Member]]:
    """Find the values of the `wanted` fields of a form; the last of equal names wins, parts with a file name are none.

    Yields after each megabyte searched. Raises BadBody where the boundary is missing or the parts are not well-formed.
    """
    delimiter = b"--" + _boundary(content_type)
    found: dict[str, Member] = {}
    at = yield from _find(body, delimiter, 0)
    # The first delimiter may follow a preamble, every further one follows the line break that belongs to it.
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
        name = _field_name(body[at:head_end])
        if name is not None and name in wanted:
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
    boundary = _params(content_type).get("boundary", "")
    if not boundary or len(boundary) > _BOUNDARY_BYTES_MAX or not boundary.isascii():
        raise BadBody("The content-type names no usable boundary for the form.", "content-type")
    return boundary.encode()


def _params(header: str) -> dict[str, str]:
    """The parameters of a header value, names in lower case; what a quoted value contains cannot pass for a name."""
    params: dict[str, str] = {}
    at = header.find(";")
    while at >= 0 and (match := _PARAM.match(header, at)):
        value = match.group(2)
        params[match.group(1).lower()] = re.sub(r"\\(.)", r"\1", value[1:-1]) if value.startswith('"') else value
        at = match.end()
    return params


def _field_name(head: bytes) -> str | None:
    """The name of a plain field from the header block of its part; None for files and for what has no name."""
    for line in head.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            params = _params(value)
            return None if "filename" in params or "filename*" in params else params.get("name")
    return None


def _find(body: bytes, what: bytes, at: int) -> Slices[int]:
    """Like bytes.find, with a pause after each slice."""
    while at < len(body):
        found = body.find(what, at, at + SLICE_BYTES + len(what) - 1)
        if found >= 0:
            return found
        at += SLICE_BYTES
        yield
    return -1
