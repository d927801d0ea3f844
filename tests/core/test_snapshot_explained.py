"""The last placements of a pool, their predictions, and the learned speed."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from llmproxy.core.domain import Grant, Learned, Predicted, Request, Usage, Verdict
from llmproxy.core.lease_events import Returned, Started
from llmproxy.core.placement.cost import EXPLAINED_MAX
from llmproxy.core.pools import Pools
from llmproxy.core.snapshot import PoolChoices
from tests.core import make
from tests.core.make import DEFAULTS, listing, only_grant, reading, request


def pools(*backends: str, placement: str = "cost") -> Pools:
    made = make.pools(dict.fromkeys(backends, 8), dataclasses.replace(DEFAULTS, placement=placement))
    for name in backends:
        made.backends[name].observe(reading(kv_tokens=20_000))
    return made


def granted(of: Pools, asked: Request, now: float, excluded: frozenset[str] = frozenset()) -> Grant:
    of.submit(replace(asked, arrived_s=now, deadline_s=now + 60.0), now, excluded)
    return only_grant(of, now)


def serve(of: Pools, asked: Request, now: float, took_s: float, output_tokens: int = 11) -> Grant:
    """Serves a request: the first byte comes after half of the time, the tokens in the other half."""
    grant = granted(of, asked, now)
    of.apply(Started(grant.lease), now + took_s / 2)
    of.apply(Returned(grant.lease, Verdict.SERVED, Usage(asked.prompt_tokens, output_tokens)), now + took_s)
    return grant


def choices(of: Pools, now: float) -> PoolChoices:
    (pool,) = of.choices(now)
    return pool


def learned_by(of: Pools, now: float) -> Learned:
    learned = choices(of, now).learned
    assert learned is not None
    return learned


def test_choices_are_shown_with_all_candidates_and_the_newest_first() -> None:
    of = pools("a", "b")
    first = granted(of, request(id="1", label="one", prompt_tokens=30), 1.0)
    second = granted(of, request(id="2", label="two", prompt_tokens=40), 2.0)
    shown = choices(of, 3.0)
    assert shown.pool == "base"
    assert [(c.id, c.label, c.model, c.at_s, c.prompt_tokens) for c in shown.choices] == [
        ("2", "two", "base", 2.0, 40),
        ("1", "one", "base", 1.0, 30),
    ]
    for choice, grant in zip(shown.choices, (second, first), strict=True):
        assert {price.backend for price in choice.prices} == {"a", "b"}
        assert choice.chosen == grant.placed.backend
        (taken,) = [price for price in choice.prices if price.backend == choice.chosen]
        assert (taken.total_s, taken.terms) == (grant.placed.score, grant.placed.terms)


def test_remembered_choices_are_bounded() -> None:
    of = pools("a")
    for number in range(EXPLAINED_MAX + 5):
        serve(of, request(id=str(number)), float(number), 0.1)
    shown = [choice.id for choice in choices(of, 1e3).choices]
    assert shown == [str(number) for number in reversed(range(5, EXPLAINED_MAX + 5))]


def test_choice_predicts_an_expected_and_a_p90_time() -> None:
    of = pools("a")
    # A late first byte proves nothing about the tokens after it.
    serve(of, request(stream=True), 0.0, 5.0, output_tokens=1)
    placed = granted(of, request(prompt_tokens=1_500, stream=True), 60.0).placed
    (price,) = choices(of, 60.0).choices[0].prices
    learned = learned_by(of, 60.0)
    assert learned.ttft_p90_factor > learned.tpot_p90_factor > 1.0
    assert placed.ttft == Predicted(price.ttft_s, price.ttft_s * learned.ttft_p90_factor)
    assert placed.tpot == Predicted(price.tpot_s, price.tpot_s * learned.tpot_p90_factor)


def test_p90_follows_observed_times() -> None:
    of = pools("a")
    before = learned_by(of, 0.0)
    for number in range(40):
        # Occasionally ten times as long, so that the mean does not follow.
        serve(of, request(stream=True), 100.0 * number, 0.1 if number % 3 else 10.0)
    after = learned_by(of, 1e4)
    assert after.ttft_p90_factor > before.ttft_p90_factor
    assert after.tpot_p90_factor > before.tpot_p90_factor


def test_how_far_off_a_prediction_was() -> None:
    predicted = Predicted(0.5, 1.0)
    assert [predicted.error_ratio(observed_s) for observed_s in (0.25, 0.5, 2.0)] == [1.0, 0.0, 0.75]
    assert [predicted.covers(observed_s) for observed_s in (0.5, 1.0, 1.1)] == [True, True, False]


def test_learned_paces_of_all_backends_are_shown() -> None:
    of = pools("a", "b", "c")
    now = 0.0
    for number in range(150):
        # All backends take turns, whatever their prices.
        others = frozenset("abc") - {"abc"[number % 3]}
        grant = granted(of, request(prompt_tokens=1_000 + 100 * (number % 10), stream=True), now, others)
        slower = {"a": 1.0, "b": 3.0, "c": 1.0}[grant.placed.backend]
        prompt_s = slower * (0.01 + grant.request.prompt_tokens / 10_000)
        of.apply(Started(grant.lease), now + prompt_s)
        of.apply(Returned(grant.lease, Verdict.SERVED, Usage(1_000, 11)), now + prompt_s + slower * 0.2)
        now += 60.0
    learned = learned_by(of, now)
    pace = {one.backend: one for one in learned.backends}
    assert list(pace) == ["a", "b", "c"]
    assert pace["b"].prefill_factor / pace["a"].prefill_factor == pytest.approx(3.0, rel=0.2)
    assert pace["b"].step_factor / pace["a"].step_factor == pytest.approx(3.0, rel=0.2)
    took_s = pace["a"].prefill_factor * (learned.prefill_base_s + 1_500 * learned.prefill_token_s)
    assert took_s == pytest.approx(0.16, rel=0.1)
    assert pace["a"].step_factor * learned.step_s == pytest.approx(0.02, rel=0.1)
    assert learned.sequence_s < learned.step_s


def test_load_and_cache_of_a_backend_are_shown() -> None:
    of = pools("a")
    asked = request(prompt_tokens=1_000, prefix=tuple(range(10)), prefix_tokens=100.0, sequences=2, stream=True)
    grant = granted(of, asked, 0.0)
    (busy,) = learned_by(of, 0.0).backends
    assert (busy.in_flight, busy.indexed_blocks, busy.indexed_blocks_max) == (2, 0, 200)
    assert busy.busy_share > 0.0
    of.apply(Started(grant.lease), 0.1)
    of.apply(Returned(grant.lease, Verdict.SERVED, Usage(1_000, 4)), 1.0)
    (idle,) = learned_by(of, 60.0).backends
    assert (idle.in_flight, idle.indexed_blocks) == (0, 10)
    assert idle.busy_share < busy.busy_share


def test_a_backend_that_was_never_asked_is_shown_as_its_pool_is() -> None:
    learned = learned_by(pools("a", "b"), 5.0)
    assert [(one.backend, one.prefill_factor, one.step_factor, one.busy_share) for one in learned.backends] == [
        ("a", 1.0, 1.0, 0.0),
        ("b", 1.0, 1.0, 0.0),
    ]


def test_a_backend_that_left_the_pool_is_shown_no_more() -> None:
    of = pools("a", "b")
    of.listed("b", listing(base="other"))
    for pool in of.choices(0.0):
        assert pool.learned is not None
        assert [one.backend for one in pool.learned.backends] == (["a"] if pool.pool == "base" else ["b"])


@pytest.mark.parametrize("placement", ["least_request", "session"])
def test_a_placement_without_prices_says_that_it_has_none(placement: str) -> None:
    of = pools("a", placement=placement)
    placed = granted(of, request(), 0.0).placed
    assert (placed.ttft, placed.tpot) == (None, None)
    assert choices(of, 1.0) == PoolChoices("base", (), None)
