"""The look-ahead of a full engine."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from llmproxy.core.backends.backend import Backend
from llmproxy.core.backends.look_ahead import EMPTY_MAX, SHARE_MAX, LookAhead
from llmproxy.core.domain import Verdict
from tests.core.make import DEFAULTS, listing, reading, request


def learned(load: int, *on_the_way: int) -> LookAhead:
    ahead = LookAhead()
    for number in on_the_way:
        ahead.observe(load, number)
    return ahead


@pytest.mark.sampled(5)
@pytest.mark.parametrize("limit", [4, 8, 16, 64, 256])
@pytest.mark.parametrize("mean", [0.02, 0.1, 0.46, 0.9])
def test_few_places_are_empty_and_one_request_less_would_leave_too_many(limit: int, mean: float) -> None:
    rng = Random(1)
    on_the_way = [sum(rng.random() < mean / limit for _ in range(limit)) for _ in range(20_000)]
    ahead = learned(limit, *on_the_way).requests(limit)

    def empty(ahead: int) -> float:
        return sum(max(0, number - ahead) for number in on_the_way) / len(on_the_way) / limit

    assert empty(ahead) <= 1.2 * EMPTY_MAX or ahead == limit // SHARE_MAX
    assert not ahead or empty(ahead - 1) > 0.8 * EMPTY_MAX


@pytest.mark.parametrize("limit", [1, 3, 4, 8, 256])
def test_look_ahead_is_at_most_a_share_of_the_batch(limit: int) -> None:
    assert learned(limit, limit).requests(limit) == limit // SHARE_MAX


@pytest.mark.parametrize("ahead", [LookAhead(), learned(256, 0), learned(256, -3)])
def test_nothing_is_sent_ahead_while_nothing_is_known_to_be_on_its_way(ahead: LookAhead) -> None:
    assert ahead.requests(256) == 0


def test_look_ahead_follows_the_engine() -> None:
    ahead = learned(64, *[0] * 100, *[6] * 1_000)
    assert ahead.requests(64) == learned(64, 6).requests(64) > 6


# --- readings -------------------------------------------------------------------------------------------------------


def backend(look_ahead: int | None = None, limit: int = 8) -> Backend:
    made = Backend("a", replace(DEFAULTS.capacity, look_ahead=look_ahead), DEFAULTS.health, limit)
    made.answered(0.0)
    made.listed(listing())
    return made


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("load", "running", "waiting", "ahead"),
    [
        pytest.param(8, 7, 0, 2, id="a sequence of a full batch is in transit"),
        pytest.param(10, 8, 1, 2, id="the same with requests in the look-ahead"),
        pytest.param(8, 8, 0, 0, id="all run"),
        pytest.param(8, 6, 2, 0, id="all have arrived"),
        pytest.param(7, 3, 0, 0, id="it is not full"),
        pytest.param(8, 7, 4, 0, id="others use the engine"),
    ],
)
def test_look_ahead_of_a_full_backend_follows_requests_in_transit(
    stream: bool, load: int, running: int, waiting: int, ahead: int
) -> None:
    one = backend()
    for lease in range(load):
        one.book(lease, request(stream=stream), 0.0)
    for at_s in range(1, 6):
        one.observe(reading(float(at_s), running=running, waiting=waiting))
    assert one.view(5.0).look_ahead == ahead


def test_new_process_resets_the_mean_and_a_configured_number_stays() -> None:
    for look_ahead, before, after in ((None, 2, 0), (5, 5, 5)):
        one = backend(look_ahead)
        for lease in range(8):
            one.book(lease, request(), 0.0)
        one.observe(reading(1.0, running=6))
        assert one.view(1.0).look_ahead == before
        for lease in range(8):
            one.release(lease, Verdict.LOST, 1.0)
        one.replaced()
        assert one.view(1.3).look_ahead == after
