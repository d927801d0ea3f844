"""Tests of the checks of full fleets."""

from __future__ import annotations

from benchmarks.load import Seen
from benchmarks.small_fleets.saturation import LONG_S, answered


def test_critical_requests_that_starve_or_fail_are_no_success() -> None:
    good = Seen(0.0, first_s=0.1, ended_s=0.2, status=200, whole=True)
    for seen, ages_s, met in (
        ([good], [], [True, True]),
        ([good], [0.1], [True, True]),
        ([good], [2 * LONG_S, 0.1], [True, False]),
        ([good, Seen(0.0, ended_s=9.0, status=503)], [], [False, True]),
    ):
        assert [one.met for one in answered(seen, ages_s)] == met
