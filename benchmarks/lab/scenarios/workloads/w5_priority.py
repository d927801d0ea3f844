"""W5: more work than the fleet can do, a fifth of it critical. Is the fifth served as if it were alone?"""

from __future__ import annotations

from functools import partial

from benchmarks.lab.scenarios.goals import full_step_s, in_band, mean, versus
from benchmarks.lab.scenarios.scenario import CRITICAL_GOODPUT, Beside, Case, Found, Goal, Scenario, sized
from llmproxy.lab.results.result import RunResult
from llmproxy.lab.traces.mix import Mix

PROMPT_TOKENS, SHARED_TOKENS, OUTPUT_TOKENS = 1_000, 500, 512
TRACE = (
    f"gen:priority_mix,rate=25,duration_s=120,prompt_tokens={PROMPT_TOKENS},shared_tokens={SHARED_TOKENS},"
    f"output_tokens={OUTPUT_TOKENS}"
)
LEARNED_IN_S = 10.0  # The seconds after which learned limits should be as good as given limits.
ALONE = Beside("critical alone", "cost", Mix(band="critical"))
LEVEL = Beside("all bands equal, fcfs", "cost(fairness=fcfs,ceilings=1/1/1)", Mix(level=True))
FRONTIER = (*(f"cost(ceilings=1/{ceiling:g}/{ceiling:g})" for ceiling in (0.6, 0.7, 0.8, 0.9)), "cost(headroom_s=0)")
NO_ROOM = ("epp_blend", "least_request", "round_robin")
"""The gate of the endpoint picker, no queue in front of the engines, and engines in turn with vLLM's order."""

critical_ttft_p99 = in_band("critical", lambda group: group.ttft_s.p99)


def tokens_per_s(run: RunResult) -> float | None:
    """Returns the output tokens per second of all bands during the traffic; None if there were none."""
    return run.loaded.output_tokens_per_s or None


def of_band_per_s(run: RunResult, band: str) -> float:
    """Returns the output tokens per second of a band during the traffic."""
    return run.loaded.output_tokens.get(band, 0) / run.loaded.duration_s if run.loaded.duration_s else 0.0


def left_over(run: RunResult, of: RunResult) -> float | None:
    """Returns the rate of the band `default` in `run`, divided by the rate that it could have.

    It could have its demand, or the rate that the critical band leaves of the run `of` if that is smaller. None if it
    could have none.
    """
    span_s = run.loaded.duration_s
    if not span_s or "default" not in run.by_band:
        return None
    asked = run.by_band["default"].offered * OUTPUT_TOKENS / span_s
    left = of.loaded.output_tokens_per_s - of_band_per_s(run, "critical")
    return of_band_per_s(run, "default") / min(asked, left) if min(asked, left) > 0 else None


def goals(found: Found) -> list[Goal]:
    """Returns the goals of critical requests, and bounds for their cost to other bands."""
    place, ours, alone, level = found.place, found.runs["cost"], found.beside[ALONE.name], found.beside[LEVEL.name]
    step_s = full_step_s(place, PROMPT_TOKENS, PROMPT_TOKENS - SHARED_TOKENS, PROMPT_TOKENS + OUTPUT_TOKENS // 2)
    solo_s = mean(alone, critical_ttft_p99)
    of_fcfs = [left_over(run, other) or 0.0 for run in ours for other in level if run.seed == other.seed]
    judged = [
        Goal("critical goodput / alone", versus(ours, alone, CRITICAL_GOODPUT.of), 0.995),
        Goal(
            "critical TTFT p99, s",
            mean(ours, critical_ttft_p99),
            (solo_s or 0.0) + 2 * step_s,
            at_least=False,
            about=f"alone {solo_s or 0.0:.3f} + 2 full steps of {step_s:.3f}",
        ),
        Goal("inversions", float(sum(run.inversions for run in ours)) if ours else None, 0.0, at_least=False),
        Goal("output tokens/s / fcfs", versus(ours, level, tokens_per_s), 0.95),
        Goal(
            "default / rest of the capacity",
            mean(ours, lambda run: left_over(run, run)),
            0.97,
            about=f"of the rest under fcfs: {sum(of_fcfs) / max(1, len(of_fcfs)):.3f}",
        ),
    ]
    if place.load is not None and place.load < 1.0:
        judged.append(
            Goal("sheddable completed", mean(ours, in_band("sheddable", lambda g: g.completed / g.offered)), 0.99)
        )
    return judged


MIXED = partial(Case, trace=TRACE, fleet="2xllama-8b-h100", shape=sized(max_num_seqs=64), beside=(ALONE, LEVEL))
OVERLOAD = partial(MIXED, loads=(0.7, 1.0, 1.5, 2.0), goals=goals, quick_loads=(2.0,), warmup_s=LEARNED_IN_S)

SCENARIO = Scenario(
    "W5",
    "Priorities in overload",
    "20 % critical, 60 % default, 20 % sheddable, of one kind otherwise, up to twice the capacity of the fleet;"
    " beside it the critical requests of the same trace alone, at the same times, and all of them in one band. Batch"
    " limits are learned from the engines' gauges, or configured.",
    CRITICAL_GOODPUT,
    (
        OVERLOAD("20/60/20, 2 x 8B", policies=("cost", *NO_ROOM, "oracle")),
        OVERLOAD("20/60/20, limits given, 2 x 8B", known_limits=True, policies=("cost",)),
        MIXED(
            "ceilings, 2 x 8B",
            loads=(1.5,),
            known_limits=True,
            policies=("cost", *FRONTIER, *NO_ROOM),
            quick=False,
        ),
    ),
)
