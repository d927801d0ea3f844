"""The placement that prices in seconds, asked about views made by hand and told what became of its choices."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from llmproxy.core.domain import NoMatch, Verdict
from llmproxy.core.placement.backend_load import WORK_S
from llmproxy.core.placement.cost import ASIDE_S, EXPLAINED_MAX, TIE_S
from llmproxy.core.placement.price import TERMS
from tests.core.cost_bench import BASE_S, BLOCK_TOKENS, BOTH, NONE, STEP_S, TOKEN_S, Stand, chain, streamed
from tests.core.make import view

# --- the prompt's cache -----------------------------------------------------------------------------------------------


def test_a_warm_backend_is_preferred_to_an_idle_one() -> None:
    stand, views = Stand(), [view("warm", load=3), view("cold")]
    stand.serve(chain(0, 30), "warm")
    assert stand.place(chain(0, 30), views).backend == "warm"
    assert stand.place(chain(500, 30), views).backend == "cold"


@pytest.mark.parametrize(("queued_tokens", "best"), [(1_000, "warm"), (10_000, "cold")])
def test_warm_backend_is_left_when_its_queue_exceeds_the_saved_prefill(queued_tokens: int, best: str) -> None:
    stand = Stand()
    stand.serve(chain(0, 30), "warm")
    stand.book(streamed(prompt_tokens=queued_tokens), "warm")
    assert stand.place(chain(0, 30), [view("warm", load=1), view("cold")]).backend == best


def test_two_copies_of_a_prefix_are_not_made_while_its_home_has_room() -> None:
    """A long prefix that all share, and a little of each's own: a third of what its home can do."""
    stand, shared = Stand(), tuple(range(40))
    stand.serve(chain(0, 40), "home")
    running: list[int] = []
    for number in range(200):
        stand.now += 0.1
        own = streamed(prefix=(*shared, 1_000 + number), prefix_tokens=BLOCK_TOKENS, prompt_tokens=4_100)
        loads = {"home": len(running), "b": 0, "c": 0}
        placed = stand.place(own, [view(name, load=load, limit=32, max_model_len=None) for name, load in loads.items()])
        assert placed.backend == "home"
        lease = stand.take(own, placed)
        stand.now += BASE_S + 100 * TOKEN_S
        stand.cost.started(lease, stand.now)
        running.append(lease)
        if len(running) > 12:
            stand.finish(running.pop(0), output_tokens=100)


def test_a_prompt_is_taken_to_be_cached_from_its_first_byte_on() -> None:
    stand, on = Stand(), view("a")
    lease = stand.book(chain(0, 10), on)
    assert stand.place(chain(0, 20), [on]).cached_tokens == 0
    stand.cost.started(lease, stand.now)
    assert stand.place(chain(0, 20), [on]).cached_tokens == 1_000
    assert stand.place(chain(500, 20), [on]).cached_tokens == 0
    # The last token is always computed.
    assert stand.place(chain(0, 10), [on]).cached_tokens == 999


def test_prompt_that_never_began_is_not_cached() -> None:
    stand = Stand()
    lease = stand.book(chain(0, 10), "a")
    stand.cost.finished(lease, Verdict.FAILED, None, stand.now)
    assert stand.place(chain(0, 10), [view("a")]).cached_tokens == 0


def test_lost_backend_has_nothing_cached_and_is_sized_again() -> None:
    stand, on = Stand(), view("a", kv_tokens=20_000)
    stand.serve(chain(0, 10), on)
    assert stand.place(chain(0, 10), [on]).cached_tokens == 999
    assert stand.index.limit("a") == 200
    stand.cost.lost("a")
    assert stand.place(chain(0, 10), [on]).cached_tokens == 0
    assert stand.index.limit("a") == 200


def test_fewer_cached_tokens_than_expected_age_the_index() -> None:
    stand, on = Stand(), view("a", kv_tokens=20_000)
    stand.serve(chain(0, 10), on)
    for _ in range(5):
        lease = stand.book(chain(0, 10), on)
        stand.cost.started(lease, stand.now)
        stand.finish(lease, cached_tokens=0)
    assert stand.index.limit("a") < 200


