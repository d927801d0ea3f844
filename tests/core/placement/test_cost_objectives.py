"""Placement by cost of requests with a latency objective: fast backends are kept for requests that need them."""

from __future__ import annotations

import pytest

from llmproxy.core.backends.view import View
from llmproxy.core.domain import NoCapacity, Request, Slo
from llmproxy.core.placement.backend_load import WORK_S
from llmproxy.core.placement.pool_model import STREAM
from llmproxy.core.placement.price import HEADROOM_COST
from tests.core.cost_bench import NONE, CostBench, streamed
from tests.core.make import request, view

VIEWS = [view("fast"), view("slow")]


def unequal() -> CostBench:
    """A backend of the assumed speed, and a backend three times as slow: 0.1 s and 0.3 s for 1,000 tokens."""
    bench = CostBench()
    for _ in range(40):
        bench.teach("fast", 1)
        bench.teach("slow", 1, slower=3.0)
    bench.now += 20 * WORK_S
    return bench


def asking(bench: CostBench, waited_s: float = 0.0, **slo: float) -> Request:
    output_tokens = 500 if "tpot_s" in slo else 50
    return streamed(prompt_tokens=1_000, output_tokens=output_tokens, arrived_s=bench.now - waited_s, slo=Slo(**slo))


def test_without_an_objective_the_fast_backend_is_best() -> None:
    assert unequal().place(streamed(prompt_tokens=1_000), VIEWS).backend == "fast"


def test_fast_backend_goes_to_requests_that_need_it() -> None:
    bench = unequal()
    for slo in (
        {"ttft_s": 0.25},
        {"tpot_s": 0.025},
        {"ttft_s": 20.0, "tpot_s": 0.025},
        {"ttft_s": 0.25, "tpot_s": 1.0},
    ):
        assert bench.place(asking(bench, **slo), VIEWS).backend == "fast"


def p90_factors(bench: CostBench) -> tuple[float, float]:
    """Returns the factors between predicted and p90 times: to the first token, and per token."""
    learned = bench.cost.learned(("fast", "slow"), bench.now)
    assert learned is not None
    return learned.ttft_p90_factor, learned.tpot_p90_factor


def headroom_s(bench: CostBench, backend: str, waited_s: float = 0.0, **slo: float) -> float:
    return bench.terms(asking(bench, waited_s, **slo), view(backend))["headroom"]


def test_headroom_of_an_objective_costs_a_part_of_it() -> None:
    bench = unequal()
    ttft_factor, tpot_factor = p90_factors(bench)
    ttft_s, tpot_s = 0.075 * ttft_factor, 0.0101 * tpot_factor
    assert headroom_s(bench, "fast", ttft_s=20.0) == pytest.approx(HEADROOM_COST * (20.0 - ttft_s), rel=1e-3)
    assert headroom_s(bench, "fast", ttft_s=20.0, waited_s=19.0) == pytest.approx(
        HEADROOM_COST * (1.0 - ttft_s), rel=1e-2
    )
    of_stream_s = STREAM * 500 * (1.0 - tpot_s)
    assert headroom_s(bench, "fast", tpot_s=1.0) == pytest.approx(HEADROOM_COST * of_stream_s, rel=1e-3)
    both_s = headroom_s(bench, "fast", ttft_s=20.0, tpot_s=1.0)
    assert both_s == pytest.approx(HEADROOM_COST * (20.0 - ttft_s), rel=1e-2), "the lesser of both"


def test_backend_that_misses_an_objective_leaves_nothing_of_it() -> None:
    bench = unequal()
    assert headroom_s(bench, "slow", ttft_s=0.01) == 0.0
    assert headroom_s(bench, "slow", ttft_s=20.0, waited_s=19.9) == 0.0
    assert headroom_s(bench, "slow", tpot_s=0.025) == 0.0


def closed(bench: CostBench) -> View:
    """A backend that is closed to prompts for some seconds because of the objective of its stream."""
    bench.start(streamed(prompt_tokens=1, slo=Slo(tpot_s=0.015)), "a")
    while not isinstance(bench.cost.place(streamed(), [view("a")], 1.0, NONE, bench.now), NoCapacity):
        bench.book(streamed(prompt_tokens=6_000), "a")
    return view("a")


def test_probed_backend_takes_a_request_whatever_it_owes() -> None:
    bench = CostBench()
    closed(bench)
    assert bench.place(streamed(), [view("a", probed=True)]).backend == "a"


def test_request_waits_for_a_closed_backend_only_where_that_is_best() -> None:
    bench = CostBench()
    views = [closed(bench), view("far", prompt_range=(10**6, 10**7))]
    opens_s = bench.cost._backend_loads["a"].rationed_until(bench.cost._rates, 0, 1.0, bench.now)
    assert bench.place(streamed(), views).backend == "far", "it costs 2 s, and the other is busy for longer"
    bench.now = opens_s - 0.2
    for lease in range(2, bench.leases + 1):
        bench.cost.started(lease, bench.now)
    opens_s = bench.cost._backend_loads["a"].rationed_until(bench.cost._rates, 0, 1.0, bench.now)
    assert opens_s > bench.now
    first, second = streamed(id="first", prompt_tokens=6_000), streamed(id="second", prompt_tokens=6_000)
    assert bench.waits(first, views)
    (price, _) = bench.cost._model.prices(first, views, [False, True], 1.0, bench.now)
    assert dict(price.terms())["slot"] == pytest.approx(opens_s - bench.now)
    (behind, _) = bench.cost._model.prices(second, views, [False, True], 1.0, bench.now)
    assert dict(behind.terms())["slot"] == pytest.approx(opens_s - bench.now + dict(price.terms())["prefill"])
    bench.now = opens_s
    assert not bench.waits(first, views)


def test_every_stream_tells_how_good_its_prediction_was() -> None:
    bench = unequal()
    before = p90_factors(bench)
    lease = bench.start(streamed(), "fast", more_s=5.0)
    assert p90_factors(bench)[0] > before[0]
    bench.now += 5.0
    bench.finish(lease)
    after = p90_factors(bench)
    assert after[1] > before[1]
    plain = bench.start(request(), "fast", more_s=5.0)
    bench.now += 5.0
    bench.finish(plain)
    assert p90_factors(bench) == after
