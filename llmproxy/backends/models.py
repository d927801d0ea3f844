"""One answer of a backend's `/v1/models` becomes one `Listing`. Pure."""

from __future__ import annotations

from typing import Any

import orjson

from llmproxy.core.domain import Listing, ModelCard

CARDS_MAX = 10_000
NAME_CHARS_MAX = 1_024


def parse_listing(body: bytes, taken_at_s: float) -> Listing:
    """Read the model cards in their own order, every field of them kept.

    A card whose `parent` is null (or absent) is a base model. Raises ValueError with a reason for people when the
    answer is not a model list, or is one beyond `CARDS_MAX` cards.
    """
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"the model list is not JSON: {error}") from None
    cards = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(cards, list):
        raise ValueError('the model list has no "data" list')
    if len(cards) > CARDS_MAX:
        raise ValueError(f"the model list has {len(cards)} entries, more than the {CARDS_MAX} that are accepted")
    return Listing(taken_at_s, tuple(_card(entry, index) for index, entry in enumerate(cards)))


def _card(entry: Any, index: int) -> ModelCard:
    if not isinstance(entry, dict):
        raise ValueError(f"entry {index} of the model list is not an object")
    name, parent, max_model_len = entry.get("id"), entry.get("parent"), entry.get("max_model_len")
    if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS_MAX:
        raise ValueError(f'entry {index} of the model list has no usable "id"')
    if parent is not None and not isinstance(parent, str):
        raise ValueError(f'entry {index} of the model list has a "parent" that is not a name')
    # JSON's true is an int to Python, and no length.
    has_len = isinstance(max_model_len, int) and not isinstance(max_model_len, bool) and max_model_len > 0
    return ModelCard(name, parent or None, max_model_len if has_len else None, entry)