def test_eviction_counts_by_the_hit_ratio_of_the_pool() -> None:
    stand = Stand()
    asked = chain(900, 30)
    assert stand.terms(asked, view("a"))["eviction"] == 0.0
    # Every other prompt is found whole: half is hit, so that what is displaced is missed once for each time.
    for number in range(300):
        stand.serve(chain(0, 10) if number % 2 else chain(10_000 * (number + 1), 10), "a")
    terms = stand.terms(asked, view("a"))
    assert terms["eviction"] == pytest.approx(terms["prefill"], rel=0.1)
    for _ in range(300):
        stand.serve(chain(0, 10), "a")
    terms = stand.terms(asked, view("a"))
    assert terms["eviction"] > 10.0 * terms["prefill"]


# --- the memory -------------------------------------------------------------------------------------------------------


def test_shared_blocks_in_flight_take_memory_once() -> None:
    stand, on = Stand(), view("a", load=2, kv_used=0.5, kv_tokens=20_000)
    asked, half_shared, others = chain(0, 30), chain(15, 30, prefix=(*range(15), *range(500, 515))), chain(900, 30)
    alone_s = stand.terms(asked, on)["memory"]
    lease = stand.book(chain(0, 30), on)
    assert stand.terms(asked, on)["memory"] == 0.0
    assert stand.terms(half_shared, on)["memory"] == pytest.approx(alone_s / 2.0)
    assert stand.terms(others, on)["memory"] == alone_s > 0.0
    placed = stand.place(asked, [on])
    assert (placed.held_tokens, placed.cached_tokens) == (3_000, 0)
    assert stand.place(others, [on]).held_tokens == 0
    stand.finish(lease)
    assert stand.terms(asked, on)["memory"] == alone_s


def test_memory_costs_more_where_it_is_scarce() -> None:
    stand, asked = Stand(), streamed(prompt_tokens=3_000, output_tokens=200)
    seconds = [stand.terms(asked, view("a", kv_used=used, kv_tokens=50_000))["memory"] for used in (0.0, 0.5, 0.9)]
    assert seconds[0] == 0.0
    assert seconds[2] == pytest.approx(9.0 * seconds[1])
    assert "memory" not in stand.terms(asked, view("a", kv_used=0.9))


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
    assert {Stand(seed).place(asked, views).backend for seed in range(10)} == {"better"}


def test_backend_for_other_lengths_is_taken_when_the_right_one_is_busy() -> None:
    stand, views = (
        Stand(),
        [view("meant", prompt_range=(0, 5_000), limit=99), view("aside", prompt_range=(5_001, 9_000))],
    )
    while stand.place(streamed(prompt_tokens=2_000), views).backend == "meant":
        stand.book(streamed(prompt_tokens=2_000), "meant")
    queued_s = stand.terms(streamed(), views[0])["queue"]
    assert 0.3 * ASIDE_S < queued_s < 1.2 * ASIDE_S


def test_backend_busy_with_prompts_costs_more_until_it_was_idle() -> None:
    stand, views = Stand(), [view("busy"), view("idle", load=1)]
    asked = streamed(prompt_tokens=3_000)
    assert stand.place(asked, views).backend == "busy"
    for _ in range(200):
        stand.serve(streamed(prompt_tokens=6_000), "busy")
    assert stand.terms(asked, views[0])["harm"] > stand.terms(asked, views[0])["prefill"]
    assert stand.place(asked, views).backend == "idle"
    stand.now += 6 * WORK_S
    assert stand.terms(asked, views[0])["harm"] < 0.01
    assert stand.place(asked, views).backend == "busy"


def test_the_terms_add_up_to_the_score() -> None:
    stand = Stand()
    for _ in range(2):
        stand.serve(chain(0, 10), "a")
    stand.book(streamed(prompt_tokens=700), "a")
    on = view("a", served=BOTH, load=4, kv_used=0.5, kv_tokens=9_000, prompt_range=(0, 10))
    placed = stand.place(chain(0, 30, adapter="lora"), [on])
    assert {name for name, _ in placed.terms} == TERMS - {"slot"}
    assert all(seconds > 0.0 for _, seconds in placed.terms)
    assert placed.score == pytest.approx(sum(seconds for _, seconds in placed.terms))
    assert placed.candidates == 1


@pytest.mark.parametrize("name", sorted(TERMS - {"slot"}))
def test_a_term_that_is_left_out_counts_nothing(name: str) -> None:
    on = view("a", served=BOTH, load=4, kv_used=0.5, kv_tokens=9_000, prompt_range=(0, 10))
    whole, without = Stand(), Stand(without=frozenset({name}))
    for stand in (whole, without):
        stand.serve(chain(0, 10), "a")
        stand.serve(chain(0, 10), "a")
    asked = chain(0, 30, adapter="lora")
    terms = whole.terms(asked, on)
    del terms[name]
    assert without.terms(asked, on) == pytest.approx(terms)
    assert without.place(asked, [on]).score == pytest.approx(sum(terms.values()))


