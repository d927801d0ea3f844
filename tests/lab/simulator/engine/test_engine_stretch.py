"""Many steps at once give the same state and time as single steps."""

from __future__ import annotations

import random
from itertools import accumulate
from statistics import fmean, stdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmproxy.lab.simulator.engine.engine import Engine
from llmproxy.lab.simulator.engine.kv_cache import block_hashes
from llmproxy.lab.simulator.engine.profiles import PROFILES, Noise
from llmproxy.lab.simulator.engine.reports import StepResult
from llmproxy.lab.simulator.engine.sequence import EngineRequest
from tests.lab.simulator.engine.invariants import check_engine
from tests.sizes import examples

H100 = PROFILES["llama-8b-h100"]


def wanted(
    name: str, prompt: int, output: int, adapter: str | None = None, pins: bool = False, remote: bool = False
) -> EngineRequest:
    """Prompts share their beginning, and an answer is what a longer prompt goes on with."""
    return EngineRequest(name, prompt, output, block_hashes(range(prompt + output), 16, adapter), adapter, pins, remote)


def state(engine: Engine) -> list[object]:
    """Everything that could make two engines behave differently."""
    cache = vars(engine._cache).copy()
    live = [
        (
            one.request.id,
            one.order,
            one.emitted,
            one.computed,
            one.blocks,
            one.stored,
            one.mark,
            one.last_step,
            one.seen,
            one.fetch,
            one.wrong,
        )
        for one in engine._live.values()
    ]
    running = list(engine._running)
    return [
        engine.counters,
        engine.gauges(),
        engine._blocked,
        repr(engine._ahead),
        running,
        live,
        cache,
        list(engine._cache._freed.items()),
        sorted(engine._fetching),
        list(engine._waiting.fetched),
        sorted(engine._abandoned),
        sorted(engine.kv.kept),
        engine.kv._wrong,
    ]


@settings(deadline=None, max_examples=examples(150))
@given(st.data())
def test_a_stretch_leaves_what_its_steps_would_have_left(data: st.DataObject) -> None:
    """And both agree with a recount, whatever was done, and give every request its tokens."""
    max_num_seqs, max_loras = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    ahead = data.draw(st.booleans())
    kv_tokens, step_tokens = 16 * data.draw(st.integers(6, 40)), data.draw(st.sampled_from((8, 17, 64, 8192)))
    quick, slow = (
        Engine(
            H100,
            max_num_seqs=max_num_seqs,
            max_loras=max_loras,
            kv_tokens=kv_tokens,
            step_tokens=step_tokens,
            async_scheduling=ahead,
        )
        for _ in range(2)
    )
    for engine in (quick, slow):
        engine.publish_kv_events()
    published: set[int] = set()
    owed: dict[str, int] = {}
    transfers: list[str] = []
    for number in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(("add", "go", "go", "go", "abort", "transfer", "release")))
        if action == "add":
            prompt = data.draw(st.integers(1, quick.kv_room_tokens - 1))
            output = data.draw(st.integers(1, quick.kv_room_tokens - prompt))
            adapter = data.draw(st.sampled_from((None, None, "a", "b", "c", "d")))
            pins, remote = data.draw(st.sampled_from(((False, False), (True, False), (False, True))))
            request = wanted(str(number), prompt, output, adapter, pins=pins, remote=remote)
            quick.add(request)
            slow.add(request)
            owed[request.id] = output
        elif action == "abort" and owed:
            name = data.draw(st.sampled_from(sorted(owed)))
            assert quick.abort(name)
            assert slow.abort(name)
            del owed[name]
        elif action == "transfer" and transfers:
            name = data.draw(st.sampled_from(transfers))
            transfers.remove(name)
            how = data.draw(st.sampled_from(("right", "wrong", "lost")))
            for engine in (quick, slow):
                engine.not_fetched(name) if how == "lost" else engine.fetched(name, how == "right")
        elif action == "release" and quick.kv.kept:
            name = data.draw(st.sampled_from(sorted(quick.kv.kept)))
            assert quick.release(name)
            assert slow.release(name)
        elif quick.busy:
            stable = quick.stable_steps()
            transfers += go(quick, slow, data.draw(st.integers(min(stable, 1), stable)), published, owed)
        check_engine(quick)
    while slow.busy or transfers or slow.kv.kept:
        while slow.busy:
            transfers += go(quick, slow, quick.stable_steps(), published, owed)
        for engine in (quick, slow):
            for name in transfers:
                engine.fetched(name)
            for name in list(engine.kv.kept):
                engine.release(name)
        transfers = []
    assert not quick.busy
    assert not owed
    assert slow.gauges().kv_used == 0.0


