"""The engine model: each scheduling rule, the step times of a real run, and invariants after random operations."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from llmproxy.lab.simulator.engine.engine import Engine
from llmproxy.lab.simulator.engine.kv_cache import block_hashes
from llmproxy.lab.simulator.engine.profiles import PROFILES, profile_named
from llmproxy.lab.simulator.engine.reports import StepResult
from llmproxy.lab.simulator.engine.sequence import EngineRequest
from tests.lab.simulator.engine.invariants import check_engine
from tests.lab.simulator.engine.stepping import stepped

H100 = PROFILES["llama-8b-h100"]


def wanted(name: str, prompt: int, output: int = 1, adapter: str | None = None, hashed: bool = True) -> EngineRequest:
    """Prompts of one length are equal, so that they share their blocks."""
    hashes = block_hashes(range(prompt + output), 16, adapter) if hashed else ()
    return EngineRequest(name, prompt, output, hashes, adapter)


def run_out(engine: Engine) -> list[StepResult]:
    results = []
    while engine.busy:
        results.append(engine.step())
        check_engine(engine)
        assert len(results) < 10_000, "the engine does not come to an end"
    return results


def test_a_request_gets_its_tokens_one_step_after_the_other() -> None:
    engine = Engine(H100)
    engine.add(wanted("a", 100, 3))
    results = run_out(engine)
    assert [result.emitted for result in results] == [("a",)] * 3
    assert [result.finished for result in results] == [(), (), ("a",)]
    assert [(result.prefill_tokens, result.decode_tokens) for result in results] == [(100, 0), (0, 1), (0, 1)]
    assert engine.gauges().kv_used == 0.0
    assert engine.counters.prompt == 100
    assert engine.counters.generation == 3


def test_step_time_is_the_published_formula() -> None:
    prefill_ms = 1.2 + max(5.69 + 0.00615 * 8192, 0.22 + 0.01791 * 8192) + 0.75 + 4.27e-07 * 8192**2
    decode_ms = 1.2 + max(5.69 + 0.00615 * 2, 0.22 + 0.01791 * 2) + 0.44 + 4.465e-05 * (101 + 201)
    engine = Engine(H100)
    engine.add(wanted("a", 8192))
    assert engine.step().duration_s == pytest.approx(prefill_ms / 1000)
    engine.add(wanted("b", 100, 3, hashed=False))
    engine.add(wanted("c", 200, 3, hashed=False))
    engine.step()
    assert engine.step().duration_s == pytest.approx(decode_ms / 1000)
    dear = replace(H100, prefill_factor=1.9)
    assert dear.step_s(0, 0, [(0, 8000)]) > 1.7 * H100.step_s(0, 0, [(0, 8000)])
    assert dear.step_s(100, 1000, []) == H100.step_s(100, 1000, [])


def test_a_token_budget_cuts_prompts_while_others_decode() -> None:
    engine = Engine(H100, step_tokens=512, async_scheduling=False)
    engine.add(wanted("short", 10, 50, hashed=False))
    engine.step()
    engine.add(wanted("long", 1200, 1, hashed=False))
    engine.add(wanted("behind", 10, 1, hashed=False))
    results = [engine.step() for _ in range(3)]
    assert [result.prefill_tokens for result in results] == [511, 511, 1200 - 2 * 511 + 10]
    assert [result.emitted for result in results] == [("short",), ("short",), ("short", "long", "behind")]
    engine = Engine(H100, step_tokens=512)
    for name in ("a", "b", "c"):
        engine.add(wanted(name, 300, hashed=False))
    assert [engine.step().prefill_tokens for _ in range(2)] == [512, 388]


def test_admission_is_fcfs_and_stops_at_max_num_seqs() -> None:
    engine = Engine(H100, max_num_seqs=2)
    for name in "abc":
        engine.add(wanted(name, 10, 2, hashed=False))
    assert [name for name, _ in engine.step().admitted] == ["a", "b"]
    assert (engine.gauges().running, engine.gauges().waiting) == (2, 1)
    engine.step()
    assert [name for name, _ in engine.step().admitted] == ["c"]


def test_cached_prefix_is_skipped_but_for_the_last_block() -> None:
    engine = Engine(H100)
    engine.add(wanted("cold", 160))
    engine.step()
    engine.add(wanted("warm", 160))
    engine.add(wanted("longer", 170))
    result = engine.step()
    assert result.admitted == (("warm", 144), ("longer", 160))
    assert result.prefill_tokens == 16 + 10
    assert engine.counters.prefix_queries == 160 + 160 + 170
    assert engine.counters.prefix_hits == 144 + 160


def test_an_answer_is_cached_for_the_next_turn() -> None:
    engine = Engine(H100)
    engine.add(wanted("turn 1", 64, 64))
    run_out(engine)
    engine.add(wanted("turn 2", 160))
    # 64 + 64 tokens, of which the last was never computed, and with it its block is not full.
    assert engine.step().admitted == (("turn 2", 112),)


def test_adapters_and_salts_share_no_blocks() -> None:
    tokens = range(64)
    chains = {
        block_hashes(tokens, 16),
        block_hashes(tokens, 16, "lora"),
        block_hashes(tokens, 16, None, "salt"),
        block_hashes(tokens, 16, "lora", "salt"),
    }
    assert len(chains) == 4
    assert len(block_hashes(range(63), 16)) == 3


def test_the_tail_of_a_freed_prompt_is_evicted_first() -> None:
    engine = Engine(H100, kv_tokens=16 * 11)
    engine.add(wanted("old", 16 * 8 + 1))
    engine.step()
    # Ten blocks in all, one still fresh: of the old nine, the two at the tail are taken.
    engine.add(wanted("other", 16 * 2 + 1, hashed=False))
    engine.step()
    engine.add(wanted("again", 16 * 8 + 1))
    assert engine.step().admitted == (("again", 16 * 7),)


def test_youngest_is_preempted_and_finishes_with_all_tokens() -> None:
    engine = Engine(H100, kv_tokens=16 * 9)
    engine.add(wanted("old", 48, 60, hashed=False))
    engine.add(wanted("young", 48, 60, hashed=False))
    results = run_out(engine)
    preempted = [name for result in results for name in result.preempted]
    assert set(preempted) == {"young"}
    assert engine.counters.preemptions == len(preempted)
    emitted = [name for result in results for name in result.emitted]
    assert emitted.count("old") == emitted.count("young") == 60
    assert [name for result in results for name in result.finished] == ["old", "young"]
    assert engine.counters.prefix_queries == engine.counters.prompt == 96, "a request that comes back is not a new one"


def test_preempted_request_is_first_and_stops_admission() -> None:
    engine = Engine(H100, kv_tokens=16 * 9)
    engine.add(wanted("old", 48, 60, hashed=False))
    engine.add(wanted("young", 48, 60, hashed=False))
    engine.step()
    engine.add(wanted("waiting", 80, 1, hashed=False))
    results = run_out(engine)
    (step,) = [number for number, result in enumerate(results) if result.preempted]
    assert results[step].admitted == ()
    assert [name for result in results[step:] for name, _ in result.admitted] == ["young", "waiting"]


@pytest.mark.parametrize("hashed", [True, False])
def test_a_preempted_answer_is_computed_again_where_it_is_not_cached(hashed: bool) -> None:
    engine = Engine(H100, kv_tokens=16 * 9)
    engine.add(wanted("old", 48, 60, hashed=False))
    engine.add(wanted("young", 47, 60, hashed=hashed))
    results = run_out(engine)
    lost = next(number for number, result in enumerate(results) if result.preempted)
    back = next(number for number in range(lost, len(results)) if results[number].admitted)
    answered = sum("young" in result.emitted for result in results[:lost])
    # It comes back when the old one ends, whose 107 computed tokens took all of the eight blocks but one.
    found = 16 if hashed else 0
    assert results[back].admitted == (("young", found),)
    assert results[back].prefill_tokens == 47 + answered - found
    assert results[back].duration_s == pytest.approx(H100.step_s(0, 0, [(found, 47 + answered)]))


@pytest.mark.parametrize(("max_num_seqs", "adapter"), [(2, None), (9, "b")])
@pytest.mark.parametrize("ahead", [False, True])
def test_an_arrival_and_an_end_are_noticed_one_step_later_when_steps_are_planned_ahead(
    ahead: bool, max_num_seqs: int, adapter: str | None
) -> None:
    """One waits for the place of another, or for its adapter's."""
    engine = Engine(H100, max_num_seqs=max_num_seqs, max_loras=1, async_scheduling=ahead)
    engine.add(wanted("long", 10, 20))
    engine.add(wanted("short", 10, 2, "a"))
    assert len(engine.step().admitted) == 2, "nothing ran, so that nothing was planned"
    engine.add(wanted("waits", 10, 1, adapter))
    assert engine.step().finished == ("short",)
    assert engine.gauges().running == 1
    admitted = [[name for name, _ in engine.step().admitted] for _ in range(2)]
    assert admitted == ([[], ["waits"]] if ahead else [["waits"], []])
    engine.add(wanted("arrives", 10, 1))
    seen = [([name for name, _ in engine.step().admitted], engine.gauges().waiting) for _ in range(2)]
    assert [names for names, _ in seen] == ([[], ["arrives"]] if ahead else [["arrives"], []])
    assert [waiting for _, waiting in seen] == [0, 0], "who has a place in the next plan waits no more"
    engine.add(wanted("aborted", 10, 1))
    assert engine.abort("aborted")
    assert all(not result.admitted for result in run_out(engine))
    engine.add(wanted("alone", 10, 1))
    assert engine.step().finished == ("alone",)


