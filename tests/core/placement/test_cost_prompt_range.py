"""Backends that are meant for prompts of some lengths: a preference that enters the price."""

from __future__ import annotations

from random import Random

from msgspec.structs import replace

from llmproxy.core.backends.view import View
from llmproxy.core.domain import Placed, Request
from llmproxy.core.placement.cost import ASIDE_S, CostPlacement
from llmproxy.core.settings import Settings
from tests.core.make import pools, request, view

LONG = request(prompt_tokens=501)
SHORT = replace(LONG, prompt_tokens=500)
MEANT_FOR_SHORT = view("short", prompt_range=(1, 500))
BUSY = view("any", load=9, limit=10, kv_used=0.2)


def place(asked: Request, *views: View) -> Placed:
    placed = CostPlacement(Random(0)).place(asked, views, 1.0, frozenset(), 0.0)
    assert isinstance(placed, Placed)
    return placed


def test_prompt_of_another_length_prefers_a_busier_backend() -> None:
    assert place(LONG, MEANT_FOR_SHORT, BUSY).backend == "any"
    assert place(SHORT, MEANT_FOR_SHORT, BUSY).backend == "short"


def test_prompt_of_another_length_goes_there_without_alternative() -> None:
    assert ("range", ASIDE_S) in place(LONG, MEANT_FOR_SHORT).terms
    assert "range" not in dict(place(SHORT, MEANT_FOR_SHORT).terms)


def test_the_views_of_a_backend_tell_its_range() -> None:
    house = pools({"a": 1, "b": 1}, Settings(prompt_ranges={"b": (10, 20)}))
    assert {name: one.prompt_range for name, one in house.views(0.0).items()} == {"a": None, "b": (10, 20)}