def step_of(engine: Engine, owed: dict[str, int]) -> StepResult:
    """Do a step and check that every request gets exactly its tokens, and ends with the last one."""
    result = engine.step()
    assert not engine.busy or result.duration_s > 0
    kept = engine.kv.kept or engine._fetching or engine._abandoned
    assert result.emitted or result.prefill_tokens or result.preempted or result.fetches or kept or not owed
    for name in result.emitted:
        owed[name] -= 1
        assert (owed[name] == 0) == (name in result.finished)
    for name in result.finished:
        del owed[name]
    return result


def go(quick: Engine, slow: Engine, steps: int, published: set[int], owed: dict[str, int]) -> list[str]:
    """Take `steps` steps in both (0: one that is not stable) and compare; the transfers that begin. `published` is what
    KV events add up to.
    """
    if steps == 0:
        result = quick.step()
        assert result == step_of(slow, owed)
    else:
        stretch_s, decodes = quick.stretch_s(steps), len(slow._running)
        result = quick.advance(steps)
        singles = [step_of(slow, owed) for _ in range(steps)]
        assert stretch_s == result.duration_s == pytest.approx(sum(one.duration_s for one in singles), rel=1e-9)
        assert all(one.finished == () for one in singles[:-1]), "somebody ended before the last step of a stretch"
        assert result.finished == singles[-1].finished
        assert result.decode_tokens == sum(one.decode_tokens for one in singles) == steps * decodes
        assert not any(one.prefill_tokens or one.admitted or one.preempted or one.fetches for one in singles)
        ends_s = accumulate(one.duration_s for one in singles)
        batches = [(end_s, one.kv_events[0][1]) for end_s, one in zip(ends_s, singles, strict=True) if one.kv_events]
        assert [changes for _, changes in result.kv_events] == [changes for _, changes in batches]
        assert [at_s for at_s, _ in result.kv_events] == pytest.approx([at_s for at_s, _ in batches], rel=1e-9)
    for _, changes in result.kv_events:
        published |= changes.stored
        published -= changes.removed
    assert published == quick._cache._cached.keys()
    assert state(quick) == state(slow)
    check_engine(quick)
    return [name for name, _ in result.fetches]


@settings(deadline=None, max_examples=examples(100))
@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(2, 3000)), min_size=1, max_size=20),
    st.floats(0.0, 1.2),
)
def test_the_steps_within_a_time_are_the_most_that_fit(sizes: list[tuple[int, int]], share: float) -> None:
    engine = Engine(H100, step_tokens=200_000)
    for number, (prompt, output) in enumerate(sizes):
        engine.add(EngineRequest(str(number), prompt, output))
    engine.step()
    stable = engine.stable_steps()
    assert stable == min(output for _, output in sizes) - 1
    seconds = share * engine.stretch_s(stable)
    steps = engine.steps_within(seconds)
    assert steps == 0 or engine.stretch_s(steps) <= seconds + 1e-9
    assert steps == stable or engine.stretch_s(steps + 1) > seconds
    for exact in {1, steps, stable} - {0}:
        for rounded in (1.0, 1.0 - 1e-14, 1.0 + 1e-14):
            assert engine.steps_within(engine.stretch_s(exact) * rounded) == exact
        assert engine.steps_within(engine.stretch_s(exact) - 1e-6) == exact - 1
    assert engine.steps_within(-1.0) == 0


