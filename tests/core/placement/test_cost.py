"""The cost placement with hand-made views and events."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from llmproxy.core.domain import NoMatch, Verdict
from llmproxy.core.placement.backend_load import WORK_S
from llmproxy.core.placement.cost import EXPLAINED_MAX, TIE_S
from llmproxy.core.placement.pool_model import ASIDE_S
from llmproxy.core.placement.price import TERMS
from llmproxy.core.placement.rates import ATTENTION
from tests.core.cost_bench import BASE_S, BLOCK_TOKENS, BOTH, NONE, STEP_S, TOKEN_S, CostBench, chain, streamed
from tests.core.make import view

# --- the prompt's cache -----------------------------------------------------------------------------------------------


def test_a_warm_backend_is_preferred_to_an_idle_one() -> None:
    bench, views = CostBench(), [view("warm", load=3), view("cold")]
    bench.serve(chain(0, 30), "warm")
    assert bench.place(chain(0, 30), views).backend == "warm"
    assert bench.place(chain(500, 30), views).backend == "cold"


@pytest.mark.parametrize(("queued_tokens", "best"), [(1_000, "warm"), (10_000, "cold")])
def test_warm_backend_is_left_when_its_queue_exceeds_the_saved_prefill(queued_tokens: int, best: str) -> None:
    bench = CostBench()
    bench.serve(chain(0, 30), "warm")
    bench.book(streamed(prompt_tokens=queued_tokens), "warm")
    assert bench.place(chain(0, 30), [view("warm", load=1), view("cold")]).backend == best


def test_two_copies_of_a_prefix_are_not_made_while_its_home_has_room() -> None:
    """A long prefix shared by all requests, and a short own part: a third of the capacity of its home backend."""
    bench, shared = CostBench(), tuple(range(40))
    bench.serve(chain(0, 40), "home")
    running: list[int] = []
    for number in range(200):
        bench.now += 0.1
        own = streamed(prefix=(*shared, 1_000 + number), prefix_tokens=BLOCK_TOKENS, prompt_tokens=4_100)
        loads = {"home": len(running), "b": 0, "c": 0}
        placed = bench.place(own, [view(name, load=load, limit=32, max_model_len=None) for name, load in loads.items()])
        assert placed.backend == "home"
        lease = bench.take(own, placed)
        bench.now += BASE_S + 100 * TOKEN_S
        bench.cost.started(lease, bench.now)
        running.append(lease)
        if len(running) > 12:
            bench.finish(running.pop(0), output_tokens=100)


def test_booked_prompt_is_cached_for_later_prompts() -> None:
    bench, on = CostBench(), view("a")
    lease = bench.book(chain(0, 10), on)
    assert bench.place(chain(0, 20), [on, view("b")]).cached_tokens == 1_000
    bench.cost.started(lease, bench.now)
    bench.finish(lease)
    assert bench.place(chain(0, 20), [on]).cached_tokens == 1_000
    assert bench.place(chain(500, 20), [on]).cached_tokens == 0
    # The last token is always computed.
    assert bench.place(chain(0, 10), [on]).cached_tokens == 999


def test_a_token_costs_more_the_more_tokens_stand_before_it() -> None:
    bench, on = CostBench(), view("a")
    bench.serve(chain(0, 200), on)
    first_s, last_s = (bench.terms(one, on)["prefill"] for one in (streamed(prompt_tokens=1_000), chain(0, 210)))
    # Of the second, 20,000 tokens are cached and 1,000 are not.
    assert last_s / first_s == pytest.approx((1.0 + ATTENTION * 20_500) / (1.0 + ATTENTION * 500), rel=0.01)


def test_prompt_that_never_began_is_not_cached() -> None:
    bench = CostBench()
    lease = bench.book(chain(0, 10), "a")
    bench.cost.finished(lease, Verdict.FAILED, None, bench.now)
    assert bench.place(chain(0, 10), [view("a")]).cached_tokens == 0


def test_lost_backend_has_nothing_cached_and_is_sized_again() -> None:
    bench, on = CostBench(), view("a", kv_tokens=20_000)
    bench.serve(chain(0, 10), on)
    assert bench.place(chain(0, 10), [on]).cached_tokens == 999
    assert bench.index.limit("a") == 200
    bench.cost.lost("a")
    assert bench.place(chain(0, 10), [on]).cached_tokens == 0
    assert bench.index.limit("a") == 200


def test_fewer_cached_tokens_than_expected_age_the_index() -> None:
    bench, on = CostBench(), view("a", kv_tokens=20_000)
    bench.serve(chain(0, 10), on)
    for _ in range(5):
        lease = bench.book(chain(0, 10), on)
        bench.cost.started(lease, bench.now)
        bench.finish(lease, cached_tokens=0)
    assert bench.index.limit("a") < 200


def test_eviction_counts_by_the_hit_ratio_of_the_pool() -> None:
    bench = CostBench()
    bench.index.resize("a", 1_000)
    asked = chain(900, 30)
    assert bench.terms(asked, view("a"))["eviction"] == 0.0
    # Every other prompt is cached as a whole: a hit ratio of a half, at which a displaced block is missed once.
    for number in range(300):
        bench.serve(chain(0, 10) if number % 2 else chain(10_000 * (number + 1), 10), "a")
    terms = bench.terms(asked, view("a"))
    assert terms["eviction"] == pytest.approx(terms["prefill"], rel=0.1)
    for _ in range(300):
        bench.serve(chain(0, 10), "a")
    terms = bench.terms(asked, view("a"))
    assert terms["eviction"] > 10.0 * terms["prefill"]


def test_eviction_counts_only_displaced_blocks() -> None:
    bench = CostBench()
    for _ in range(100):
        bench.serve(chain(0, 10), "a")
    bench.index.resize("a", 400)
    charged = []
    for blocks in (310, 15, 20):
        # Room for 30 blocks before an eighth of the 400 is dropped, then for 15, then for none.
        first = 10_000 * blocks
        bench.index.record("a", range(first, first + blocks))
        terms = bench.terms(chain(900, 30), view("a"))
        charged.append(terms["eviction"] / terms["prefill"])
    assert charged[0] == 0.0
    assert charged[1] == pytest.approx(charged[2] / 2.0)
    assert charged[2] > 1.0


# --- the memory -------------------------------------------------------------------------------------------------------


def test_shared_blocks_in_flight_take_memory_once() -> None:
    bench, on = CostBench(), view("a", load=2, kv_used=0.5, kv_tokens=20_000)
    asked, half_shared, others = chain(0, 30), chain(15, 30, prefix=(*range(15), *range(500, 515))), chain(900, 30)
    alone_s = bench.terms(asked, on)["memory"]
    lease = bench.book(chain(0, 30), on)
    assert bench.terms(asked, on)["memory"] == 0.0
    assert bench.terms(half_shared, on)["memory"] == pytest.approx(alone_s / 2.0)
    assert bench.terms(others, on)["memory"] == alone_s > 0.0
    placed = bench.place(asked, [on])
    assert (placed.held_tokens, placed.cached_tokens) == (3_000, 2_999)
    assert bench.place(others, [on]).held_tokens == 0
    bench.finish(lease)
    assert bench.terms(asked, on)["memory"] == alone_s


def test_memory_costs_more_where_it_is_scarce() -> None:
    bench, asked = CostBench(), streamed(prompt_tokens=3_000, output_tokens=200)
    seconds = [bench.terms(asked, view("a", kv_used=used, kv_tokens=50_000))["memory"] for used in (0.0, 0.5, 0.9)]
    assert seconds[0] == 0.0
    assert seconds[2] == pytest.approx(9.0 * seconds[1])
    assert "memory" not in bench.terms(asked, view("a", kv_used=0.9))


# --- what else makes a backend dear -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({"load": 1}, {"load": 5}),
        ({"kv_used": 0.1, "kv_tokens": 10**4}, {"kv_used": 0.8, "kv_tokens": 10**4}),
        ({"kv_used": 0.5, "kv_tokens": 10**6}, {"kv_used": 0.5, "kv_tokens": 10**4}),
        ({"prompt_range": (1_000, 9_000)}, {"prompt_range": (0, 999)}),
        ({}, {"prompt_range": (9_000, 10_000)}),
    ],
)
def test_a_cold_prompt_prefers_the_emptier_or_fitter_backend(better: dict[str, Any], worse: dict[str, Any]) -> None:
    views = [view("worse", **worse), view("better", **better)]
    asked = streamed(prompt_tokens=3_000, output_tokens=100)
    assert {CostBench(seed).place(asked, views).backend for seed in range(10)} == {"better"}


def test_backend_for_other_lengths_is_taken_when_the_right_one_is_busy() -> None:
    bench, views = (
        CostBench(),
        [view("meant", prompt_range=(0, 5_000), limit=99), view("aside", prompt_range=(5_001, 9_000))],
    )
    while bench.place(streamed(prompt_tokens=2_000), views).backend == "meant":
        bench.book(streamed(prompt_tokens=2_000), "meant")
    queued_s = bench.terms(streamed(), views[0])["queue"]
    assert 0.3 * ASIDE_S < queued_s < 1.2 * ASIDE_S


def test_request_waits_for_a_full_backend_rather_than_slow_many_streams_down() -> None:
    bench, full = CostBench(), view("full", limit=1, load=1)
    asked = streamed(prompt_tokens=1_000)
    assert bench.waits(asked, [full, view("streams", limit=100, load=50)])
    assert bench.place(asked, [full, view("idle", limit=100)]).backend == "idle"


def test_request_that_went_elsewhere_does_not_wait_for_a_full_backend_any_more() -> None:
    bench, full, far = CostBench(), view("full", limit=1, load=1), view("far", prompt_range=(5_000, 9_000))
    first, second = streamed(output_tokens=150), streamed(output_tokens=150)
    assert bench.waits(first, [full, far])
    assert bench.waits(second, [full, far]) is False
    bench.now = 1.0
    assert bench.waits(second, [full, far]) is False, "the first request waits in later passes too"
    bench.book(first, far)
    assert bench.waits(second, [full, far])


def test_backend_busy_with_prompts_costs_more_until_it_was_idle() -> None:
    bench, views = CostBench(), [view("busy"), view("idle", load=1)]
    asked = streamed(prompt_tokens=3_000)
    assert bench.place(asked, views).backend == "busy"
    for _ in range(200):
        bench.serve(streamed(prompt_tokens=6_000), "busy")
    assert bench.terms(asked, views[0])["harm"] > bench.terms(asked, views[0])["prefill"]
    assert bench.place(asked, views).backend == "idle"
    bench.now += 6 * WORK_S
    assert bench.terms(asked, views[0])["harm"] < 0.01
    assert bench.place(asked, views).backend == "busy"


def test_the_terms_add_up_to_the_score() -> None:
    bench = CostBench()
    bench.serve(chain(1_000, 80), "a")
    for _ in range(2):
        bench.serve(chain(0, 10), "a")
    bench.book(streamed(prompt_tokens=700), "a")
    on = view("a", served=BOTH, load=4, kv_used=0.5, kv_tokens=9_000, prompt_range=(0, 10))
    placed = bench.place(chain(0, 30, adapter="lora"), [on])
    assert {name for name, _ in placed.terms} == TERMS - {"slot"}
    assert all(seconds > 0.0 for _, seconds in placed.terms)
    assert placed.score == pytest.approx(sum(seconds for _, seconds in placed.terms))
    assert placed.candidates == 1


@pytest.mark.parametrize("name", sorted(TERMS - {"slot"}))
def test_a_term_that_is_left_out_counts_nothing(name: str) -> None:
    on = view("a", served=BOTH, load=4, kv_used=0.5, kv_tokens=9_000, prompt_range=(0, 10))
    whole, without = CostBench(), CostBench(without=frozenset({name}))
    for bench in (whole, without):
        bench.serve(chain(0, 10), "a")
        bench.serve(chain(0, 10), "a")
    asked = chain(0, 30, adapter="lora")
    terms = whole.terms(asked, on)
    del terms[name]
    assert without.terms(asked, on) == pytest.approx(terms)
    assert without.place(asked, [on]).score == pytest.approx(sum(terms.values()))


def test_overdue_first_byte_raises_the_price_of_a_backend() -> None:
    bench, views = CostBench(), [view("stuck", load=1), view("other", load=8)]
    bench.serve(chain(0, 30), "stuck")
    lease = bench.book(chain(0, 30), "stuck")
    assert bench.place(chain(0, 30), views).backend == "stuck"
    bench.now += 20.0
    assert bench.place(chain(0, 30), views).backend == "other"
    assert bench.terms(chain(0, 30), views[0])["queue"] > 19.0
    bench.cost.finished(lease, Verdict.FAILED, None, bench.now)
    assert bench.terms(chain(0, 30), views[0])["queue"] < 1.0


def test_a_later_byte_is_not_the_first_one() -> None:
    bench = CostBench()
    first = bench.start(streamed(prompt_tokens=3_000), "a")
    bench.book(streamed(prompt_tokens=3_000), "a")
    bench.now += 0.1
    queue_s = bench.terms(streamed(), view("a"))["queue"]
    bench.cost.started(first, bench.now)
    assert bench.terms(streamed(), view("a"))["queue"] == queue_s


def test_prompt_of_another_length_prefers_a_busier_backend_if_there_is_one() -> None:
    meant_for_short, busy = view("short", prompt_range=(1, 500)), view("any", load=9, limit=10, kv_used=0.2)
    long, short = streamed(prompt_tokens=501), streamed(prompt_tokens=500)
    assert CostBench().place(long, [meant_for_short, busy]).backend == "any"
    assert CostBench().place(short, [meant_for_short, busy]).backend == "short"
    assert CostBench().terms(long, meant_for_short)["range"] == ASIDE_S
    assert "range" not in CostBench().terms(short, meant_for_short)


# --- adapters ---------------------------------------------------------------------------------------------------------


def test_the_backend_that_has_the_adapter_is_preferred() -> None:
    views = [view("cold", served=BOTH, load=1), view("has", served=BOTH, load=2, resident=frozenset({"lora"}))]
    assert CostBench().place(streamed(adapter="lora"), views).backend == "has"
    assert CostBench().place(streamed(), views).backend == "cold"


def test_adapter_without_a_free_slot_waits_for_an_answer() -> None:
    bench = CostBench()
    one_slot = view("a", served=BOTH, max_adapters=1, resident=frozenset({"lora"}))
    asked = streamed(adapter="other", output_tokens=500)
    loading = bench.place(asked, [one_slot])
    assert loading.cold_adapter
    assert dict(loading.terms)["adapter"] < 0.5
    lease = bench.book(streamed(adapter="lora"), one_slot)
    assert "adapter" not in bench.terms(streamed(adapter="lora"), view("a", served=BOTH, max_adapters=1))
    loads_s = dict(loading.terms)["adapter"]
    assert bench.terms(asked, one_slot)["adapter"] == pytest.approx(500 * 0.01 + loads_s)
    bench.finish(lease)
    assert bench.terms(asked, one_slot)["adapter"] == dict(loading.terms)["adapter"]


def test_cold_adapter_teaches_load_time_and_no_prompt_time() -> None:
    bench, on = CostBench(), view("a", served=BOTH)
    known_s = bench.place(streamed(prompt_tokens=1_000), [on])
    for _ in range(30):
        bench.serve(streamed(adapter="lora", prompt_tokens=500), on, more_s=1.5)
        bench.now += 10 * WORK_S
    terms = bench.terms(streamed(adapter="lora", prompt_tokens=1_000), on)
    assert terms["adapter"] == pytest.approx(1.5, rel=0.05)
    assert (terms["queue"], terms["prefill"]) == (dict(known_s.terms)["queue"], dict(known_s.terms)["prefill"])


# --- a full backend worth waiting for ---------------------------------------------------------------------------------


FULL_AND_OTHER = [view("home", load=10, max_model_len=None), view("other", max_model_len=None)]


@pytest.mark.parametrize(("output_tokens", "waits"), [(100, True), (5_000, False)])
def test_full_home_is_waited_for_if_it_answers_sooner(output_tokens: int, waits: bool) -> None:
    bench = CostBench()
    bench.serve(chain(0, 300), "home")
    assert bench.waits(chain(0, 300, output_tokens=output_tokens), FULL_AND_OTHER) == waits
    # Others may have the room meanwhile.
    assert bench.place(chain(1_000, 300), FULL_AND_OTHER).backend == "other"


def test_request_waits_no_longer_than_its_home_saves() -> None:
    """Other requests may get each slot first."""
    bench, asked = CostBench(), chain(0, 300, output_tokens=100)
    bench.serve(chain(0, 300), "home")
    assert bench.waits(asked, FULL_AND_OTHER)
    saved_s = bench.terms(asked, FULL_AND_OTHER[1])["prefill"]
    bench.now += 0.8 * saved_s
    assert bench.waits(asked, FULL_AND_OTHER)
    bench.now += 0.8 * saved_s
    assert bench.place(asked, FULL_AND_OTHER).backend == "other"


def test_full_home_with_many_waiting_is_not_waited_for() -> None:
    bench = CostBench()
    bench.serve(chain(0, 300), "home")
    asked = [chain(0, 300, output_tokens=100) for _ in range(60)]
    waiting = [bench.waits(one, FULL_AND_OTHER) for one in asked]
    count = sum(waiting)
    # About two seconds of prefill, and nine answers in one of them.
    assert 10 <= count <= 40
    assert waiting == [True] * count + [False] * (60 - count)
    bench.now += 0.01
    assert not bench.waits(asked[-1], FULL_AND_OTHER), "they wait in later passes too"
    for one in asked[:count]:
        bench.claims.drop(one.id)
    assert bench.waits(asked[-1], FULL_AND_OTHER)


def test_a_band_that_must_leave_room_waits_for_as_many_more_to_end() -> None:
    bench = CostBench()
    bench.serve(chain(0, 300), "home")
    asked = chain(0, 300, output_tokens=400)
    assert bench.waits(asked, FULL_AND_OTHER, ceiling=0.95)
    assert bench.place(asked, FULL_AND_OTHER, ceiling=0.4).backend == "other"


def test_request_that_waits_for_a_long_context_hides_no_others() -> None:
    short, long = view("short", max_model_len=100), view("long", max_model_len=1_000, load=10)
    found = CostBench().cost.place(streamed(prompt_tokens=500), [short, long], 1.0, NONE, 0.0)
    assert found == NoMatch(whole_model=False)


# --- among equals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cached_blocks", "best"), [(3, "emptier"), (5, "warmer")])
def test_prices_within_the_tie_take_the_least_loaded(cached_blocks: int, best: str) -> None:
    for seed in range(10):
        bench = CostBench(seed)
        bench.serve(chain(0, cached_blocks, prefix_tokens=45.0), "warmer")
        bench.now += 20 * WORK_S
        views = [view("emptier", load=1, limit=100), view("warmer", load=2, limit=100)]
        asked = chain(0, 20, prefix_tokens=45.0, prompt_tokens=900)
        cheaper_s = bench.place(asked, views[1:]).score
        assert cheaper_s < bench.place(asked, views[:1]).score
        assert (bench.place(asked, views[:1]).score - cheaper_s < TIE_S) == (best == "emptier")
        assert bench.place(asked, views).backend == best


def test_equal_backends_are_drawn_alike() -> None:
    bench = CostBench()
    found = Counter(bench.place(streamed(), [view(name) for name in "abcd"]).backend for _ in range(2_000))
    assert all(400 <= found[name] <= 600 for name in "abcd"), found


# --- what choices were between ----------------------------------------------------------------------------------------


def test_last_choices_are_kept_with_all_their_candidates() -> None:
    bench, views = CostBench(), [view("a", load=2), view("b", load=6), view("full", load=10)]
    for number in range(EXPLAINED_MAX + 5):
        bench.now += 1.0
        placed = bench.place(streamed(label=f"r{number}", prompt_tokens=700), views)
    explained = bench.cost.explained()
    assert [one.label for one in explained] == [f"r{number}" for number in range(5, EXPLAINED_MAX + 5)]
    last = explained[-1]
    assert (last.at_s, last.prompt_tokens, last.chosen) == (bench.now, 700, placed.backend)
    assert [(price.backend, price.fits) for price in last.prices] == [("a", True), ("b", True), ("full", False)]
    prices = {price.backend: price for price in last.prices}
    # Its client would wait for a slot first.
    assert prices["full"].ttft_s == pytest.approx(prices["a"].ttft_s + dict(prices["full"].terms)["slot"])
    assert prices["full"].ttft_s > prices["a"].ttft_s
    assert (prices[placed.backend].terms, prices[placed.backend].total_s) == (placed.terms, placed.score)
    assert all(price.total_s == pytest.approx(sum(s for _, s in price.terms)) for price in last.prices)


def test_request_that_waits_for_a_full_backend_is_no_choice() -> None:
    bench = CostBench()
    bench.serve(chain(0, 300), "home")
    before = bench.cost.explained()
    assert bench.waits(chain(0, 300), FULL_AND_OTHER)
    assert bench.cost.explained() == before


def test_ttft_and_tpot_are_predicted_with_their_p90() -> None:
    bench, asked = CostBench(), streamed(prompt_tokens=3_000)
    bench.book(streamed(prompt_tokens=1_500), "a")
    bench.cost._rates.late_ttft.factor, bench.cost._rates.late_tpot.factor = 3.0, 2.0
    placed = bench.place(asked, [view("a", load=1)])
    assert placed.ttft is not None
    assert placed.tpot is not None
    assert placed.ttft.expected_s == pytest.approx(BASE_S + (4_500 + ATTENTION * (3_000**2 + 1_500**2) / 2) * TOKEN_S)
    assert placed.tpot.expected_s == pytest.approx(STEP_S, rel=0.02)
    assert placed.ttft.p90_s == pytest.approx(3.0 * placed.ttft.expected_s)
    assert placed.tpot.p90_s == pytest.approx(2.0 * placed.tpot.expected_s)
