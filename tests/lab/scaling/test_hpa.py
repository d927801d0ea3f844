"""The rules of Kubernetes' HPA, by the examples that follow from its documentation and code."""

from __future__ import annotations

from math import inf

import pytest

from llmproxy.lab.scaling.hpa import DEFAULTS, FOLLOWING, Hpa, HpaRules

AT_ONCE = HpaRules(up_pods=100, down_window_s=0.0)


@pytest.mark.parametrize(
    ("there", "value", "wanted"),
    [
        (4, 4.3, 4),  # within a tenth
        (4, 4.5, 5),
        (10, 11.0, 10),  # a whole replica is within the tolerance
        (20, 22.0, 20),
        (20, 22.1, 23),
        (4, 3.7, 4),
        (4, 3.5, 4),  # beyond the tolerance, and rounded up again
        (4, 2.9, 3),
    ],
)
def test_an_average_value_is_rounded_up_beyond_the_tolerance(there: int, value: float, wanted: int) -> None:
    hpa = Hpa(AT_ONCE, 1, 50)
    hpa.replicas = there
    assert hpa.follow(value, 1.0, 0.0) == wanted


def test_without_tolerance_the_number_itself_is_followed() -> None:
    hpa = Hpa(FOLLOWING, 1, 50)
    hpa.replicas = 10
    assert hpa.follow(10.2, 1.0, 0.0) == 11


def test_a_missing_metric_changes_nothing() -> None:
    hpa = Hpa(DEFAULTS, 2, 9)
    hpa.replicas = 5
    assert hpa.follow(None, 1.0, 0.0) == 5


def test_up_doubles_or_adds_four_in_15_s() -> None:
    hpa = Hpa(DEFAULTS, 1, 100)
    seen = [hpa.follow(inf, 1.0, at_s) for at_s in (0.0, 5.0, 15.0, 30.0, 45.0)]
    assert seen == [5, 5, 10, 20, 40]


def test_down_waits_for_the_most_of_five_minutes() -> None:
    hpa = Hpa(DEFAULTS, 1, 100)
    hpa.replicas = 8
    hpa.follow(8.0, 1.0, 0.0)
    assert hpa.follow(2.0, 1.0, 15.0) == 8
    assert hpa.follow(2.0, 1.0, 300.0) == 8
    assert hpa.follow(2.0, 1.0, 316.0) == 2


def test_the_manifests_take_one_a_minute_away() -> None:
    hpa = Hpa(FOLLOWING, 1, 100)
    hpa.replicas = 8
    hpa.follow(8.0, 1.0, 0.0)
    seen = [hpa.follow(1.0, 1.0, at_s) for at_s in (301.0, 316.0, 331.0, 346.0, 362.0)]
    assert seen == [7, 7, 7, 7, 6]


def test_both_bounds_hold() -> None:
    hpa = Hpa(AT_ONCE, 2, 6)
    assert hpa.follow(50.0, 1.0, 0.0) == 6
    assert hpa.follow(0.0, 1.0, 1.0) == 2
