"""Placement by cost of requests with a latency objective: fast backends are kept for those who need them."""

from __future__ import annotations

from llmproxy.core.domain import Request, Slo
from llmproxy.core.placement.backend_load import WORK_S
from tests.core.cost_bench import CostBench, streamed
from tests.core.make import request, view

VIEWS = [view("fast"), view("slow")]


def unequal() -> CostBench:
    """One backend as assumed, and one that takes three times as long: 0.1 s and 0.3 s for 1,000 tokens."""
    bench = CostBench()
    for _ in range(40):
        bench.teach("fast", 1)
        bench.teach("slow", 1, slower=3.0)
    bench.now += 20 * WORK_S
    return bench


def asking(bench: CostBench, waited_s: float = 0.0, **slo: float) -> Request:
    output_tokens = 500 if "tpot_s" in slo else 50
    return streamed(prompt_tokens=1_000, output_tokens=output_tokens, arrived_s=bench.now - waited_s, slo=Slo(**slo))


def test_without_an_objective_the_fast_one_is_best() -> None:
    assert unequal().place(streamed(prompt_tokens=1_000), VIEWS).backend == "fast"


def test_the_fast_one_is_left_to_those_who_need_it() -> None:
    bench = unequal()
    assert bench.place(asking(bench, ttft_s=20.0), VIEWS).backend == "slow"
    assert bench.place(asking(bench, ttft_s=0.25), VIEWS).backend == "fast"
    assert bench.place(asking(bench, tpot_s=1.0), VIEWS).backend == "slow"
    assert bench.place(asking(bench, tpot_s=0.025), VIEWS).backend == "fast"
    assert bench.place(asking(bench, ttft_s=20.0, tpot_s=0.025), VIEWS).backend == "fast"
    assert bench.place(asking(bench, ttft_s=0.25, tpot_s=1.0), VIEWS).backend == "fast"


def test_the_time_that_was_waited_counts() -> None:
    bench = unequal()
    assert bench.place(asking(bench, ttft_s=20.0, waited_s=19.75), VIEWS).backend == "fast"


def test_least_violation_is_best_where_no_backend_meets_the_objective() -> None:
    bench = unequal()
    asked = asking(bench, ttft_s=0.01)
    assert bench.place(asked, VIEWS).backend == "fast"
    for _ in range(20):
        bench.book(streamed(prompt_tokens=2_000), "fast")
    assert bench.place(asked, VIEWS).backend == "slow"


def test_no_price_outweighs_an_objective_that_somebody_keeps() -> None:
    bench = unequal()
    views = [view("fast", prompt_range=(5_000, 9_000)), view("slow")]
    assert bench.place(streamed(prompt_tokens=1_000), views).backend == "slow"
    assert bench.place(asking(bench, ttft_s=0.2), views).backend == "fast"


def test_exceeded_predictions_are_allowed_for() -> None:
    bench = unequal()
    rates = bench.cost._rates
    assert bench.place(asking(bench, ttft_s=5.0), VIEWS).backend == "slow"
    assert bench.place(asking(bench, tpot_s=0.5), VIEWS).backend == "slow"
    for _ in range(60):
        rates.late_ttft.learn(1.0, 100.0)
    assert bench.place(asking(bench, ttft_s=5.0), VIEWS).backend == "fast"
    assert bench.place(asking(bench, tpot_s=0.5), VIEWS).backend == "slow"
    for _ in range(60):
        rates.late_tpot.learn(1.0, 100.0)
    assert bench.place(asking(bench, tpot_s=0.5), VIEWS).backend == "fast"


def test_every_stream_tells_how_good_its_prediction_was() -> None:
    bench = unequal()
    late_ttft, late_tpot = bench.cost._rates.late_ttft, bench.cost._rates.late_tpot
    before = late_ttft.factor, late_tpot.factor
    lease = bench.start(streamed(), "fast", more_s=5.0)
    assert late_ttft.factor > before[0]
    bench.now += 5.0
    bench.finish(lease)
    assert late_tpot.factor > before[1]
    after = late_ttft.factor, late_tpot.factor
    plain = bench.start(request(), "fast", more_s=5.0)
    bench.now += 5.0
    bench.finish(plain)
    assert (late_ttft.factor, late_tpot.factor) == after