def test_overdue_first_byte_raises_the_price_of_a_backend() -> None:
    stand, views = Stand(), [view("stuck", load=1), view("other", load=8)]
    stand.serve(chain(0, 30), "stuck")
    lease = stand.book(chain(0, 30), "stuck")
    assert stand.place(chain(0, 30), views).backend == "stuck"
    stand.now += 20.0
    assert stand.place(chain(0, 30), views).backend == "other"
    assert stand.terms(chain(0, 30), views[0])["queue"] > 19.0
    stand.cost.finished(lease, Verdict.FAILED, None, stand.now)
    assert stand.terms(chain(0, 30), views[0])["queue"] < 1.0


def test_a_later_byte_is_not_the_first_one() -> None:
    stand = Stand()
    first = stand.start(streamed(prompt_tokens=3_000), "a")
    stand.book(streamed(prompt_tokens=3_000), "a")
    stand.now += 0.1
    queue_s = stand.terms(streamed(), view("a"))["queue"]
    stand.cost.started(first, stand.now)
    assert stand.terms(streamed(), view("a"))["queue"] == queue_s


# --- adapters ---------------------------------------------------------------------------------------------------------


def test_the_backend_that_has_the_adapter_is_preferred() -> None:
    views = [view("cold", served=BOTH, load=1), view("has", served=BOTH, load=2, resident=frozenset({"lora"}))]
    assert Stand().place(streamed(adapter="lora"), views).backend == "has"
    assert Stand().place(streamed(), views).backend == "cold"


def test_adapter_without_a_free_slot_waits_for_an_answer() -> None:
    stand = Stand()
    one_slot = view("a", served=BOTH, max_adapters=1, resident=frozenset({"lora"}))
    asked = streamed(adapter="other", output_tokens=500)
    loading = stand.place(asked, [one_slot])
    assert loading.cold_adapter
    assert dict(loading.terms)["adapter"] < 0.5
    lease = stand.book(streamed(adapter="lora"), one_slot)
    assert "adapter" not in stand.terms(streamed(adapter="lora"), view("a", served=BOTH, max_adapters=1))
    loads_s = dict(loading.terms)["adapter"]
    assert stand.terms(asked, one_slot)["adapter"] == pytest.approx(500 * 0.01 + loads_s)
    stand.finish(lease)
    assert stand.terms(asked, one_slot)["adapter"] == dict(loading.terms)["adapter"]


def test_cold_adapter_teaches_load_time_and_no_prompt_time() -> None:
    stand, on = Stand(), view("a", served=BOTH)
    known_s = stand.place(streamed(prompt_tokens=1_000), [on])
    for _ in range(30):
        stand.serve(streamed(adapter="lora", prompt_tokens=500), on, more_s=1.5)
        stand.now += 10 * WORK_S
    terms = stand.terms(streamed(adapter="lora", prompt_tokens=1_000), on)
    assert terms["adapter"] == pytest.approx(1.5, rel=0.05)
    assert (terms["queue"], terms["prefill"]) == (dict(known_s.terms)["queue"], dict(known_s.terms)["prefill"])


# --- a full backend worth waiting for ---------------------------------------------------------------------------------


FULL_AND_OTHER = [view("home", load=10, max_model_len=None), view("other", max_model_len=None)]


@pytest.mark.parametrize(("output_tokens", "waits"), [(100, True), (5_000, False)])
def test_full_home_is_waited_for_if_it_answers_sooner(output_tokens: int, waits: bool) -> None:
    stand = Stand()
    stand.serve(chain(0, 300), "home")
    assert stand.waits(chain(0, 300, output_tokens=output_tokens), FULL_AND_OTHER) == waits
    # Others may have the room meanwhile.
    assert stand.place(chain(1_000, 300), FULL_AND_OTHER).backend == "other"


def test_full_home_with_many_waiting_is_not_waited_for() -> None:
    stand = Stand()
    stand.serve(chain(0, 300), "home")
    asked = [chain(0, 300, output_tokens=100) for _ in range(60)]
    waiting = [stand.waits(one, FULL_AND_OTHER) for one in asked]
    count = sum(waiting)
    # About two seconds of prefill, and nine answers in one of them.
    assert 10 <= count <= 40
    assert waiting == [True] * count + [False] * (60 - count)
    # Those that wait may be asked about again in the same pass, and keep their places.
    assert all(stand.waits(one, FULL_AND_OTHER) for one in asked[:count] * 3)
    assert not stand.waits(asked[-1], FULL_AND_OTHER)
    stand.now += 0.01
    assert stand.waits(asked[-1], FULL_AND_OTHER)


