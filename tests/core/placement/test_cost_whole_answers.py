"""Learning of the cost placement from non-streamed answers."""

from __future__ import annotations

from random import Random

import pytest

from llmproxy.core.domain import Learned, Usage, Verdict
from tests.core.cost_bench import BASE_S, STEP_S, TOKEN_S, CostBench
from tests.core.make import request, view

FAST, SLOW = ("a", "b", "c"), "slow"
PROMPTS_SLOWER, STEPS_SLOWER = 2.0, 3.0
"""The factors by which this pool differs from the assumed speeds."""


def taught(*, stream: bool, output_tokens: tuple[int, int], answers: int = 240, slower: float = 4.0) -> CostBench:
    """A placement after this many answers, a quarter of them from a backend `slower` times as slow."""
    bench, rng = CostBench(), Random(3)
    for number in range(answers):
        backend = (*FAST, SLOW)[number % 4]
        tokens = rng.randint(*output_tokens)
        asked = request(stream=stream, prompt_tokens=rng.randint(100, 4_000), output_tokens=tokens)
        factor = rng.uniform(0.9, 1.1) * (slower if backend == SLOW else 1.0)
        lease = bench.book(asked, backend)
        prompt_s = factor * (BASE_S + PROMPTS_SLOWER * asked.prompt_tokens * TOKEN_S)
        answer_s = factor * STEPS_SLOWER * STEP_S * (tokens - 1)
        bench.now += prompt_s if stream else prompt_s + answer_s
        bench.cost.started(lease, bench.now)
        bench.now += answer_s if stream else 0.0
        bench.finish(lease, tokens)
    return bench


def known(bench: CostBench, names: tuple[str, ...] = (*FAST, SLOW)) -> Learned:
    learned = bench.cost.learned(names, bench.now)
    assert learned is not None
    return learned


@pytest.mark.parametrize("output_tokens", [(4, 12), (20, 60), (50, 400)])
def test_a_pool_that_never_streams_is_as_well_known_as_one_that_streams(output_tokens: tuple[int, int]) -> None:
    whole, streams = (known(taught(stream=stream, output_tokens=output_tokens, slower=1.0)) for stream in (False, True))
    assert whole.prefill_token_s == pytest.approx(streams.prefill_token_s, rel=0.25)
    assert whole.step_s == pytest.approx(streams.step_s, rel=0.25)


@pytest.mark.parametrize("output_tokens", [(8, 8), (4, 12), (50, 400)])
def test_a_slow_backend_is_known_by_answers_in_one_piece(output_tokens: tuple[int, int]) -> None:
    *fast, slow = known(taught(stream=False, output_tokens=output_tokens)).backends
    usual = sum(one.prefill_factor for one in fast) / len(fast), sum(one.step_factor for one in fast) / len(fast)
    assert slow.prefill_factor / usual[0] == pytest.approx(4.0, rel=0.25)
    assert slow.step_factor / usual[1] == pytest.approx(4.0, rel=0.25)


def test_equal_backends_are_equal_by_answers_in_one_piece() -> None:
    for pace in known(taught(stream=False, output_tokens=(4, 400), slower=1.0)).backends:
        assert pace.prefill_factor == pytest.approx(1.0, abs=0.1)
        assert pace.step_factor == pytest.approx(1.0, abs=0.1)


def test_answers_in_one_piece_say_how_much_work_waits() -> None:
    views = [view(name) for name in FAST]
    whole, streams = (
        taught(stream=stream, output_tokens=(50, 400)).cost.work_s(100, 200_000, 20_000, views)
        for stream in (False, True)
    )
    assert CostBench().cost.work_s(100, 200_000, 20_000, views) is None
    assert whole == pytest.approx(streams, rel=0.25)


def test_answers_of_the_same_length_are_priced_right_as_a_whole() -> None:
    bench = taught(stream=False, output_tokens=(8, 8), slower=1.0)
    asked = request(stream=False, prompt_tokens=2_000, output_tokens=8)
    bench.now += 1_000.0
    placed = bench.place(asked, [view("a")])
    assert placed.ttft is not None
    assert placed.tpot is not None
    took_s = BASE_S + PROMPTS_SLOWER * 2_000 * TOKEN_S + 7 * STEPS_SLOWER * STEP_S
    assert placed.ttft.expected_s + 7 * placed.tpot.expected_s == pytest.approx(took_s, rel=0.15)


def test_a_slow_backend_is_known_while_each_request_waits_for_a_place_inside_its_engine() -> None:
    bench, rng = CostBench(), Random(3)

    def booked(name: str) -> tuple[float, int]:
        """Returns the time of a new request on its engine, and its lease."""
        asked = request(prompt_tokens=rng.randint(100, 1_000), output_tokens=50)
        alone_s = BASE_S + asked.prompt_tokens * TOKEN_S + 49 * STEP_S
        return alone_s * (4.0 if name == SLOW else 1.0), bench.book(asked, view(name, limit=1))

    names = (FAST[0], SLOW)
    running = [(*booked(name), name) for name in names]
    waiting = {name: booked(name) for name in names}
    for _ in range(100):
        running.sort()
        bench.now, lease, name = running.pop(0)
        bench.finish(lease, 50)
        took_s, lease = waiting[name]
        running.append((bench.now + took_s, lease, name))
        waiting[name] = booked(name)
    fast, slow = known(bench, names).backends
    assert slow.step_factor / fast.step_factor == pytest.approx(4.0, rel=0.25)


def test_a_failed_answer_teaches_nothing() -> None:
    bench = CostBench()
    before = known(bench)
    for verdict in set(Verdict) - {Verdict.SERVED}:
        lease = bench.book(request(prompt_tokens=1_000), "a")
        bench.now += 60.0
        bench.cost.finished(lease, verdict, Usage(1_000, 10), bench.now)
    assert known(bench).prefill_token_s == before.prefill_token_s
    assert known(bench).step_s == before.step_s


def test_prompts_that_the_engine_has_cached_do_not_make_prompts_cheap() -> None:
    bench = CostBench()
    for number in range(200):
        cached = 3_900 if number % 2 else 0
        lease = bench.book(request(prompt_tokens=4_000), "a")
        bench.now += BASE_S + (4_000 - cached) * TOKEN_S + 9 * STEP_S
        bench.finish(lease, 10, cached)
    assert known(bench).prefill_token_s == pytest.approx(TOKEN_S, rel=0.25)
