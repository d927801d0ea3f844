"""What ceilings keep free for higher bands, and when nobody needs it."""

from math import inf

import pytest

from llmproxy.core.domain import CRITICAL, DEFAULT, SHEDDABLE, Grant
from llmproxy.core.reserve import Reserve
from llmproxy.core.settings import CapacitySettings, Settings
from tests.core.make import pools, request


def test_nothing_is_kept_for_bands_that_nobody_uses() -> None:
    reserve = Reserve(Settings())
    assert [reserve.ceiling(band, 0.0) for band in (CRITICAL, DEFAULT, SHEDDABLE)] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("used", "ceilings"),
    [
        (CRITICAL, [1.0, 0.95, 0.95]),
        (DEFAULT, [1.0, 1.0, 0.85]),
        (SHEDDABLE, [1.0, 1.0, 1.0]),
        (SHEDDABLE - 1, [1.0, 1.0, 1.0]),
        (CRITICAL + 7, [1.0, 0.95, 0.95]),
        (DEFAULT + 7, [1.0, 1.0, 0.85]),
    ],
)
def test_a_band_waits_for_the_next_one_above_it_that_is_in_use(used: int, ceilings: list[float]) -> None:
    reserve = Reserve(Settings())
    reserve.used(used, 5.0)
    assert [reserve.ceiling(band, 5.0) for band in (CRITICAL, DEFAULT, SHEDDABLE)] == ceilings


def test_a_band_is_in_use_for_a_while_after_its_last_request() -> None:
    reserve = Reserve(Settings(reserve_s=10.0))
    assert reserve.changes_at(0.0) is None
    reserve.used(CRITICAL, 1.0)
    reserve.used(DEFAULT, 3.0)
    reserve.used(CRITICAL, 2.0)
    assert (reserve.ceiling(DEFAULT, 11.9), reserve.changes_at(11.9)) == (0.95, 12.0)
    assert (reserve.ceiling(DEFAULT, 12.0), reserve.changes_at(12.0)) == (1.0, 13.0)
    assert reserve.ceiling(SHEDDABLE, 12.9) == 0.85
    assert (reserve.ceiling(SHEDDABLE, 13.0), reserve.changes_at(13.0)) == (1.0, None)


def test_a_reserve_without_end_is_kept_before_the_first_request() -> None:
    reserve = Reserve(Settings(reserve_s=inf))
    assert [reserve.ceiling(band, 0.0) for band in (CRITICAL, DEFAULT, SHEDDABLE)] == [1.0, 0.95, 0.85]
    reserve.used(CRITICAL, 0.0)
    assert reserve.changes_at(1.0) is None


def test_no_band_may_ever_fill_more_than_one_above_it() -> None:
    for last in (CRITICAL, DEFAULT, SHEDDABLE, 50, -150):
        reserve = Reserve(Settings())
        reserve.used(last, 0.0)
        ceilings = [reserve.ceiling(band, 1.0) for band in (-150, SHEDDABLE, DEFAULT, 50, CRITICAL, 101)]
        assert ceilings == sorted(ceilings)


def test_what_waits_gets_the_reserve_when_it_lapses_without_any_event() -> None:
    one = pools({"a": 20}, Settings(capacity=CapacitySettings(look_ahead=0), reserve_s=10.0))
    for band in (CRITICAL, *[DEFAULT] * 30):
        one.submit(request(band=band), 0.0)

    def granted(now: float) -> int:
        return sum(isinstance(decision, Grant) for decision in one.decide(now))

    assert granted(0.0) == 19
    assert one.next_wakeup(0.0) == 10.0
    assert granted(9.9) == 0
    assert granted(10.0) == 1
