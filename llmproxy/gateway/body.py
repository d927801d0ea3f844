"""What all readers of request bodies share."""

from __future__ import annotations

from enum import StrEnum

# The densest bodies (nothing but brackets) of this size cost a parser and the walk over its result about 5 ms, half of
# what one stretch on the loop may take; `benchmarks/desk.py` measures it.
PARSE_BYTES_MAX = 128 * 1024


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
