"""Bounds agree with arithmetic done by hand, and no simulated engine beats them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random

import pytest

from llmproxy.lab.fleet.fleet_file import fleet_named
from llmproxy.lab.fleet.spec import SimulatedFleet
from llmproxy.lab.policies import bounds
from llmproxy.lab.policies.bounds import (
    _cache_bounds,
    _OrderedRequests,
    _TraceSums,
    all_bounds,
    in_order,
    static_lora,
    vtc_bound_tokens,
)
from llmproxy.lab.policies.pooled_server import (
    CentralQueue,
    EngineWork,
    PooledServer,
    QueueBounds,
    Served,
    balance_rps,
    least_s,
    queue_bounds,
    work_of,
)
from llmproxy.lab.simulator.engine.engine import Engine
from llmproxy.lab.simulator.engine.sequence import EngineRequest
from llmproxy.lab.traces.arrival import Arrival, Trace
from tests.lab.simulator.engine.stepping import stepped

H100 = fleet_named("1xllama-8b-h100")


def trace_of(arrivals: Iterable[Arrival], block_tokens: int = 16) -> Trace:
    kept = tuple(arrivals)
    return Trace("made", lambda: iter(kept), block_tokens)


def prompt(*blocks: int, tokens: int | None = None, **said: object) -> Arrival:
    arrival = Arrival(0.0, len(blocks) * 16 if tokens is None else tokens, 1, blocks)
    return replace(arrival, **said)  # type: ignore[arg-type]


def served(prompt_tokens: int, output_tokens: int, at_s: float = 0.0, hit_tokens: int = 0) -> Served:
    return Served(Arrival(at_s, prompt_tokens, output_tokens), at_s, hit_tokens, hit_tokens)


def mix_of(requests: Iterable[Served]) -> EngineWork:
    total = EngineWork()
    for request in requests:
        total = total.plus(work_of(request))
    return total


def value(
    trace: Trace, name: str, fleet: SimulatedFleet = H100, prefill_scale: float = 1.0, warmup_s: float = 0.0
) -> float:
    found = all_bounds(trace, fleet, prefill_scale, warmup_s)[name].value
    assert found is not None
    return found


def hits(trace: Trace, capacity_tokens: int, warmup_s: float = 0.0) -> tuple[float | None, float | None]:
    """In one cache of that capacity, and in one without end."""
    found = _cache_bounds(_TraceSums.over(_OrderedRequests(trace, capacity_tokens, warmup_s=warmup_s)))
    return found["hit_pooled_lru"].value, found["hit_endless"].value


# --- hits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asks", "capacity_tokens", "pooled", "endless"),
    [
        # The third prompt knows its last block from elsewhere, which helps nothing: its middle one is missing.
        ([prompt(1, 2, 3), prompt(1, 2, 4), prompt(1, 5, 3)], 1_000, 3 / 9, 3 / 9),
        # Four blocks fit: of 1 2 3, the last one goes when 7 8 come.
        ([prompt(1, 2, 3), prompt(7, 8), prompt(1, 2, 3)], 4 * 16, 2 / 8, 3 / 8),
        ([prompt(1), prompt(2), prompt(1), prompt(3), prompt(1), prompt(2)], 2 * 16, 2 / 6, 3 / 6),
        ([prompt(1, 2, tokens=20)] * 2, 1_000, 20 / 40, 20 / 40),
        ([replace(prompt(1, 2), blocks=(1, 2, 3), output_tokens=16), prompt(1, 2, 3, 4)], 1_000, 3 / 6, 3 / 6),
        ([prompt(1), prompt(1, adapter="a"), prompt(1, adapter="b"), prompt(1, adapter="a")], 1_000, 1 / 4, 1 / 4),
        ([], 1_000, None, None),
    ],
    ids=["first missing block", "tail first", "last used", "partial block", "answer", "adapters", "no requests"],
)
def test_hits_are_those_counted_by_hand(
    asks: list[Arrival], capacity_tokens: int, pooled: float | None, endless: float | None
) -> None:
    assert hits(trace_of(asks), capacity_tokens) == (pooled, endless)


def test_the_warm_up_fills_the_cache_and_is_not_counted() -> None:
    asks = [prompt(1, 2), prompt(1, 2, at_s=5.0), prompt(3, 4, at_s=6.0)]
    assert hits(trace_of(asks), 1_000, warmup_s=5.0)[0] == 2 / 4


def test_a_cache_without_end_has_one_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    asks = trace_of([prompt(1, 2), prompt(3), prompt(3), prompt(1, 2)])
    assert "too low" not in all_bounds(asks, H100)["hit_endless"].about
    monkeypatch.setattr(bounds, "BLOCKS_MAX", 2)
    found = all_bounds(asks, H100)["hit_endless"]
    assert found.value == 2 / 6
    assert "too low" in found.about


def test_more_cache_never_hits_less_and_endless_is_the_most() -> None:
    rng = Random(1)
    asks = trace_of([prompt(0, app := rng.randrange(20), 100 * app + rng.randrange(9)) for _ in range(500)])
    shares = [hits(asks, blocks * 16)[0] or 0.0 for blocks in (4, 16, 64, 1_000)]
    assert shares == sorted(shares)
    assert shares[0] < shares[-1] == hits(asks, 16)[1]


# --- order ------------------------------------------------------------------------------------------------------------


def test_later_turns_come_in_between() -> None:
    third = prompt(3, think_s=0.0)
    second = prompt(2, think_s=4.0, then=third)
    asks = [prompt(1, at_s=1.0, think_s=2.0, then=second), prompt(9, at_s=2.0), prompt(8, at_s=4.0)]
    times = [(at_s, arrival.blocks[0]) for at_s, arrival in in_order(iter(asks))]
    assert times == [(1.0, 1), (2.0, 9), (3.0, 2), (4.0, 8), (7.0, 3)]


def test_loops_without_a_pause_take_turns() -> None:
    asks = [prompt(1, then=prompt(11, then=prompt(12))), prompt(2, then=prompt(21))]
    order = [arrival.blocks[0] for _, arrival in in_order(iter(asks))]
    assert order.index(2) < order.index(12)
    assert sorted(order) == [1, 2, 11, 12, 21]


def test_a_closed_loop_has_hits_and_a_rate_but_no_queue() -> None:
    found = all_bounds(trace_of([prompt(1, then=prompt(1, 2))]), H100)
    assert found["hit_endless"].value == 1 / 3
    assert found["rate_max"].value is not None
    for name in ("utilisation", "ttft_p50_pooled", "ttft_p99_pooled", "ttft_p50_floor", "ttft_p99_floor"):
        assert found[name].value is None
        assert "not computed" in found[name].about


# --- rate -------------------------------------------------------------------------------------------------------------


def engine_s(fleet: SimulatedFleet, arrivals: Sequence[Arrival], prefill_scale: float) -> float:
    """Returns the seconds of a busy engine without noise for all of the requests."""
    (spec,) = fleet.replicas
    engine = Engine(replace(spec.profile, prefill_factor=prefill_scale), kv_tokens=spec.kv_tokens)
    for i, arrival in enumerate(arrivals):
        engine.add(EngineRequest(str(i), arrival.prompt_tokens, arrival.output_tokens, arrival.blocks))
    took_s = 0.0
    while engine.busy:
        took_s += engine.step().duration_s
    return took_s


@pytest.mark.sampled(5)
@pytest.mark.parametrize("prefill_scale", [1.0, 1.9])
@pytest.mark.parametrize("name", ["llama-8b-h100", "qwen-32b-h100-tp2", "llama-70b-a100-tp4"])
@pytest.mark.parametrize(
    ("prompts", "outputs", "count", "at_least"),
    [
        ((20, 400), (1, 60), 400, 0.85),
        ((5_000, 8_000), (1, 2), 60, 0.97),
        ((50, 100), (200, 300), 512, 0.75),
        ((100, 20_000), (1, 400), 100, 0.7),
    ],
)
def test_rate_bound_is_near_the_fastest_engine(
    name: str, prefill_scale: float, prompts: tuple[int, int], outputs: tuple[int, int], count: int, at_least: float
) -> None:
    rng, fleet = Random(7), fleet_named(f"1x{name}")
    arrivals = [Arrival(0.0, rng.randint(*prompts), rng.randint(*outputs)) for _ in range(count)]
    rate = count / engine_s(fleet, arrivals, prefill_scale)
    bound = value(trace_of(arrivals), "rate_max", fleet, prefill_scale)
    assert at_least * bound <= rate <= bound


def test_shared_prompts_make_room_for_larger_batches() -> None:
    fleet = SimulatedFleet("small", (replace(H100.replicas[0], kv_tokens=16_000),))
    shared = tuple(range(500))
    arrivals = [Arrival(0.0, 8_016, 200, (*shared, 1_000 + i)) for i in range(120)]
    rate = len(arrivals) / engine_s(fleet, arrivals, 1.0)
    bound = value(trace_of(arrivals), "rate_max", fleet)
    assert 0.6 * bound <= rate <= bound
    # As if nothing were shared, two of them would fill the cache, and the bound would be wrong.
    assert rate > 3 * value(trace_of([replace(arrival, blocks=()) for arrival in arrivals]), "rate_max", fleet)


def test_a_prompt_that_is_all_cached_still_computes_its_last_token() -> None:
    work = work_of(served(100, 11, hit_tokens=100))
    assert work[:3] == (1.0, 1.0, 100**2 - 99**2)
    # Ten decodes attend to 101 .. 110 tokens: 100 shared ones and 1 .. 10 of their own.
    assert work[3:] == (10.0, 1_055.0, 55.0)


def test_a_fleet_is_as_fast_as_its_replicas_together() -> None:
    arrivals = trace_of([Arrival(0.0, 500, 100), Arrival(1.0, 3_000, 20)])
    fast, slow = value(arrivals, "rate_max"), value(arrivals, "rate_max", fleet_named("1xllama-8b-a100"))
    assert value(arrivals, "rate_max", fleet_named("8xllama-8b-h100")) == pytest.approx(8 * fast)
    mixed = value(arrivals, "rate_max", fleet_named("1xllama-8b-h100+1xllama-8b-a100"))
    # Requests differ in how much they gain from the faster kind, so sharing them out well can win a little.
    assert fast + slow <= mixed <= 1.1 * (fast + slow)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("answers_per_prompt", [0.2, 0.8, 1.2, 1.8, 3.0])
@pytest.mark.parametrize("seqs", [32, 256])
def test_no_way_to_share_out_work_beats_the_rate(answers_per_prompt: float, seqs: int) -> None:
    fleet = fleet_named("1xllama-8b-h100+1xllama-8b-a100")
    fast, slow = (replace(spec, max_num_seqs=seqs) for spec in fleet.replicas)
    prompt_work, answer_work = work_of(served(8_000, 1)), work_of(served(20, 400)).times(answers_per_prompt)
    mix = prompt_work.plus(answer_work)
    server = PooledServer(SimulatedFleet("two", (fast, slow)), 1.0, mix)
    bound_s = server.service_s(served(8_000, 1)) + answers_per_prompt * server.service_s(served(20, 400))
    shares = [i / 20 for i in range(21)]
    best_s = min(
        max(
            least_s(fast, 1.0, prompt_work.times(prompts).plus(answer_work.times(answers))),
            least_s(slow, 1.0, prompt_work.times(1 - prompts).plus(answer_work.times(1 - answers))),
        )
        for prompts in shares
        for answers in shares
    )
    assert 0.85 * best_s <= bound_s <= best_s


def test_the_balance_is_the_published_one() -> None:
    # 7,200 prompt and 1,000 output tokens on Qwen3-32B with 277 k tokens of KV: 0.85 per second without a cache, and
    # 0.67 when prefill costs 1.9 times as much.
    (spec,) = fleet_named("1xqwen-32b-h100-tp2").replicas
    fleet = SimulatedFleet("pod", (replace(spec, kv_tokens=277_000),))
    for prefill_scale, published in ((1.0, 0.85), (1.9, 0.67)):
        assert balance_rps(fleet, prefill_scale, work_of(served(7_200, 1_000))) == pytest.approx(published, abs=0.005)


def test_requests_that_fit_nowhere_do_no_work() -> None:
    fits, too_long = Arrival(1.0, 500, 10), Arrival(0.5, 131_070, 3)
    alone, both = all_bounds(trace_of([fits]), H100), all_bounds(trace_of([too_long, fits]), H100)
    assert (alone["goodput_max"].value, both["goodput_max"].value) == (1.0, 0.5)
    assert both["rate_max"] == alone["rate_max"]
    assert both["vtc_difference"] == alone["vtc_difference"]
    assert value(trace_of([replace(too_long, output_tokens=2)]), "goodput_max") == 1.0


def test_one_replica_with_a_long_context_is_enough() -> None:
    short = replace(H100.replicas[0], name="short", max_model_len=1_000)
    fleet = SimulatedFleet("both", (short, H100.replicas[0]))
    assert value(trace_of([Arrival(0.0, 2_000, 10)]), "goodput_max", fleet) == 1.0


def test_utilisation_is_the_work_over_the_time() -> None:
    arrivals = trace_of([Arrival(float(i), 4_000, 100) for i in range(11)])
    service_s = value(arrivals, "service_s")
    assert value(arrivals, "utilisation") == pytest.approx(11 * service_s / 10.0)
    assert value(arrivals, "utilisation", warmup_s=6.0) == pytest.approx(5 * service_s / 4.0)
    assert all_bounds(trace_of([Arrival(0.0, 4_000, 100)]), H100)["utilisation"].value is None


# --- queues -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("servers", "requests", "waits"),
    [
        # With a single server each request waits for all earlier ones; with several, for the first free server.
        (1, ((0.0, 3.0), (1.0, 2.0), (4.5, 1.0), (9.0, 1.0)), [0.0, 2.0, 0.5, 0.0]),
        (2, ((0.0, 10.0), (0.0, 1.0), (0.5, 4.0), (2.0, 1.0)), [0.0, 0.0, 0.5, 3.0]),
    ],
)
def test_requests_wait_for_the_first_free_server(
    servers: int, requests: Sequence[tuple[float, float]], waits: list[float]
) -> None:
    queue = CentralQueue(servers)
    assert [queue.wait_s(at_s, service_s) for at_s, service_s in requests] == waits


def test_without_a_queue_the_pooled_server_answers_as_an_idle_replica() -> None:
    arrivals = trace_of([Arrival(100.0 * i, 2_000, 50) for i in range(5)])
    profile = H100.replicas[0].profile
    alone_s = profile.frontend_s + profile.step_s(0, 0, [(0, 2_000)])
    found = all_bounds(arrivals, H100)
    for name in ("ttft_p50_pooled", "ttft_p99_pooled", "ttft_p50_floor", "ttft_p99_floor"):
        assert found[name].value == pytest.approx(alone_s, rel=0.005)


def test_a_burst_waits_for_its_own_work() -> None:
    requests = [served(4_000, 100)] * 101
    server = PooledServer(fleet_named("4xllama-8b-h100"), 1.0, mix_of(requests))
    found = queue_bounds(requests, server, timed=True)
    frontend_s, alone_s = server.unloaded_s(requests[0])
    service_s, prompt_s = server.service_s(requests[0]), server.prompt_s(requests[0])
    assert found.pooled_ttft_p50_s == pytest.approx(frontend_s + 50 * service_s + alone_s, rel=0.005)
    # Number 51 is the thirteenth in its line.
    assert found.floor_ttft_p50_s == pytest.approx(frontend_s + 13 * prompt_s, rel=0.005)
    assert found.floor_ttft_p99_s == pytest.approx(frontend_s + 25 * prompt_s, rel=0.005)


def test_a_prompt_may_share_the_step_of_the_one_before() -> None:
    both = [replace(served(4_000, 1), counted=False), served(10, 1)]
    found = queue_bounds(both, PooledServer(H100, 1.0, mix_of(both)), timed=True)
    profile = H100.replicas[0].profile
    together_s = profile.frontend_s + profile.step_s(0, 0, [(0, 4_000), (0, 10)])
    assert found.floor_ttft_p50_s is not None
    assert 0.9 * together_s <= found.floor_ttft_p50_s <= together_s


@pytest.mark.parametrize("load", [0.5, 0.9, 1.3])
def test_no_engine_answers_sooner_than_the_floor(load: float) -> None:
    rng = Random(5)
    # Short prompts often share a step, which makes each cheaper than alone; long ones hold up the short.
    sizes = [rng.choice((20, 200, 3_000, 20_000)) for _ in range(300)]
    full = value(trace_of([Arrival(0.0, size, 5) for size in sizes]), "rate_max")
    at_s, arrivals = 0.0, []
    for size in sizes:
        at_s += rng.expovariate(load * full)
        arrivals.append(Arrival(at_s, size, 5))
    ttft_s = sorted(engine_ttfts_s(arrivals))
    found = all_bounds(trace_of(arrivals), H100)
    for name, share in (("ttft_p50_floor", 0.5), ("ttft_p99_floor", 0.99)):
        floor_s = found[name].value
        assert floor_s is not None
        real_s = ttft_s[math.ceil(share * len(ttft_s)) - 1]
        assert 0.3 * real_s <= floor_s <= real_s * 1.005


def engine_ttfts_s(arrivals: Sequence[Arrival]) -> list[float]:
    profile = H100.replicas[0].profile
    asked = [EngineRequest(str(n), one.prompt_tokens, one.output_tokens) for n, one in enumerate(arrivals)]
    firsts, _ = stepped(Engine(profile), zip([one.at_s for one in arrivals], asked, strict=True))
    return [first_s + profile.frontend_s - arrivals[int(name)].at_s for name, first_s in firsts.items()]


def test_nothing_counted_bounds_nothing() -> None:
    server = PooledServer(H100, 1.0, work_of(served(10, 10)))
    assert queue_bounds([replace(served(10, 10), counted=False)], server, timed=True) == QueueBounds()
    found = all_bounds(trace_of([]), H100)
    assert {bound.value for name, bound in found.items() if name != "vtc_difference"} == {None}


# --- fairness and adapters --------------------------------------------------------------------------------------------


def test_the_vtc_bound_takes_the_larger_of_prompt_and_batch() -> None:
    fleet = SimulatedFleet("two", tuple(replace(H100.replicas[0], name=name, kv_tokens=1_000) for name in "ab"))
    assert vtc_bound_tokens(300, fleet) == 2 * 2 * 2_000
    assert vtc_bound_tokens(5_000, fleet) == 2 * 5_000
    assert value(trace_of([prompt(1, 2), prompt(3)]), "vtc_difference", fleet) == 8_000


@pytest.mark.parametrize(
    ("adapters", "alpha", "published"), [(32, 1.0, 1.0), (100, 1.0, 0.915), (100, 0.6, 0.815), (500, 1.0, 0.70)]
)
def test_static_residency_is_the_published_one(adapters: int, alpha: float, published: float) -> None:
    counts = {f"a{i}": round(1e7 * i**-alpha) for i in range(1, adapters + 1)}
    assert static_lora(counts, 64) == pytest.approx(published, abs=0.005)


def test_adapters_are_shown_where_there_are_any() -> None:
    asks = [prompt(i, adapter=name) for i, name in enumerate("aaabbc")]
    fleet = SimulatedFleet("one", (replace(H100.replicas[0], max_loras=1),))
    assert value(trace_of([*asks, prompt(9)]), "lora_static_hit", fleet) == 3 / 6
    assert "lora_static_hit" not in all_bounds(trace_of([prompt(9)]), fleet)
    assert static_lora({}, 8) is None