def test_preempted_request_returns_one_step_later() -> None:
    engine = Engine(H100, kv_tokens=16 * 9)
    # The young one shares two blocks; the others are copies of its own, for which it could share those of the old one.
    engine.add(wanted("old", 48, 60))
    engine.add(wanted("young", 48, 60))
    results = run_out(engine)
    step = next(number for number, result in enumerate(results) if result.preempted)
    assert results[step].preempted == ("young",)
    assert results[step].admitted == ()
    assert results[step + 1].admitted == (("young", 80),)


def test_a_prompt_waits_until_all_of_it_fits() -> None:
    engine = Engine(H100, kv_tokens=16 * 9, step_tokens=32, max_num_seqs=8)
    engine.add(wanted("holder", 48, 3, hashed=False))
    engine.step()
    engine.step()
    engine.add(wanted("big", 96, hashed=False))
    assert engine.step().admitted == ()
    assert engine.gauges().waiting == 1
    run_out(engine)


def test_an_adapter_without_a_slot_waits_and_others_pass_it() -> None:
    engine = Engine(H100, max_loras=1)
    engine.add(wanted("one", 10, 3, "lora-1", hashed=False))
    engine.add(wanted("two", 10, 1, "lora-2", hashed=False))
    engine.add(wanted("one more", 10, 3, "lora-1", hashed=False))
    engine.add(wanted("base", 10, 3, hashed=False))
    assert [name for name, _ in engine.step().admitted] == ["one", "one more", "base"]
    gauges = engine.gauges()
    assert (gauges.waiting, gauges.deferred, gauges.running_adapters) == (1, 1, ("lora-1",))
    assert [name for result in run_out(engine) for name in result.finished][-1] == "two"


