"""The room that ceilings keep free for higher bands, and its use while no higher band is in use."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmproxy.core.backends.batch_limit import RESERVE_FROM, slots_under
from llmproxy.core.domain import CRITICAL, DEFAULT, IDLE, SHEDDABLE, Grant, Verdict
from llmproxy.core.lease_events import Returned
from llmproxy.core.queueing.headroom import Headroom
from tests.core.make import DEFAULTS, only_grant, pools, request, submit, tight


def test_nothing_is_kept_for_bands_that_nobody_uses() -> None:
    headroom = Headroom(DEFAULTS)
    assert [headroom.ceiling(band, 0.0) for band in (CRITICAL, DEFAULT, SHEDDABLE)] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("used", "ceilings"),
    [
        (CRITICAL, [1.0, 0.95, 0.95]),
        (DEFAULT, [1.0, 1.0, 0.85]),
        (SHEDDABLE, [1.0, 1.0, 1.0]),
        (SHEDDABLE - 1, [1.0, 1.0, 1.0]),
        (CRITICAL + 7, [0.99, 0.95, 0.95]),
        (DEFAULT + 7, [1.0, 0.95, 0.85]),
    ],
)
def test_a_band_waits_for_the_next_one_above_it_that_is_in_use(used: int, ceilings: list[float]) -> None:
    headroom = Headroom(DEFAULTS)
    headroom.used(used, 5.0)
    assert [headroom.ceiling(band, 5.0) for band in (CRITICAL, DEFAULT, SHEDDABLE)] == ceilings


@pytest.mark.parametrize(("used", "ceiling"), [(CRITICAL, 0.01), (DEFAULT, 0.01), (SHEDDABLE, 0.01), (IDLE, 1.0)])
def test_idle_requests_use_no_slots_of_other_bands_until_nobody_else_is_there(used: int, ceiling: float) -> None:
    headroom = Headroom(replace(DEFAULTS, headroom_s=10.0))
    headroom.used(used, 0.0)
    assert headroom.ceiling(IDLE, 9.0) == ceiling
    assert headroom.ceiling(IDLE, 10.0) == 1.0


def test_a_band_is_in_use_for_a_while_after_its_last_request() -> None:
    headroom = Headroom(replace(DEFAULTS, headroom_s=10.0))
    assert headroom.changes_at(0.0) is None
    headroom.used(CRITICAL, 1.0)
    headroom.used(DEFAULT, 3.0)
    headroom.used(CRITICAL, 2.0)
    assert (headroom.ceiling(DEFAULT, 11.9), headroom.changes_at(11.9)) == (0.95, 12.0)
    assert (headroom.ceiling(DEFAULT, 12.0), headroom.changes_at(12.0)) == (1.0, 13.0)
    assert headroom.ceiling(SHEDDABLE, 12.9) == 0.85
    assert (headroom.ceiling(SHEDDABLE, 13.0), headroom.changes_at(13.0)) == (1.0, None)


def test_headroom_without_end_is_kept_before_the_first_request() -> None:
    headroom = Headroom(replace(DEFAULTS, headroom_s=inf))
    assert [headroom.ceiling(band, 0.0) for band in (CRITICAL, DEFAULT, SHEDDABLE)] == [1.0, 0.95, 0.85]
    headroom.used(CRITICAL, 0.0)
    assert headroom.changes_at(1.0) is None


def test_no_band_may_ever_fill_more_than_one_above_it() -> None:
    for last in (CRITICAL, DEFAULT, SHEDDABLE, 50, -150):
        headroom = Headroom(DEFAULTS)
        headroom.used(last, 0.0)
        ceilings = [headroom.ceiling(band, 1.0) for band in (-150, SHEDDABLE, DEFAULT, 50, CRITICAL, 101)]
        assert ceilings == sorted(ceilings)


def test_waiting_requests_get_lapsed_headroom_without_an_event() -> None:
    one = pools({"a": 20}, tight(headroom_s=10.0))
    submit(one, *(request(band=band) for band in (CRITICAL, *[DEFAULT] * 30)))

    def granted(now: float) -> int:
        return sum(isinstance(decision, Grant) for decision in one.decide(now))

    assert granted(0.0) == 19
    assert one.next_wakeup(0.0) == 10.0
    assert granted(9.9) == 0
    assert granted(10.0) == 1


TIGHT = tight()
BANDS = (CRITICAL + 7, CRITICAL, 50, DEFAULT, SHEDDABLE)
FRACTIONS = st.floats(min_value=0.01, max_value=1.0)
FALLING = st.lists(FRACTIONS, min_size=3, max_size=3).map(
    lambda three: dict(zip((CRITICAL, DEFAULT, SHEDDABLE), sorted(three, reverse=True), strict=True))
)


@given(
    limits=st.lists(st.integers(1, 64), min_size=1, max_size=3),
    ceilings=FALLING,
    used=st.sets(st.sampled_from(BANDS), min_size=2),
    headroom_s=st.sampled_from((10.0, inf)),
)
def test_below_the_highest_band_in_use_a_slot_is_always_free(
    limits: list[int], ceilings: dict[int, float], used: set[int], headroom_s: float
) -> None:
    settings = tight(ceilings=ceilings, headroom_s=headroom_s, placement="least_request")
    one = pools({f"b{number}": limit for number, limit in enumerate(limits)}, settings)
    highest = max(used | set(ceilings)) if headroom_s == inf else max(used)
    one.submit(request(band=highest), 0.0)
    first = only_grant(one, 0.0)
    one.apply(Returned(first.lease, Verdict.SERVED), 1.0)
    for band in sorted(used - {highest}):
        submit(one, *(request(band=band) for _ in range(sum(limits) + 10)), now=2.0)
    assert one.decide(2.0), "the bands below are not served at all"
    while one.decide(2.0):
        pass
    top = settings.ceiling_range[1]
    if len(limits) == 1 and one.backends["b0"].view(2.0).slots(top) == 1:
        return
    for backend in one.backends.values():
        view = backend.view(2.0)
        if view.limit >= 4 and view.slots(top) > 1:
            assert view.load < view.limit
            assert view.has_room(top)
    one.submit(request(band=highest), 3.0)
    assert [type(decision) for decision in one.decide(3.0)] == [Grant]


@pytest.mark.parametrize("limit", range(RESERVE_FROM, 65))
def test_backends_of_four_or_more_keep_a_slot_for_the_highest_band(limit: int) -> None:
    for highest in (1.0, 0.95, 0.9, 0.5, 0.3):
        slots = slots_under(limit, highest, 0, highest)
        for percent in range(1, 100):
            below = slots_under(limit, highest * percent / 100, 0, highest)
            assert 1 <= below <= max(1, slots - 1)


SMALL = [((1,), 1), ((2,), 1), ((3,), 2), ((1, 1), 1), ((3, 2, 1), 5)]


@pytest.mark.parametrize("band", [DEFAULT, SHEDDABLE])
@pytest.mark.parametrize(("limits", "granted"), [*SMALL, ((4, 4), 6), ((8, 8), 14)])
def test_small_replicas_keep_one_slot_together_and_larger_ones_each(
    limits: tuple[int, ...], granted: int, band: int
) -> None:
    one = pools({f"b{number}": limit for number, limit in enumerate(limits)}, TIGHT)
    one.submit(request(band=CRITICAL), 0.0)
    first = only_grant(one, 0.0)
    one.apply(Returned(first.lease, Verdict.SERVED), 0.5)
    submit(one, *(request(band=band, deadline_s=100.0) for _ in range(20)), now=1.0)
    (seen,) = one.snapshot(1.0).pools
    assert {shown.level: shown.places for shown in seen.bands}[band] == granted
    assert len(one.decide(1.0)) == granted
    # Nobody asked for more in a minute: it all goes to who waits.
    assert len(one.decide(60.5)) == sum(limits) - granted


def test_headroom_can_be_turned_off() -> None:
    one = pools({"a": 8}, tight(headroom_s=0.0))
    submit(one, request(band=CRITICAL), *(request(band=SHEDDABLE) for _ in range(20)))
    assert len(one.decide(0.0)) == 8
