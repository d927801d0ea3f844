"""Spreading the needed replicas over groups of different price and speed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmproxy.core.scaling.groups import Group, spread, unchanged

CHEAP, DEAR = Group("cheap", cost=1.0, max=3), Group("dear", cost=2.5, speed=2.0)


def desired(need: float, *groups: Group) -> dict[str, int]:
    return {name: one.desired for name, one in spread(need, groups).items()}


@pytest.mark.parametrize(
    ("need", "wanted"),
    [
        (0.0, {"cheap": 0, "dear": 0}),
        (0.4, {"cheap": 1, "dear": 0}),
        (3.0, {"cheap": 3, "dear": 0}),
        # A replica of the dear group does the work of two.
        (4.9, {"cheap": 3, "dear": 1}),
        (5.1, {"cheap": 3, "dear": 2}),
    ],
)
def test_the_cheapest_work_comes_first_and_goes_last(need: float, wanted: dict[str, int]) -> None:
    assert desired(need, DEAR, CHEAP) == wanted


def test_a_fast_replica_may_be_the_cheapest() -> None:
    assert desired(4.0, Group("small", cost=1.0), Group("large", cost=3.0, speed=4.0)) == {"large": 1, "small": 0}


def test_fewest_of_each_are_there_first_and_serve_too() -> None:
    spot, reserved = Group("spot", cost=1.0), Group("reserved", cost=9.0, min=2)
    assert desired(1.0, spot, reserved) == {"spot": 0, "reserved": 2}
    assert desired(4.5, spot, reserved) == {"spot": 3, "reserved": 2}


def test_need_beyond_all_bounds_is_left_out() -> None:
    assert desired(9.0, CHEAP) == {"cheap": 3}


def test_unknown_need_keeps_the_present_replicas() -> None:
    found = unchanged([Group("a", up=3), Group("b", up=0, min=1)])
    assert {name: (one.desired, one.need) for name, one in found.items()} == {"a": (3, 3.0), "b": (1, 1.0)}


GROUPS = st.lists(
    st.builds(
        Group, st.sampled_from("abcdef"), st.floats(0.1, 10.0), st.floats(0.2, 5.0), st.integers(0, 9),
        st.integers(0, 3), st.one_of(st.none(), st.integers(3, 9)),
    ),
    min_size=1, max_size=5, unique_by=lambda one: one.name,
)  # fmt: skip


@given(need=st.floats(0.0, 50.0), more=st.floats(0.0, 20.0), groups=GROUPS)
def test_more_work_never_takes_one_away_and_is_done_where_bounds_allow(
    need: float, more: float, groups: list[Group]
) -> None:
    less, all_ = spread(need, groups), spread(need + more, groups)
    speeds = {one.name: one.speed for one in groups}
    for one in groups:
        assert less[one.name].need <= all_[one.name].need + 1e-9
        assert one.min <= less[one.name].desired <= (one.max if one.max is not None else 10**9)
    if all(one.max is None for one in groups):
        assert sum(less[name].need * speed for name, speed in speeds.items()) >= need - 1e-6
