"""How many requests are sent to a full engine."""

from __future__ import annotations

import pytest

from llmproxy.core.backends.backend import Backend
from llmproxy.core.backends.look_ahead import GAIN, SHARE_MAX, STEPS, TRAVEL_S, LookAhead
from llmproxy.core.domain import Verdict
from llmproxy.core.settings import CapacitySettings, HealthSettings
from tests.core.make import listing, request


def learned(sequence_s: float, tokens: float) -> LookAhead:
    ahead = LookAhead()
    ahead.ended(sequence_s, tokens)
    return ahead


@pytest.mark.parametrize(
    ("limit", "sequence_s", "tokens", "requests"),
    [(8, 4.0, 512, 0), (64, 6.0, 512, 0), (256, 8.0, 512, 1), (256, 3.0, 200, 4), (256, 1.0, 50, 13), (8, 0.2, 20, 1)],
)
def test_look_ahead_is_what_a_batch_ends_during_the_way(
    limit: int, sequence_s: float, tokens: int, requests: int
) -> None:
    way_s = TRAVEL_S + STEPS * sequence_s / tokens
    assert requests - 0.5 <= limit * way_s / sequence_s < requests + 0.5
    assert learned(sequence_s, tokens).requests(limit) == requests


@pytest.mark.parametrize("limit", [1, 3, 4, 8, 256])
def test_look_ahead_is_at_most_a_share_of_the_batch(limit: int) -> None:
    assert learned(0.001, 1).requests(limit) == limit // SHARE_MAX


def test_nothing_is_sent_ahead_before_anything_has_ended() -> None:
    assert LookAhead().requests(256) == 0


def test_look_ahead_follows_shorter_answers() -> None:
    ahead = learned(8.0, 512)
    for _ in range(round(10 / GAIN)):
        ahead.ended(0.5, 32)
    assert ahead.requests(64) == learned(0.5, 32).requests(64) > 0


def backend(look_ahead: int | None) -> Backend:
    made = Backend("a", CapacitySettings(look_ahead=look_ahead), HealthSettings(), 64)
    made.answered(0.0)
    made.listed(listing())
    return made


@pytest.mark.parametrize(
    ("verdict", "output_tokens", "learns"),
    [(Verdict.SERVED, 20, True), (Verdict.SERVED, 0, False), (Verdict.CLIENT_GONE, 20, False)],
)
def test_backend_learns_from_whole_and_counted_answers(verdict: Verdict, output_tokens: int, learns: bool) -> None:
    one = backend(None)
    one.book(1, request(), 0.0)
    one.release(1, verdict, 0.2, output_tokens)
    assert (one.view(0.2).look_ahead > 0) is learns


def test_each_sequence_of_a_request_has_its_share_of_the_tokens() -> None:
    one = backend(None)
    one.book(1, request(sequences=4), 0.0)
    one.release(1, Verdict.SERVED, 1.0, 400)
    assert one.view(1.0).look_ahead == learned(1.0, 100).requests(64)


def test_new_process_resets_the_mean_and_a_configured_number_stays() -> None:
    for look_ahead, after in ((None, 0), (5, 5)):
        one = backend(look_ahead)
        one.book(1, request(), 0.0)
        one.release(1, Verdict.SERVED, 0.2, 20)
        one.replaced()
        assert one.view(0.3).look_ahead == after
