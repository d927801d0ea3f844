"""Answers of another server or another version of llmproxy: a one-line message, and no traceback."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from io import StringIO
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from llmproxy.tools.top.ask import AskError
from llmproxy.tools.top.document import Document, read
from llmproxy.tools.top.picture import picture
from llmproxy.tools.top.scale import scale
from llmproxy.tools.top.story import story
from llmproxy.tools.top.view import View

HERE = Path(__file__).parent
TERMS = dict.fromkeys(("work", "ahead", "queue", "seats", "kv", "adapters"), 1.0)
SCALE: dict[str, Any] = {
    "pools": [
        {
            "pool": "org/model[v2]", "desired": 2, "need": 1.2, "reason": "work", "sure": True, "replicas": {"up": 1},
            "terms": TERMS, "prefill": 0.1, "decode": 0.2, "waiting": {"requests": 1, "seconds": 1.0},
            "replica": {"requests_per_s": 1.0, "seats": 1.0},
            "roles": {"prefill": {"desired": 1, "need": 0.5, "up": 0}},
        }
    ]
}  # fmt: skip
WRONG: tuple[Any, ...] = (None, "", [], {}, -1, 1e308, nan, inf, "x" * 1_000, "\ud800", "\x1b[2J", "[/]", True, [None])
DRAWN: dict[str, tuple[dict[str, Any], Callable[[Any], RenderableType]]] = {
    "live": (
        json.loads((HERE / "live.json").read_text()),
        lambda found: picture(read(found, Document), View(), 80, 24),
    ),
    "story": (json.loads((HERE / "story.json").read_text()), story),
    "scale": (SCALE, scale),
}


def short(found: Any) -> Any:
    """The document with at most one entry in each list: only first entries are damaged, and drawing costs time."""
    if isinstance(found, dict):
        return {key: short(value) for key, value in found.items()}
    return [short(value) for value in found[:1]] if isinstance(found, list) else found


def drawn(made: RenderableType) -> str:
    console = Console(file=StringIO(), width=120, highlight=False, color_system=None)
    with console.capture() as written:
        console.print(made)
    return written.get()


def places(found: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = found.items() if isinstance(found, dict) else enumerate(found[:1]) if isinstance(found, list) else ()
    for key, value in inner:
        yield (*place, key)
        yield from places(value, (*place, key))


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAWN)
def test_any_wrong_value_is_drawn_or_refused(kind: str) -> None:
    whole, draw = DRAWN[kind]
    right, refused = short(whole), 0
    for *outer, last in places(right):
        for value in WRONG:
            found: Any = deepcopy(right)
            part = found
            for key in outer:
                part = part[key]
            part[last] = value
            try:
                assert "\x1b" not in drawn(draw(found))
            except AskError:
                refused += 1
    assert refused > 100


def test_the_name_of_a_pool_is_no_markup() -> None:
    assert drawn(scale(SCALE)).count("org/model[v2]") == 3