def test_a_band_that_must_leave_room_waits_for_as_many_more_to_end() -> None:
    stand = Stand()
    stand.serve(chain(0, 300), "home")
    asked = chain(0, 300, output_tokens=400)
    assert stand.waits(asked, FULL_AND_OTHER, ceiling=0.95)
    assert stand.place(asked, FULL_AND_OTHER, ceiling=0.4).backend == "other"


def test_request_that_waits_for_a_long_context_hides_no_others() -> None:
    short, long = view("short", max_model_len=100), view("long", max_model_len=1_000, load=10)
    found = Stand().cost.place(streamed(prompt_tokens=500), [short, long], 1.0, NONE, 0.0)
    assert found == NoMatch(whole_model=False)


# --- among equals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cached_blocks", "best"), [(3, "emptier"), (5, "warmer")])
def test_prices_within_the_tie_take_the_least_loaded(cached_blocks: int, best: str) -> None:
    for seed in range(10):
        stand = Stand(seed)
        stand.serve(chain(0, cached_blocks, prefix_tokens=45.0), "warmer")
        stand.now += 20 * WORK_S
        views = [view("emptier", load=1, limit=100), view("warmer", load=2, limit=100)]
        asked = chain(0, 20, prefix_tokens=45.0, prompt_tokens=900)
        cheaper_s = stand.place(asked, views[1:]).score
        assert cheaper_s < stand.place(asked, views[:1]).score
        assert (stand.place(asked, views[:1]).score - cheaper_s < TIE_S) == (best == "emptier")
        assert stand.place(asked, views).backend == best


def test_equal_backends_are_drawn_alike() -> None:
    stand = Stand()
    found = Counter(stand.place(streamed(), [view(name) for name in "abcd"]).backend for _ in range(2_000))
    assert all(400 <= found[name] <= 600 for name in "abcd"), found


# --- what choices were between ----------------------------------------------------------------------------------------


def test_last_choices_are_kept_with_all_their_candidates() -> None:
    stand, views = Stand(), [view("a", load=2), view("b", load=6), view("full", load=10)]
    for number in range(EXPLAINED_MAX + 5):
        stand.now += 1.0
        placed = stand.place(streamed(label=f"r{number}", prompt_tokens=700), views)
    told = stand.cost.explained()
    assert [one.label for one in told] == [f"r{number}" for number in range(5, EXPLAINED_MAX + 5)]
    last = told[-1]
    assert (last.at_s, last.prompt_tokens, last.chosen) == (stand.now, 700, placed.backend)
    assert [(price.backend, price.fits) for price in last.prices] == [("a", True), ("b", True), ("full", False)]
    prices = {price.backend: price for price in last.prices}
    # Its client would wait for a slot first.
    assert prices["full"].ttft_s == pytest.approx(prices["a"].ttft_s + dict(prices["full"].terms)["slot"])
    assert prices["full"].ttft_s > prices["a"].ttft_s
    assert (prices[placed.backend].terms, prices[placed.backend].total_s) == (placed.terms, placed.score)
    assert all(price.total_s == pytest.approx(sum(s for _, s in price.terms)) for price in last.prices)


def test_request_that_waits_for_a_full_backend_is_no_choice() -> None:
    stand = Stand()
    stand.serve(chain(0, 300), "home")
    before = stand.cost.explained()
    assert stand.waits(chain(0, 300), FULL_AND_OTHER)
    assert stand.cost.explained() == before


def test_ttft_and_tpot_are_predicted_with_their_p90() -> None:
    stand, asked = Stand(), streamed(prompt_tokens=3_000)
    stand.book(streamed(prompt_tokens=1_500), "a")
    stand.cost._rates.late_ttft.factor, stand.cost._rates.late_tpot.factor = 3.0, 2.0
    placed = stand.place(asked, [view("a", load=1)])
    assert placed.ttft is not None
    assert placed.tpot is not None
    assert placed.ttft.expected_s == pytest.approx(BASE_S + 4_500 * TOKEN_S)
    assert placed.tpot.expected_s == pytest.approx(STEP_S, rel=0.02)
    assert placed.ttft.p90_s == pytest.approx(3.0 * placed.ttft.expected_s)
    assert placed.tpot.p90_s == pytest.approx(2.0 * placed.tpot.expected_s)
