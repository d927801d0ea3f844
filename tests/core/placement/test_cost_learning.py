"""Learning and forgetting of the cost placement."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from msgspec import structs

from llmproxy.core.backends.view import View
from llmproxy.core.domain import Slo, Stage, Usage, Verdict
from llmproxy.core.placement.backend_load import WORK_S
from llmproxy.core.placement.pool_model import STREAM
from llmproxy.core.placement.rates import PROMPTS_MOST
from tests.core.cost_bench import BASE_S, BOTH, STEP_S, TOKEN_S, CostBench, chain, streamed
from tests.core.make import view

# --- how fast backends are --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slower", [2.0, 2.9])
def test_a_slower_backend_is_known_after_ten_prompts(slower: float) -> None:
    bench, views = CostBench(), [view("fast", load=3), view("slow")]
    asked = streamed(prompt_tokens=1_000)
    assert bench.place(asked, views).backend == "slow"
    for _ in range(10):
        bench.teach("fast", 1)
        bench.teach("slow", 1, slower)
    # The prompts that both backends compute do not count.
    bench.now += 20 * WORK_S
    assert bench.place(asked, views).backend == "fast"
    seconds = [bench.terms(asked, view(name))["prefill"] for name in ("fast", "slow")]
    assert seconds[1] / seconds[0] == pytest.approx(slower, rel=0.25)


def test_one_slow_prompt_does_not_make_a_backend_slow() -> None:
    bench = CostBench()
    bench.teach("a", 20)
    bench.teach("b", 20)
    bench.serve(streamed(prompt_tokens=1_000), "b", slower=3.0)
    bench.teach("b", 1)
    asked = streamed(prompt_tokens=1_000)
    usual_s = bench.terms(asked, view("a"))["prefill"]
    assert bench.terms(asked, view("b"))["prefill"] == pytest.approx(usual_s, rel=0.1)


def test_a_backend_that_slows_down_is_repriced_within_twenty_answers() -> None:
    bench, asked = CostBench(), streamed(prompt_tokens=1_000)
    for number in range(120):
        for backend in "bcd":
            bench.teach(backend, 1)
        bench.teach("a", 1, slower=1.0 if number < 100 else 5.0)
    bench.now += 20 * WORK_S
    slow_s, usual_s = (bench.place(asked, [view(backend)]).score for backend in "ab")
    assert slow_s > 3.0 * usual_s


def test_a_new_backend_is_judged_by_its_pool() -> None:
    bench = CostBench()
    bench.teach("a", 150, slower=3.0)
    bench.now += 20 * WORK_S
    asked = streamed(prompt_tokens=1_000)
    price_s = bench.place(asked, [view("new")]).score
    assert price_s == pytest.approx(bench.place(asked, [view("a")]).score, rel=0.05)
    assert price_s > 2.5 * CostBench().place(asked, [view("new")]).score


def test_noise_gives_no_backend_more_than_its_share() -> None:
    bench, rng = CostBench(), Random(4)
    found: Counter[str] = Counter()
    views = [view(name) for name in "abcd"]
    for number in range(1_500):
        asked = streamed(prompt_tokens=200 * (1 + number % 10))
        placed = bench.place(asked, views)
        lease = bench.take(asked, placed)
        bench.now += max(0.2, rng.gauss(1.0, 0.3)) * (BASE_S + asked.prompt_tokens * TOKEN_S)
        bench.cost.started(lease, bench.now)
        bench.now += 9 * STEP_S * max(0.2, rng.gauss(1.0, 0.3))
        bench.finish(lease)
        found[placed.backend] += 1
    assert all(250 <= found[name] <= 550 for name in "abcd"), found


def test_streams_that_slow_each_other_down_make_a_large_batch_dear() -> None:
    """The sequences of one request count each for itself, and so do their tokens."""
    bench = CostBench()
    for _ in range(60):
        leases = [bench.book(streamed(sequences=4), "a") for _ in range(8)]
        for lease in leases:
            bench.cost.started(lease, bench.now)
        for beside, lease in zip(range(28, -4, -4), leases, strict=True):
            took_s = 9 * (0.01 + 1e-3 * beside)
            bench.cost.finished(lease, Verdict.SERVED, Usage(10, 40), bench.now + took_s)
        bench.now += 1.0
    asked = streamed(output_tokens=50, prompt_tokens=1)
    terms = [bench.terms(asked, view("a", load=load, limit=10**6)) for load in (0, 20)]
    assert terms[1]["stream"] - terms[0]["stream"] == pytest.approx(STREAM * 50 * 20 * 1e-3, rel=0.05)
    assert terms[1]["harm"] - terms[0]["harm"] == pytest.approx(STREAM * 50 * 20 * 1e-3, rel=0.05)


@pytest.mark.parametrize("verdict", [verdict for verdict in Verdict if verdict is not Verdict.SERVED])
def test_an_answer_that_was_cut_short_teaches_nothing_of_streams(verdict: Verdict) -> None:
    bench = CostBench()
    before_s = bench.terms(streamed(), view("a"))["stream"]
    for _ in range(10):
        lease = bench.start(streamed(), "a")
        bench.now += 50.0
        bench.cost.finished(lease, verdict, Usage(10, 2), bench.now)
    assert bench.terms(streamed(), view("a"))["stream"] == before_s


# --- leftovers --------------------------------------------------------------------------------------------------------


def test_nothing_is_left_when_all_leases_have_ended() -> None:
    bench, on = CostBench(), view("a", served=BOTH, max_adapters=2, kv_tokens=10**6)
    rng = Random(1)
    adapters = (None, "lora", "other")
    verdicts, slos = list(Verdict) * 5, (Slo(tpot_s=0.1), Slo(ttft_s=1.0), None)
    leases = [
        bench.book(chain(i, 3, adapter=adapters[i % 3], sequences=1 + i % 2, stream=i % 4 > 0, slo=slos[i % 3]), on)
        for i in range(len(verdicts))
    ]
    rng.shuffle(leases)
    for lease, verdict in zip(leases, verdicts, strict=True):
        bench.now += 0.3
        if rng.random() < 0.5:
            bench.cost.started(lease, bench.now)
            bench.cost.started(lease, bench.now)
        bench.place(chain(0, 3), [on])
        bench.cost.finished(lease, verdict, None, bench.now)
    backend_load = bench.cost._backend_loads["a"]
    assert (bench.cost._flights, backend_load.unstarted, dict(backend_load.adapters.users)) == ({}, {}, {})
    assert not backend_load.rationing
    assert (backend_load._to_prefill_tokens, backend_load.in_flight, backend_load.in_use._users) == (0, 0, {})


def test_decoding_time_is_learned_without_the_prompts_beside_it() -> None:
    bench = CostBench()
    for _ in range(300):
        stream = bench.start(streamed(), "a")
        bench.start(streamed(prompt_tokens=6_000), "a")
        bench.now += 9 * 0.02
        bench.finish(stream)
    rates = bench.cost._rates
    # Each step takes 0.02 s, and a prompt of 6,000 tokens comes on top in the time of nine.
    prompt_s = BASE_S + 6_000 * TOKEN_S
    assert rates.step.at(2.0) > 0.02 + 0.9 * prompt_s / 9
    assert rates.decode.at(2.0) == pytest.approx(0.02, rel=0.25)


def test_prompts_never_explain_the_whole_time_of_a_stream() -> None:
    bench = CostBench()
    for _ in range(300):
        stream = bench.start(streamed(), "a")
        # Beyond the batch limit, the time of a prompt says nothing of the engine's speed.
        bench.book(streamed(prompt_tokens=30_000), view("a", max_model_len=None, limit=1))
        bench.cost.started(bench.leases, bench.now + 0.01)
        bench.now += 9 * 0.02
        bench.finish(stream)
        bench.cost.finished(bench.leases, Verdict.CLIENT_GONE, None, bench.now)
    assert bench.cost._rates.decode.at(2.0) >= (1.0 - PROMPTS_MOST) * 0.02 * 0.9


def test_lost_backend_is_forgotten_with_its_requests_in_flight() -> None:
    bench, on = CostBench(), view("a", kv_tokens=10**6, kv_used=0.5, served=BOTH, max_adapters=1)
    bench.teach("a", 20, slower=3.0)
    bench.teach("b", 20)
    bench.serve(chain(0, 30), on)
    answering, unstarted = bench.start(chain(0, 30, adapter="lora"), on), bench.book(chain(500, 30), on)
    bench.cost.lost("a")
    bench.now += 20 * WORK_S
    # The new process is like any other of the pool, and has nothing to do.
    asked = chain(0, 30, adapter="other")
    placed = bench.place(asked, [on])
    fresh = bench.place(asked, [view("fresh", kv_tokens=10**6, kv_used=0.5, served=BOTH, max_adapters=1)])
    assert (placed.terms, placed.held_tokens) == (fresh.terms, fresh.held_tokens)
    bench.cost.lost("a")
    bench.cost.started(unstarted, bench.now)
    assert bench.index.size("a") == 0
    for lease in (answering, unstarted):
        bench.finish(lease)


# --- the work that waits ----------------------------------------------------------------------------------------------


def test_work_is_known_once_a_prompt_was_seen_and_a_backend_is_there() -> None:
    bench, both = CostBench(), [view("a"), view("b")]
    assert bench.cost.work_s(10, 10_000, 0, both) is None
    bench.teach("a", 20)
    bench.teach("b", 20)
    alone_s = bench.cost.work_s(10, 10_000, 0, both[:1])
    assert alone_s == pytest.approx(10_000 * TOKEN_S, rel=0.2)
    assert bench.cost.work_s(10, 10_000, 0, both) == pytest.approx(0.5 * 10_000 * TOKEN_S, rel=0.2)
    assert bench.cost.work_s(0, 0, 0, both) == 0.0
    assert bench.cost.work_s(10, 10_000, 0, [view("a", available=False)]) is None


# --- transfers --------------------------------------------------------------------------------------------------------


def fetch_s(bench: CostBench) -> float:
    """Returns the expected time of fetching a prompt."""
    asked = streamed(prompt_tokens=1_000, stage=Stage.DECODE)
    return bench.terms(asked, view("d"))["transfer"]


def fetched(bench: CostBench, took_s: float, on: View | None = None, *, late: bool = False) -> int:
    """Report an answer with a fetched prompt and this time to first token."""
    lease = bench.book(streamed(prompt_tokens=1_000, stage=Stage.DECODE), on or view("d"))
    if late:
        bench.cost.recomputing(lease)
    bench.now += took_s
    bench.cost.started(lease, bench.now)
    return lease


def test_the_time_of_a_transfer_is_learned() -> None:
    bench = CostBench()
    for _ in range(20):
        bench.finish(fetched(bench, 0.2))
    assert fetch_s(bench) == pytest.approx(0.2, rel=0.1)


def test_a_prompt_that_came_too_late_and_was_computed_is_no_transfer() -> None:
    bench = CostBench()
    for _ in range(20):
        bench.finish(fetched(bench, 0.2))
    before, learned = fetch_s(bench), bench.cost.learned("d", bench.now)
    for _ in range(20):
        bench.finish(fetched(bench, 2.0, late=True))
    later = bench.cost.learned("d", bench.now)
    assert learned is not None
    assert later is not None
    assert (fetch_s(bench), later.ttft_p90_factor) == (before, learned.ttft_p90_factor)


def test_a_wait_for_the_end_of_another_answer_is_no_transfer() -> None:
    bench, full = CostBench(), view("d", limit=1, look_ahead=1)
    for _ in range(20):
        bench.finish(fetched(bench, 0.2, full))
    before = fetch_s(bench)
    for _ in range(20):
        first = fetched(bench, 0.2, full)
        second = fetched(bench, 2.0, structs.replace(full, load=1))
        bench.finish(first)
        bench.finish(second)
    assert fetch_s(bench) == pytest.approx(before, rel=0.05)