def test_request_that_waits_for_an_end_does_not_stop_a_stretch() -> None:
    full = Engine(H100, max_num_seqs=1, async_scheduling=False)
    crowded = Engine(H100, kv_tokens=16 * 20, async_scheduling=False)
    slots = Engine(H100, max_loras=1, async_scheduling=False)
    for engine in (full, crowded, slots):
        engine.add(wanted("runs", 100, 50, "a"))
        engine.add(EngineRequest("waits", 220, 5, adapter="b"))
        assert engine.stable_steps() == 0, "nobody has looked yet who may come in"
        engine.step()
        assert engine.stable_steps() == 49
        engine.add(EngineRequest("late", 5, 60, adapter="a"))
        assert engine.stable_steps() == 0, "a new one might fit"
        engine.step()
    assert [engine.stable_steps() for engine in (full, crowded, slots)] == [48, 48, 48]
    assert full.abort("waits")
    assert full.stable_steps() == 0
    assert crowded.advance(48).finished == ("runs",)
    assert crowded.step().admitted == (("waits", 0), ("late", 0))


@pytest.mark.parametrize("ahead", [False, True])
def test_no_stretch_reaches_a_step_for_which_blocks_may_be_missing(ahead: bool) -> None:
    engine = Engine(H100, kv_tokens=16 * 9, async_scheduling=ahead)
    engine.add(EngineRequest("old", 48, 60))
    engine.add(EngineRequest("young", 40, 60))
    engine.step()
    # Three of eight blocks each; "old" needs its next ones with the steps 1, 17 and "young" with 9 and 25 after it.
    assert engine.stable_steps() == 16
    engine.advance(16)
    assert engine.stable_steps() == 0
    assert engine.counters.preemptions == ahead, "who loses its place is known when the step is planned"
    assert engine.step().preempted == ("young",)


@pytest.mark.parametrize("steps", [0, -1, 50])
def test_more_steps_than_are_stable_are_refused(steps: int) -> None:
    engine = Engine(H100)
    engine.add(wanted("a", 10, 50))
    engine.step()
    with pytest.raises(ValueError, match="49 are stable"):
        engine.advance(steps)
    assert engine.counters.steps == 1


def test_the_noise_of_steps_is_repeatable_and_keeps_the_median() -> None:
    def times(seed: int) -> list[float]:
        engine = Engine(H100, noise=Noise(), seed=seed)
        engine.add(wanted("a", 10, 500))
        return [engine.step().duration_s for _ in range(500)]

    quiet = Engine(H100)
    quiet.add(wanted("a", 10, 500))
    middle = sorted(quiet.step().duration_s for _ in range(500))[250]
    assert times(1) == times(1) != times(2)
    assert sorted(times(1))[250] == pytest.approx(middle, rel=0.02)


@pytest.mark.slow
def test_the_noise_of_a_stretch_is_that_of_the_mean_of_its_steps() -> None:
    noise, rng = Noise(sigma=0.2, slow_chance=0.05, slow_factor=5.0), random.Random(1)
    expected = fmean(noise.factor(rng) for _ in range(200_000))
    for steps in (1, 4, 40):
        singly = [fmean(noise.factor(rng) for _ in range(steps)) for _ in range(4_000)]
        at_once = [noise.stretch_factor(rng, steps) for _ in range(40_000)]
        assert fmean(at_once) == pytest.approx(expected, rel=0.015)
        assert stdev(at_once) == pytest.approx(stdev(singly), rel=0.1)


def test_stretch_noise_is_repeatable_with_optional_slow_steps() -> None:
    quiet = Noise(sigma=0.0, slow_chance=0.0)
    assert quiet.stretch_factor(random.Random(1), 7) == 1.0
    draws = [[Noise().stretch_factor(random.Random(seed), 100) for _ in range(3)] for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    with pytest.raises(ValueError, match="below 1"):
        Noise(slow_chance=1.0)


@settings(deadline=None, max_examples=examples(100))
@given(st.data(), st.booleans())
def test_what_is_left_of_a_stretch_is_still_stable(data: st.DataObject, ahead: bool) -> None:
    engine = Engine(H100, kv_tokens=16 * data.draw(st.integers(12, 40)), async_scheduling=ahead)
    for number in range(data.draw(st.integers(1, 4))):
        engine.add(EngineRequest(str(number), data.draw(st.integers(1, 60)), data.draw(st.integers(2, 90))))
    while engine.busy:
        stable = engine.stable_steps()
        if stable < 2:
            engine.step()
            continue
        first = data.draw(st.integers(1, stable - 1))
        engine.advance(first)
        assert engine.stable_steps() >= stable - first
        engine.advance(stable - first)
        check_engine(engine)