def test_adapter_load_is_cold_then_resident_then_from_host() -> None:
    engine = Engine(H100, max_loras=1, max_cpu_loras=2)

    def load_s(adapter: str) -> float:
        engine.add(wanted("x", 10, 1, adapter, hashed=False))
        return engine.step().duration_s - H100.step_s(0, 0, [(0, 10)], adapters=True)

    assert load_s("a") == pytest.approx(0.3)
    assert load_s("a") == pytest.approx(0.0)
    assert load_s("b") == pytest.approx(0.3)
    assert load_s("a") == pytest.approx(0.01)
    assert load_s("c") == pytest.approx(0.3)
    assert load_s("b") == pytest.approx(0.3), "b was pushed out of host memory"


def test_a_load_holds_up_every_stream_of_the_engine() -> None:
    engine = Engine(replace(H100, adapter_cold_load_s=2.0))
    engine.add(wanted("streams", 10, 9))
    engine.step()
    engine.add(wanted("loads", 10, 1, "a"))
    gaps_s = [result.duration_s for result in run_out(engine) if "streams" in result.emitted]
    assert len(gaps_s) == 8
    assert 2.0 < max(gaps_s) < 2.03


def test_the_adapter_used_longest_ago_gives_up_its_slot() -> None:
    engine = Engine(H100, max_loras=2, max_cpu_loras=9)
    quick_s = H100.step_s(0, 0, [(0, 10)], adapters=True)
    loads_s = []
    for adapter in ("a", "b", "a", "c", "a", "b"):
        engine.add(wanted("x", 10, 1, adapter, hashed=False))
        loads_s.append(engine.step().duration_s - quick_s)
    assert loads_s == pytest.approx([0.3, 0.3, 0.0, 0.3, 0.0, 0.01])


def test_abort_frees_everything_whether_queued_cut_or_decoding() -> None:
    engine = Engine(H100, step_tokens=64, max_num_seqs=2)
    engine.add(wanted("decoding", 16, 50, "lora"))
    engine.step()
    engine.add(wanted("cut", 200, 5))
    engine.add(wanted("queued", 10, 5, "lora"))
    engine.step()
    for name in ("cut", "queued", "decoding"):
        assert engine.abort(name)
        check_engine(engine)
        assert not engine.abort(name)
    assert not engine.busy
    gauges = engine.gauges()
    assert (gauges.running, gauges.waiting, gauges.kv_used, gauges.running_adapters) == (0, 0, 0.0, ())


def test_a_prompt_is_counted_with_its_first_token() -> None:
    engine = Engine(H100, step_tokens=64, max_num_seqs=2)
    engine.add(wanted("a", 100, 2))
    engine.step()
    assert (engine.counters.prefix_queries, engine.counters.prompt) == (100, 0)
    engine.step()
    assert engine.counters.prompt == 100


