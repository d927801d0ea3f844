"""What all readers of request bodies share."""

from __future__ import annotations

from enum import StrEnum

# What is parsed in one go has at most so many bytes and values. Text costs by its bytes, and little; values cost an
# object each: a body of nothing but brackets would hold the loop for some 15 ms, and this many hold it for 2.
# `benchmarks/desk.py` measures it.
PARSE_BYTES_MAX = 128 * 1024
PARSE_VALUES_MAX = 16 * 1024


def parses_at_once(body: bytes) -> bool:
    """Whether a parser holds the loop for no more than about 2 ms; in doubt not, as text may hold brackets too."""
    if len(body) <= 2 * PARSE_VALUES_MAX:
        return True
    # Every value but the outermost follows an opening bracket or a comma.
    return len(body) <= PARSE_BYTES_MAX and sum(map(body.count, (b"[", b"{", b","))) <= PARSE_VALUES_MAX


class BodyKind(StrEnum):
    """How the body of a route is to be read.

    `CHAT` and `COMPLETION` streams can be asked for usage; `OTHER` is any JSON body of an endpoint whose engine does
    not vet `stream`; `FORM` is multipart/form-data.
    """

    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSES = "responses"
    MESSAGES = "messages"
    OTHER = "other"
    FORM = "form"
