"""Builds the heads of HTTP/1.1 messages: requests to backends and responses to clients (RFC 9112, sections 2 to 5)."""

from __future__ import annotations

from collections.abc import Iterable


def head(first_line: str, fields: Iterable[tuple[str, str]]) -> bytes:
    """Returns the first line and the fields of a message as bytes, with the blank line at the end.

    Raises ValueError for a line break in a field, which would add another field.
    """
    lines = [first_line]
    for name, value in fields:
        lines.append(f"{name}: {value}")
    text = "\r\n".join(lines) + "\r\n\r\n"
    breaks = len(lines) + 1
    if text.count("\n") != breaks or text.count("\r") != breaks:
        raise ValueError("a line break within a header field")
    return text.encode("utf-8", "surrogateescape")