@pytest.mark.parametrize(("steps", "hit_tokens"), [(1, 0), (2, 16), (17, 16), (18, 32)])
def test_a_decoded_block_is_seen_by_others_once_the_next_one_is_begun(steps: int, hit_tokens: int) -> None:
    """The second step computes token 15, the last of its block, and it is for the third one to find that block."""
    engine = Engine(H100, async_scheduling=False)
    engine.add(wanted("first", 15, 40))
    for _ in range(steps):
        engine.step()
    engine.add(wanted("second", 40, 15))
    assert engine.step().admitted == (("second", hit_tokens),)


def test_what_a_request_would_find_cached_is_what_it_finds() -> None:
    engine = Engine(H100)
    engine.add(wanted("first", 100, 1))
    engine.step()
    for prompt in (10, 95, 96, 97, 160):
        waiting = wanted(f"{prompt}", prompt, 1)
        foreseen = engine.cached_tokens(waiting)
        engine.add(waiting)
        assert engine.step().admitted == ((waiting.id, foreseen),)


def test_tokens_answered_so_far_count_every_step() -> None:
    engine = Engine(H100, kv_tokens=16 * 11, max_num_seqs=2)
    counted: dict[str, int] = {}
    for name, output in (("a", 60), ("b", 50), ("c", 5)):
        engine.add(wanted(name, 40, output, hashed=False))
        counted[name] = 0
    while engine.busy:
        step = engine.step()
        for name in step.emitted:
            counted[name] += 1
        for name in counted.keys() - step.finished:
            assert engine.answered_tokens(name) in (counted[name], None)
    assert engine.counters.preemptions
    assert engine.answered_tokens("a") is None


def test_only_those_that_a_pass_has_reached_count_as_deferred() -> None:
    engine = Engine(H100, max_loras=1, max_num_seqs=2)
    for name, adapter in (("a", "lora-1"), ("b", "lora-2"), ("c", "lora-1"), ("d", "lora-2")):
        engine.add(wanted(name, 10, 5, adapter, hashed=False))
    engine.step()
    # The batch was full before anybody looked at "d".
    assert (engine.gauges().waiting, engine.gauges().deferred) == (2, 1)


def test_kv_usage_excludes_null_and_unused_cached_blocks() -> None:
    engine = Engine(H100, kv_tokens=16 * 11)
    engine.add(wanted("a", 30, 5))
    engine.step()
    assert engine.gauges().kv_used == pytest.approx(2 / 10)
    run_out(engine)
    assert engine.gauges().kv_used == 0.0


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (wanted("x", 0), "at least one prompt"),
        (wanted("x", 1, 0), "at least one prompt"),
        (wanted("x", 150, 11), "161 tokens, the cache 160"),
        (wanted("x", 1, 1, "lora"), "no adapter slot"),
    ],
)
def test_what_could_never_finish_is_refused(request_: EngineRequest, words: str) -> None:
    engine = Engine(H100, kv_tokens=16 * 11, max_loras=0)
    with pytest.raises(ValueError, match=words):
        engine.add(request_)
    assert not engine.busy


def test_setups_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="max_num_seqs must be from 1"):
        Engine(H100, max_num_seqs=9000)
    with pytest.raises(ValueError, match="known: llama-70b-a100-tp4"):
        profile_named("llama-9b")
    engine = Engine(H100)
    engine.add(wanted("x", 1))
    with pytest.raises(ValueError, match="already"):
        engine.add(wanted("x", 1))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("rate_rps", "tpot_ms"), [(1.0072, 7.4136), (42.9, 8.0881), (84.8, 8.954), (126.5, 10.3146), (167.8, 11.576)]
)
def test_time_per_output_token_is_that_of_a_real_h100(rate_rps: float, tpot_ms: float) -> None:
    """Published run: one H100, Llama-3.1-8B, vLLM 0.11, 204 tokens in (128 of them shared), 62 out, 128 sequences."""
    rng, at_s, coming = random.Random(1), 0.0, []
    for number in range(1000):
        hashes = tuple(1000 * (number % 10) + block for block in range(8))
        coming.append((at_s, EngineRequest(str(number), 204, 62, hashes)))
        at_s += rng.expovariate(rate_rps)
    first, last = stepped(Engine(H100, max_num_seqs=128), coming)
    # The load is not yet, or no longer, what it should be at both ends of the run.
    steady = [str(number) for number in range(200, 800)]
    mean_ms = sum((last[name] - first[name]) / 61 for name in steady) / len(steady) * 1000
    assert mean_ms == pytest.approx(tpot_ms, rel=0.02)
