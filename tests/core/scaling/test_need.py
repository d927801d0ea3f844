"""The number of replicas: the facts that change it, and its value while too little is known."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llmproxy.core.domain import Usage
from llmproxy.core.scaling.curve import StepCurve
from llmproxy.core.scaling.mix import Count, Mix, size_class
from llmproxy.core.scaling.need import Demand, Need, ReplicaFacts, pool_need
from llmproxy.core.settings import ScalingSettings
from tests.core.make import DEFAULTS

SETTINGS = DEFAULTS.scaling
REPLICA = ReplicaFacts(up=True, limit=64, kv_tokens=276_560, kv_used=0.3)
NOBODY = Demand(running=0, others=0, waiting={}, on_hold=0, adapters=0, idle_s=0.0)


def known_curve() -> StepCurve:
    rng, curve = Random(1), StepCurve()
    for i in range(300):
        n, tokens = rng.uniform(4.0, 60.0), rng.uniform(0.0, 20_000.0)
        curve.learn(500.0, 500.0 * (0.0145 + 0.00022 * n) + 0.00005 * tokens, n, tokens, i * 0.1)
    return curve


def mix_of(per_s: float, prompt: int, output: int, begin_s: int = 0, until_s: int = 300, cached: int = 0) -> Mix:
    mix = Mix()
    for _ in range(60):
        mix.learn(Usage(prompt, output, cached))
    whole = 0.0
    for second in range(begin_s, until_s):
        whole += per_s
        while whole >= 1.0:
            mix.arrived(prompt, float(second))
            whole -= 1.0
    return mix


def need(mix: Mix, demand: Demand = NOBODY, settings: ScalingSettings = SETTINGS, replicas: int = 2, now: float = 300.0,
         curve: StepCurve | None = None) -> Need:  # fmt: skip
    return pool_need(mix, None, curve or known_curve(), [REPLICA] * replicas, demand, settings, None, 120.0, 1.0, now)


def test_twice_the_rate_needs_twice_the_replicas() -> None:
    one, two = need(mix_of(2.0, 4000, 1000)), need(mix_of(4.0, 4000, 1000))
    assert one.sure
    assert two.need == pytest.approx(2.0 * one.need, rel=0.02)
    assert one.reason == "work"
    assert one.capacity is not None
    assert one.need == pytest.approx(2.0 / one.capacity.requests_per_s / SETTINGS.utilisation, rel=0.02)


def test_own_needs_of_two_proxies_add_up() -> None:
    full = [replace(REPLICA, kv_used=1.0)] * 4
    busy = replace(NOBODY, running=4)
    half = pool_need(mix_of(2.0, 4000, 1000), None, known_curve(), full, busy, SETTINGS, None, 120.0, 1.0, 300.0)
    whole = need(mix_of(4.0, 4000, 1000))
    assert half.reason == "kv"
    assert 2 * half.own == pytest.approx(whole.own, rel=0.02)
    assert whole.own == whole.need
    waits = need(mix_of(2.0, 4000, 1000), replace(NOBODY, waiting={size_class(4000): Count(40.0, 160_000.0)}))
    assert waits.own == pytest.approx(waits.terms["ahead"] + waits.terms["queue"], abs=0.01)
    assert waits.terms["queue"] > 0.1
    unknown = need(Mix(), replicas=3)
    assert (unknown.need, unknown.own) == (3.0, 0.0)
    idle = need(mix_of(2.0, 4000, 1000), replace(NOBODY, idle_s=1_000.0))
    assert (idle.need, idle.own) == (0.0, 0.0)


@given(prompt=st.integers(200, 20_000), output=st.integers(20, 2_000), more=st.floats(1.2, 3.0))
def test_longer_prompts_and_answers_never_need_fewer(prompt: int, output: int, more: float) -> None:
    curve = known_curve()
    base = need(mix_of(3.0, prompt, output), curve=curve).need
    assert need(mix_of(3.0, int(prompt * more), output), curve=curve).need >= base * 0.999
    assert need(mix_of(3.0, prompt, int(output * more)), curve=curve).need >= base * 0.999


def test_cached_prompts_cost_less() -> None:
    assert need(mix_of(3.0, 8000, 100, cached=7000)).need < 0.5 * need(mix_of(3.0, 8000, 100)).need


def test_the_number_does_not_depend_on_how_many_there_are() -> None:
    assert need(mix_of(4.0, 4000, 1000), replicas=1).desired == need(mix_of(4.0, 4000, 1000), replicas=9).desired


def test_waiting_requests_need_more_replicas() -> None:
    mix = mix_of(2.0, 4000, 1000)
    waiting = {size_class(4000): Count(120.0, 480_000.0)}
    before, after = need(mix), need(mix, replace_demand(waiting=waiting))
    assert before.capacity is not None
    assert after.terms["queue"] == pytest.approx(120.0 * before.capacity.request_s / SETTINGS.target_wait_s, rel=0.05)
    assert after.need > before.need
    assert after.waiting == 120


def test_answers_under_way_are_not_squeezed() -> None:
    found = need(mix_of(0.2, 4000, 1000), replace_demand(running=300))
    assert found.reason == "seats"
    assert found.desired >= 5


@pytest.mark.parametrize(("pace", "kv_full_ratio"), [(1.0, 1.0), (1.0, 0.9), (0.8, 1.0)])
@pytest.mark.parametrize("replicas", [2, 3, 50])
def test_caches_that_are_always_full_ask_for_as_many_as_there_are(
    pace: float, kv_full_ratio: float, replicas: int
) -> None:
    full, mix = [replace_facts(pace=pace, kv_used=1.0)] * replicas, mix_of(0.2, 400, 10)
    busy = replace_demand(running=1)
    found = pool_need(mix, None, known_curve(), full, busy, SETTINGS, None, 120.0, kv_full_ratio, 300.0)
    assert (found.desired, found.reason) == (replicas, "kv")


def test_unknown_work_keeps_the_present_replicas() -> None:
    found = pool_need(Mix(), None, StepCurve(), [REPLICA] * 3, NOBODY, SETTINGS, None, 120.0, 1.0, 10.0)
    assert (found.desired, found.sure, found.reason) == (3, False, "unknown")
    few = mix_of(2.0, 4000, 1000)
    few.ended = 5
    assert (need(few, replicas=4).desired, need(few, replicas=4).sure) == (4, False)


def test_bounds_hold_and_say_so() -> None:
    loud, quiet = mix_of(20.0, 4000, 1000), mix_of(0.1, 400, 10)
    bounded = dataclasses.replace(DEFAULTS.scaling, min=2, max=5)
    assert (need(loud, settings=bounded).desired, need(loud, settings=bounded).reason) == (5, "max")
    assert (need(quiet, settings=bounded).desired, need(quiet, settings=bounded).reason) == (2, "min")
    assert need(loud, settings=bounded).need > 5.0


def test_idle_needs_none_and_the_first_request_one() -> None:
    zero = dataclasses.replace(DEFAULTS.scaling, min=0)
    idle = replace_demand(idle_s=901.0)
    assert pool_need(Mix(), None, StepCurve(), [REPLICA], idle, zero, None, 120.0, 1.0, 2_000.0).desired == 0
    assert pool_need(Mix(), None, StepCurve(), [REPLICA], idle, SETTINGS, None, 120.0, 1.0, 2_000.0).desired == 1
    held = replace_demand(on_hold=1, idle_s=0.0)
    found = pool_need(Mix(), None, StepCurve(), [], held, zero, None, 120.0, 1.0, 2_000.0)
    assert (found.desired, found.reason, found.waiting) == (1, "queue", 1)


def test_a_ramp_is_followed_and_noise_is_not() -> None:
    mix = mix_of(2.0, 4000, 1000, 0, 60)
    for second in range(60, 300):
        for _ in range(2 + second // 60):
            mix.arrived(4000, float(second))
    assert need(mix).terms["ahead"] > 1.1 * need(mix).terms["work"]
    steady = need(mix_of(2.0, 4000, 1000))
    assert steady.terms["ahead"] == steady.terms["work"]


def test_a_step_that_is_over_is_no_trend() -> None:
    mix = mix_of(2.0, 4000, 1000, 0, 175)
    for second in range(175, 300):
        for _ in range(8):
            mix.arrived(4000, float(second))
    found = need(mix)
    assert found.terms["ahead"] == found.terms["work"]


def test_a_burst_counts_before_the_long_window_shows_it() -> None:
    mix = mix_of(2.0, 4000, 1000, 0, 270)
    for second in range(270, 300):
        for _ in range(10):
            mix.arrived(4000, float(second))
    assert need(mix).terms["work"] > 2.0 * need(mix_of(2.0, 4000, 1000)).terms["work"]


def test_an_objective_per_token_takes_seats() -> None:
    mix, curve = mix_of(2.0, 4000, 1000), known_curve()
    loose = pool_need(mix, None, curve, [REPLICA], NOBODY, SETTINGS, None, 120.0, 1.0, 300.0)
    tight = pool_need(mix, None, curve, [REPLICA], NOBODY, SETTINGS, 0.035, 120.0, 1.0, 300.0)
    assert loose.capacity is not None
    assert tight.capacity is not None
    assert tight.capacity.seats < loose.capacity.seats
    assert tight.need > loose.need
    output_s, prompt_s = tight.capacity.output_s, tight.capacity.prompt_s
    step_s = output_s * tight.capacity.seats / 1000.0
    assert step_s / (1.0 - prompt_s / (prompt_s + output_s)) == pytest.approx(0.8 * 0.035, rel=0.1)


def test_prompts_that_were_estimated_a_little_off_have_the_answers_of_their_neighbours() -> None:
    mix = mix_of(3.0, 9, 60)
    near, far = size_class(7), size_class(2)
    assert mix.tokens({near: Count(1.0, 7.0)}).output == pytest.approx(60.0)
    assert mix.tokens({far: Count(1.0, 2.0)}).output == 0.0


def test_a_size_that_was_never_seen_counts_by_its_prompts() -> None:
    before = need(mix_of(2.0, 500, 1000)).need
    mix = mix_of(2.0, 500, 1000, until_s=280)
    for second in range(280, 300):
        mix.arrived(16_000, float(second))
        mix.arrived(500, float(second))
        mix.arrived(500, float(second))
    added = need(mix).need - before
    assert 0.0 < added < before


def test_slow_replicas_count_for_less() -> None:
    mix = mix_of(6.0, 4000, 1000)
    slow = replace_facts(pace=0.5)
    usual = pool_need(mix, None, known_curve(), [REPLICA] * 2, NOBODY, SETTINGS, None, 120.0, 1.0, 300.0).desired
    halved = pool_need(mix, None, known_curve(), [slow] * 2, NOBODY, SETTINGS, None, 120.0, 1.0, 300.0).desired
    assert halved in (2 * usual - 1, 2 * usual)


def replace_demand(**changes: object) -> Demand:
    return replace(NOBODY, **changes)


def replace_facts(**changes: object) -> ReplicaFacts:
    return replace(REPLICA, **changes)


def test_seats_count_kv_tokens_over_time() -> None:
    # A hundred long answers beside short prompts and a hundred short ones beside long prompts: nearly all of the time
    # it is the long answers that hold the cache.
    mix = mix_of(1.0, 500, 1_500)
    for _ in range(60):
        mix.learn(Usage(9_000, 10, 0))
    sizes = {size_class(500): Count(100.0, 50_000.0), size_class(9_000): Count(100.0, 900_000.0)}
    assert mix.tokens(sizes).kv_tokens == pytest.approx((1_500 * (500 + 750) + 10 * (9_000 + 5)) / 1_510, rel=0.01)


def test_answers_that_vary_hold_more_than_equal_ones() -> None:
    equal, varied = Mix(), Mix()
    for tokens in (100, 1_900) * 40:
        equal.learn(Usage(500, 1_000, 0))
        varied.learn(Usage(500, tokens, 0))
    count = {size_class(500): Count(1.0, 500.0)}
    assert equal.tokens(count).kv_tokens == pytest.approx(500 + 500)
    # The mean square over twice the mean, and not half of the mean.
    assert varied.tokens(count).kv_tokens == pytest.approx(500 + (100**2 + 1_900**2) / 2 / 2_000, rel=0.05)


def test_a_new_mix_is_believed_after_ten_answers() -> None:
    rng, mix = Random(4), Mix()
    for _ in range(200):
        mix.learn(Usage(3_000, rng.randint(340, 660), 0))
    for _ in range(10):
        mix.learn(Usage(3_000, rng.randint(900, 1_100), 0))
    assert mix.sizes[size_class(3_000)].output_tokens == pytest.approx(1_000.0, rel=0.1)


def test_one_long_answer_is_no_new_mix() -> None:
    rng, mix = Random(4), Mix()
    for number in range(210):
        mix.learn(Usage(3_000, 20_000 if number == 205 else rng.randint(340, 660), 0))
    # It counts as one of fifty, and does not make a mean of ten.
    assert mix.sizes[size_class(3_000)].output_tokens < 1.8 * 500
