"""Parses a backend's answer to `/v1/models` into a `Listing`, in slices that do not block the event loop."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import msgspec
import orjson

from llmproxy.core.backends.catalogue import NAME_CHARS_MAX
from llmproxy.core.domain import Listing, ModelCard

CARDS_MAX = 10_000
CARD_BYTES_MAX = 32 << 10  # The maximum bytes of one model card. A card of vLLM has 0.5 KB.
COMMAS_MAX = 1 << 18
"""The maximum number of commas in an answer, because each may add a Python object. A card of vLLM has 23."""

_SLICE_BYTES = 32 << 10


class _List(msgspec.Struct):
    """A model list whose cards are not parsed yet. Finding the cards costs a tenth of parsing them."""

    data: list[msgspec.Raw]


_DECODER = msgspec.json.Decoder(_List)


def parse_listing(body: bytes, taken_at_s: float) -> Generator[None, None, Listing]:
    """Parses the answer to `/v1/models` into model cards, in their order and with all their fields.

    `taken_at_s` is the time when the request was sent. A card without a `parent` is a base model. Yields after at most
    some milliseconds of work. Raises ValueError, with a reason for people, if the answer is no model list or exceeds
    CARDS_MAX, COMMAS_MAX or, in a card, CARD_BYTES_MAX.
    """
    if (commas := body.count(b",")) > COMMAS_MAX:
        raise ValueError(f"the model list has {commas} commas, more than the {COMMAS_MAX} that are accepted")
    try:
        entries = _DECODER.decode(body).data
    except msgspec.ValidationError as error:
        raise ValueError(f'the model list has no "data" list: {error}') from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"the model list is not JSON: {error}") from None
    if len(entries) > CARDS_MAX:
        raise ValueError(f"the model list has {len(entries)} entries, more than the {CARDS_MAX} that are accepted")
    cards: list[ModelCard] = []
    read_bytes = 0
    for index, entry in enumerate(map(bytes, entries)):
        if len(entry) > CARD_BYTES_MAX:
            message = f"entry {index} of the model list has {len(entry)} bytes, more than the {CARD_BYTES_MAX}"
            raise ValueError(f"{message} that are accepted")
        cards.append(_card(_parsed(entry), index))
        read_bytes += len(entry)
        if read_bytes > _SLICE_BYTES:
            read_bytes = 0
            yield
    return Listing(taken_at_s, tuple(cards))


def _parsed(entry: bytes) -> Any:
    try:
        return orjson.loads(entry)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"the model list is not JSON: {error}") from None


def _card(entry: Any, index: int) -> ModelCard:
    if not isinstance(entry, dict):
        raise ValueError(f"entry {index} of the model list is not an object")
    name, parent, max_model_len = entry.get("id"), entry.get("parent"), entry.get("max_model_len")
    if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS_MAX:
        raise ValueError(f'entry {index} of the model list has no usable "id"')
    if parent is not None and not isinstance(parent, str):
        raise ValueError(f'entry {index} of the model list has a "parent" that is not a name')
    # JSON's true is an int in Python, but no length.
    has_len = isinstance(max_model_len, int) and not isinstance(max_model_len, bool) and max_model_len > 0
    return ModelCard(name, parent or None, max_model_len if has_len else None, entry)
