"""Generated traces against their definitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from llmproxy.lab.traces import GENERATORS, generate, trace_named
from llmproxy.lab.traces.arrival import Arrival, Trace, TraceError, turns_of
from tests.lab.small import printed_with_hash_seeds


def made(spec: str, seed: int = 0) -> list[Arrival]:
    return list(generate(f"gen:{spec}", seed).arrivals())


def everything(arrivals: Iterable[Arrival]) -> list[Arrival]:
    return [turn for arrival in arrivals for turn in turns_of(arrival)]


def infinite_hit(trace: Trace) -> float:
    """The share of prompt tokens found in a cache that forgets nothing."""
    cached: set[int] = set()
    hits = asked = 0
    for arrival in everything(trace.arrivals()):
        blocks = iter(arrival.blocks)
        hit = 0
        while next(blocks, None) in cached:
            hit += 1
        hits += min(hit * trace.block_tokens, arrival.prompt_tokens)
        asked += arrival.prompt_tokens
        cached.update(arrival.blocks)
    return hits / asked


def rate(arrivals: Sequence[Arrival], from_s: float, to_s: float) -> float:
    return sum(from_s <= a.at_s < to_s for a in arrivals) / (to_s - from_s)


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", GENERATORS)
def test_every_generator_is_sorted_repeatable_and_seeded(name: str) -> None:
    trace = generate(f"gen:{name}", 1)
    first = list(trace.arrivals())
    assert first
    assert [a.at_s for a in first] == sorted(a.at_s for a in first)
    assert first == list(trace.arrivals())
    assert first != list(generate(f"gen:{name}", 2).arrivals())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", GENERATORS)
def test_no_prompt_has_more_blocks_than_fit(name: str) -> None:
    trace = generate(f"gen:{name}", 1)
    for turn in everything(trace.arrivals()):
        assert len(turn.blocks) <= -(-(turn.prompt_tokens + turn.output_tokens) // trace.block_tokens)
        assert turn.prompt_tokens >= 1
        assert turn.output_tokens >= 1


@pytest.mark.slow
def test_hash_seeds_change_nothing() -> None:
    one, other = printed_with_hash_seeds(
        "from llmproxy.lab.traces import GENERATORS, generate; import zlib\n"
        "print([zlib.crc32(repr(list(generate('gen:' + n).arrivals())[:50]).encode()) for n in GENERATORS])"
    )
    assert one == other


# --- many turns -------------------------------------------------------------------------------------------------------


def by_session(arrivals: Iterable[Arrival]) -> dict[str | None, list[Arrival]]:
    sessions: dict[str | None, list[Arrival]] = {}
    for turn in everything(arrivals):
        sessions.setdefault(turn.session, []).append(turn)
    return sessions


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "spec",
    ["interactive_chat", "agent_loops"],
)
def test_a_turn_begins_with_all_of_the_turn_before(spec: str) -> None:
    sessions = by_session(made(spec))
    owners: dict[int, set[str | None]] = {}
    followed = 0
    for session, asked in sessions.items():
        for before, after in pairwise(asked):
            assert after.blocks[: len(before.blocks)] == before.blocks
            assert after.prompt_tokens > before.prompt_tokens + before.output_tokens
            followed += 1
        for block in asked[-1].blocks:
            owners.setdefault(block, set()).add(session)
    assert followed > 20
    # A block is one session's own or everybody's.
    assert {len(sessions) for sessions in owners.values()} == {1, len(sessions)}


def test_interactive_chat_has_the_published_sizes_and_times() -> None:
    arrivals = made("interactive_chat,rate=20,duration_s=400")
    assert len(arrivals) == pytest.approx(2_000, rel=0.06)
    assert {len(list(turns_of(a))) for a in arrivals} == {4}
    assert fmean(a.prompt_tokens for a in arrivals) == pytest.approx(1_000 + 4_000 + 50, rel=0.03)
    thinks = [turn.think_s for turn in everything(arrivals)]
    assert fmean(thinks) == pytest.approx(45, rel=0.05)
    assert min(thinks) >= 5
    assert max(thinks) <= 300


def test_agent_loops_are_as_many_as_agents() -> None:
    arrivals = made("agent_loops,concurrency=100,conversations=2,ramp_s=50")
    assert [a.at_s for a in arrivals] == pytest.approx([0.5 * n for n in range(100)])
    sessions = by_session(arrivals)
    assert len(sessions) == 200
    lengths = [len(asked) for asked in sessions.values()]
    assert min(lengths) >= 2
    assert max(lengths) <= 20
    assert fmean(lengths) == pytest.approx(6, abs=0.6)
    starts = [asked[0].prompt_tokens for asked in sessions.values()]
    assert fmean(starts) == pytest.approx(3_000 + 57_500 + 1_500, rel=0.05)
    outputs = [turn.output_tokens for turn in everything(arrivals)]
    assert fmean(outputs) == pytest.approx(800, rel=0.08)
    assert 50 <= min(outputs) < max(outputs) <= 4_000


# --- single requests --------------------------------------------------------------------------------------------------


def test_shared_system_prompts_repeat_their_questions() -> None:
    arrivals = made("shared_system_prompts,rate=30,duration_s=100")
    assert len(arrivals) == pytest.approx(3_000, rel=0.06)
    assert {(a.prompt_tokens, a.output_tokens) for a in arrivals} == {(7_200, 1_000)}
    first, second = arrivals[:750], arrivals[750:1500]
    assert len({a.blocks for a in first}) == 750
    assert [a.blocks for a in first] == [a.blocks for a in second]
    assert set(Counter(a.tenant for a in first).values()) == {5}


def test_customers_are_shuffled() -> None:
    arrivals = made("shared_system_prompts,rate=30,duration_s=40")[:750]
    assert sum(a.tenant == b.tenant for a, b in pairwise(arrivals)) < 20


def test_users_of_one_customer_share_its_system_prompt_alone() -> None:
    arrivals = made("shared_system_prompts,rate=30,duration_s=40")[:750]
    heads = Counter(a.blocks[:375] for a in arrivals)
    assert set(heads.values()) == {5}
    tails = Counter(block for a in arrivals for block in a.blocks[375:])
    assert set(tails.values()) == {1}


def test_a_first_round_of_questions_hits_the_shared_prefix() -> None:
    trace = generate("gen:shared_system_prompts,rate=10,duration_s=1000")
    first = list(trace.arrivals())[:750]
    expected = 6_000 * (750 - 150) / (750 * 7_200)
    assert infinite_hit(Trace("first", lambda: iter(first), trace.block_tokens)) == pytest.approx(expected)


def test_lora_popularity_is_zipf() -> None:
    arrivals = made("lora_zipf,rate=50,duration_s=400")
    assert len(arrivals) == pytest.approx(20_000, rel=0.03)
    shares = Counter(a.adapter for a in arrivals)
    top = [count / len(arrivals) for _, count in shares.most_common(64)]
    harmonic = sum(1 / rank for rank in range(1, 101))
    assert top[0] == pytest.approx(1 / harmonic, rel=0.05)
    assert sum(top[:8]) == pytest.approx(0.52, abs=0.02)
    assert sum(top) == pytest.approx(0.915, abs=0.01)
    lengths = [a.prompt_tokens for a in arrivals]
    assert (min(lengths), max(lengths)) == (8, 512)
    assert fmean(lengths) == pytest.approx(260, rel=0.02)
    assert len(made("lora_zipf,alpha=0,adapters=10")) > 0


@pytest.mark.slow
def test_lora_gaps_are_gamma() -> None:
    def gap_cv(cv: float) -> float:
        times = [a.at_s for a in made(f"lora_zipf,adapters=1,rate=20,duration_s=1000,cv={cv}")]
        gaps = [b - a for a, b in pairwise(times)]
        return pstdev(gaps) / fmean(gaps)

    assert gap_cv(1.0) == pytest.approx(1.0, rel=0.05)
    assert gap_cv(4.0) == pytest.approx(4.0, rel=0.1)
    assert gap_cv(0.2) == pytest.approx(0.2, rel=0.05)


def test_drift_moves_the_popularity() -> None:
    def top(arrivals: Iterable[Arrival]) -> str | None:
        return Counter(a.adapter for a in arrivals).most_common(1)[0][0]

    still = made("lora_zipf,rate=20,duration_s=400")
    moved = made("lora_zipf,rate=20,duration_s=400,drift_s=100")
    tops = [top(a for a in moved if n * 100 <= a.at_s < n * 100 + 100) for n in range(4)]
    assert tops[0] == top(still)
    assert len(set(tops)) == 4


def test_the_noisy_neighbour_is_noisy_in_its_window_alone() -> None:
    arrivals = made("noisy_neighbour,rate=40,tenants=4")
    noisy = [a for a in arrivals if a.tenant == "noisy"]
    quiet = [a for a in arrivals if a.tenant == "tenant-2"]
    assert {a.tenant for a in arrivals} == {"noisy", "tenant-1", "tenant-2", "tenant-3"}
    assert rate(noisy, 0, 120) == pytest.approx(10, rel=0.1)
    assert rate(noisy, 120, 150) == pytest.approx(55, rel=0.1)
    assert rate(noisy, 150, 330) == pytest.approx(100, rel=0.05)
    assert rate(noisy, 360, 480) == pytest.approx(10, rel=0.1)
    assert rate(quiet, 150, 330) == pytest.approx(10, rel=0.1)
    assert fmean(a.prompt_tokens for a in arrivals) == pytest.approx(512, rel=0.03)


def test_a_window_without_a_ramp() -> None:
    noisy = [a for a in made("noisy_neighbour,rate=40,tenants=4,ramp_s=0") if a.tenant == "noisy"]
    assert rate(noisy, 120, 125) == pytest.approx(100, rel=0.2)


def test_priorities_are_mixed_20_60_20() -> None:
    arrivals = made("priority_mix,duration_s=2000")
    shares = Counter(a.band for a in arrivals)
    assert len(arrivals) == pytest.approx(12_000, rel=0.03)
    assert shares["critical"] / len(arrivals) == pytest.approx(0.2, abs=0.015)
    assert shares["default"] / len(arrivals) == pytest.approx(0.6, abs=0.015)
    assert shares["sheddable"] / len(arrivals) == pytest.approx(0.2, abs=0.015)
    assert len({a.blocks for a in arrivals}) == 1


def test_prompts_of_a_priority_mix_may_differ() -> None:
    arrivals = made("priority_mix,prompt_tokens=320,shared_tokens=160")
    assert {a.blocks[:10] for a in arrivals} == {tuple(range(10))}
    assert len({a.blocks[10] for a in arrivals}) == len(arrivals)


def test_steps_come_at_the_end_of_each_period() -> None:
    arrivals = made("step_bursts,rate=20")
    for start_s in range(0, 600, 120):
        assert rate(arrivals, start_s, start_s + 90) == pytest.approx(20, rel=0.15)
        assert rate(arrivals, start_s + 90, start_s + 120) == pytest.approx(100, rel=0.1)


# --- as written on a command line -------------------------------------------------------------------------------------


def test_a_name_tells_what_was_asked() -> None:
    trace = trace_named("gen:lora_zipf, rate=20 ,duration_s=30,seed=3", seed=8)
    assert trace.name == "lora_zipf,rate=20,duration_s=30,seed=3"
    assert list(trace.arrivals()) == made("lora_zipf,rate=20,duration_s=30", 3)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("lora", "no generator 'lora' \\(nearest: \"lora_zipf\"\\); known: agent_loops, "),
        ("", "no generator ''"),
        ("lora_zipf,rat=3", "gen:lora_zipf: no key 'rat' \\(nearest: \"rate\"\\)"),
        ("lora_zipf,rate", "gen:lora_zipf: 'rate' should be key=value"),
        ("lora_zipf,rate=fast", "gen:lora_zipf: rate is 'fast'; should be a number"),
        ("lora_zipf,adapters=1.5", "gen:lora_zipf: adapters is '1.5'; should be an integer"),
        ("lora_zipf,rate=1,rate=2", "gen:lora_zipf: rate is given twice"),
        ("lora_zipf,rate=nan", "gen:lora_zipf: rate is nan; should be 1e-06 to 1,000,000"),
        ("lora_zipf,rate=0", "gen:lora_zipf: rate is 0; should be"),
        ("lora_zipf,tokens_max=3", "gen:lora_zipf: tokens_max is 3; should be 8 to 10,000,000"),
        ("interactive_chat,turns=0", "turns is 0; should be 1 to 200"),
        ("noisy_neighbour,end_s=500", "end_s is 500; should be 0 to 480"),
        ("noisy_neighbour,ramp_s=130", "ramp_s is 130; should be 0 to 120"),
        ("priority_mix,critical=0.9,sheddable=0.2", "critical_and_sheddable is 1.1; should be 0 to 1"),
        ("agent_loops,context_tokens_min=200000", "context_tokens_max is 100000; should be 200,000 to 10,000,000"),
        ("step_bursts,duration_s=1e9", "duration_s is 1e\\+09; should be 0.001 to 31,622,400"),
    ],
)
def test_what_cannot_be_generated(spec: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        generate(f"gen:{spec}")


def test_shares_that_fill_the_whole_are_right() -> None:
    assert {a.band for a in made("priority_mix,critical=0.9,sheddable=0.1")} == {"critical", "sheddable"}


def test_mixed_lengths_are_long_prompts_among_long_answers() -> None:
    arrivals = made("mixed_lengths,duration_s=300,rate=30,long=0.25")
    long = [one for one in arrivals if one.tenant == "long"]
    short = [one for one in arrivals if one.tenant == "short"]
    assert len(long) / len(arrivals) == pytest.approx(0.25, abs=0.02)
    for some, prompt, output in ((long, 8_000, 100), (short, 300, 500)):
        assert fmean(one.prompt_tokens for one in some) == pytest.approx(prompt, rel=0.1)
        assert fmean(one.output_tokens for one in some) == pytest.approx(output, rel=0.1)


def test_mixed_objectives_are_narrow_for_short_prompts() -> None:
    arrivals = made("mixed_objectives,duration_s=300,tight=0.25")
    tight = [one for one in arrivals if one.tenant == "tight"]
    lax = [one for one in arrivals if one.tenant == "lax"]
    assert len(tight) / len(arrivals) == pytest.approx(0.25, abs=0.02)
    assert {(one.ttft_slo_s, one.tpot_slo_s) for one in tight} == {(0.15, 0.025)}
    assert {(one.ttft_slo_s, one.tpot_slo_s) for one in lax} == {(4.0, 0.08)}
    assert fmean(one.prompt_tokens for one in tight) == pytest.approx(800, rel=0.1)
    assert fmean(one.prompt_tokens for one in lax) == pytest.approx(2_400, rel=0.1)


def test_the_ramp_has_its_stages_and_a_day_its_noon() -> None:
    arrivals = made("rate_ramp,factor=10,stage_s=30")
    counts = [sum(30 * i <= one.at_s < 30 * (i + 1) for one in arrivals) for i in range(7)]
    assert counts == pytest.approx([300 * rate for rate in (2, 4, 6, 8, 10, 4, 1)], rel=0.15)
    assert all(2_666 <= one.prompt_tokens <= 5_334 for one in arrivals)
    arrivals = made("day,least=1,most=10,period_s=400,days=2")
    counts = [sum(100 * i <= one.at_s < 100 * (i + 1) for one in arrivals) for i in range(8)]
    assert min(counts[1:3] + counts[5:7]) > 2 * max(counts[0], counts[3], counts[4], counts[7])
