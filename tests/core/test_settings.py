from __future__ import annotations

from dataclasses import replace

import pytest

from llmproxy.core.backends.batch_limit import slots_under
from llmproxy.core.domain import CRITICAL, DEFAULT, IDLE, SHEDDABLE
from tests.core.make import DEFAULTS


@pytest.mark.parametrize(
    ("band", "ceiling"),
    [
        (CRITICAL, 1.0),
        (DEFAULT, 0.95),
        (SHEDDABLE, 0.85),
        (50, 0.95),
        (1000, 1.0),
        (-50, 0.85),
        (-150, 0.85),
        (IDLE, 0.01),
        (-1000, 0.01),
    ],
)
def test_band_without_a_ceiling_has_the_ceiling_of_the_next_lower_band(band: int, ceiling: float) -> None:
    assert DEFAULTS.ceiling(band) == ceiling


def test_without_any_ceilings_every_band_may_fill_a_backend() -> None:
    assert replace(DEFAULTS, ceilings={}).ceiling(DEFAULT) == 1.0


def test_the_default_ceilings_hold_a_slot_back_from_sheddable() -> None:
    settings = DEFAULTS
    for limit in range(4, 300):
        by_band = [slots_under(limit, settings.ceiling(band), 2) for band in (CRITICAL, DEFAULT, SHEDDABLE)]
        assert by_band == sorted(by_band, reverse=True)
        assert by_band[0] == limit + 2
        assert by_band[2] <= limit - 1


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_tiny_batch_stays_usable_for_every_band(limit: int) -> None:
    assert slots_under(limit, 0.85, 2) == limit
    assert slots_under(limit, 0.1, 2) == 1
