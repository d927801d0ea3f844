from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from llmproxy.core.backends.view import View
from llmproxy.core.domain import NoCapacity, NoMatch, Placed
from llmproxy.core.placement.policy import Placement, make, presets
from tests.core.make import request, view

PRESETS = sorted(presets.names())
NONE: frozenset[str] = frozenset()


def chosen(
    preset: str,
    views: Sequence[View],
    times: int = 1,
    ceiling: float = 1.0,
    excluded: frozenset[str] = NONE,
    **facts: int,
) -> Counter[str]:
    placement = make(preset, Random(7))
    return Counter(placed(placement, views, ceiling, excluded, **facts).backend for _ in range(times))


def placed(
    by: Placement, views: Sequence[View], ceiling: float = 1.0, excluded: frozenset[str] = NONE, **facts: Any
) -> Placed:
    found = by.place(request(**facts), views, ceiling, excluded, 0.0)
    assert isinstance(found, Placed), found
    return found


@pytest.fixture(params=PRESETS)
def preset(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# --- filters, the same for every preset -------------------------------------------------------------------------------


def test_no_room_anywhere_differs_from_no_room_for_this_one(preset: str) -> None:
    full, down = view("full", load=10), view("down", available=False)
    roomy_elsewhere = view("other", served=frozenset({"other"}))
    place = make(preset, Random(0)).place
    assert place(request(), [], 1.0, NONE, 0.0) == NoCapacity()
    assert place(request(), [full, down], 1.0, NONE, 0.0) == NoCapacity()
    assert place(request(), [full, down, roomy_elsewhere], 1.0, NONE, 0.0) == NoMatch(whole_model=True)
    assert place(request(), [full, view("a")], 1.0, frozenset({"a"}), 0.0) == NoMatch(whole_model=True)


def test_filters_leave_only_fitting_backends(preset: str) -> None:
    views = [
        view("full", load=10),
        view("down", available=False),
        view("cache", load=1, kv_used=0.99),
        view("foreign", served=frozenset({"other"})),
        view("failed"),
        view("short", max_model_len=50),
        view("fits", load=9),
    ]
    found = chosen(preset, views, times=20, excluded=frozenset({"failed"}), prompt_tokens=60, max_tokens=10)
    assert set(found) == {"fits"}


def test_a_lower_ceiling_sees_less_room(preset: str) -> None:
    views = [view("a", limit=10, load=9)]
    assert chosen(preset, views, ceiling=1.0) == {"a": 1}
    assert make(preset, Random(0)).place(request(), views, 0.85, NONE, 0.0) == NoCapacity()


def test_an_adapter_goes_only_where_it_is_listed(preset: str) -> None:
    views = [view("a"), view("b", served=frozenset({"base", "lora"}), load=5)]
    placement = make(preset, Random(0))
    for _ in range(10):
        found = placed(placement, views, adapter="lora")
        assert (found.backend, found.candidates) == ("b", 1)


def test_a_long_request_waits_for_the_long_context(preset: str) -> None:
    short, long = view("short", max_model_len=100), view("long", max_model_len=1000, load=10)
    place = make(preset, Random(0)).place
    assert place(request(prompt_tokens=500), [short, long], 1.0, NONE, 0.0) == NoMatch(whole_model=False)
    assert place(request(prompt_tokens=90, max_tokens=20), [short, long], 1.0, NONE, 0.0) == NoMatch(whole_model=False)
    assert chosen(preset, [short, long], prompt_tokens=90, max_tokens=10) == {"short": 1}


def test_prompt_beyond_the_longest_context_goes_to_the_engine(preset: str) -> None:
    short, long = view("short", max_model_len=100), view("long", max_model_len=1000)
    assert set(chosen(preset, [short, long], times=20, prompt_tokens=5000)) == {"long"}


def test_excluded_long_context_is_not_waited_for(preset: str) -> None:
    short, long = view("short", max_model_len=100), view("long", max_model_len=1000)
    assert chosen(preset, [short, long], excluded=frozenset({"long"}), prompt_tokens=500) == {"short": 1}


def test_an_unknown_context_length_holds_anything(preset: str) -> None:
    assert chosen(preset, [view("a", max_model_len=None)], prompt_tokens=10**6) == {"a": 1}


def test_one_preset_and_seed_always_choose_alike(preset: str) -> None:
    views = [view(name, load=load) for name, load in [("a", 1), ("b", 1), ("c", 2), ("d", 1)]]

    def trace() -> list[str]:
        placement = make(preset, Random(3))
        return [placed(placement, views).backend for _ in range(30)]

    assert trace() == trace()


# --- each preset's own choice -----------------------------------------------------------------------------------------


def test_equal_backends_share_alike() -> None:
    found = chosen("least_request", [view(name) for name in "abcd"], times=4000)
    assert all(850 <= found[name] <= 1150 for name in "abcd"), found


def test_least_request_counts_load_against_size() -> None:
    views = [view("small", limit=10, load=2), view("big", limit=100, load=10), view("mid", limit=50, load=9)]
    assert chosen("least_request", views, times=20) == {"big": 20}


def test_round_robin_goes_by_name_and_skips_full_backends() -> None:
    placement = make("round_robin", Random(0))
    a, b, c = view("a"), view("b"), view("c")
    rounds = ([c, a, b], [c, a, b], [c, a, b], [b, a, c], [a, view("b", load=10), c], [a, b, c])
    assert [placed(placement, views).backend for views in rounds] == ["a", "b", "c", "a", "c", "a"]
