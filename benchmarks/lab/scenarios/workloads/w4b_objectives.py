"""W4b: more work than the fleet can do in time, of tenants with one objective. Are their shares as good as possible?"""

from __future__ import annotations

from benchmarks.lab.scenarios.goals import least, worst
from benchmarks.lab.scenarios.scenario import Case, Found, Goal, Metric, Scenario, sized
from llmproxy.lab.results.fairness import ADHERENCE_S
from llmproxy.lab.results.result import RunResult

OUTPUT_TOKENS = 128
ROOM = "ceilings=1/1/1"  # The setting of ceilings for a single band: no capacity is reserved for higher bands.
OURS = f"cost(fairness=slo,ordering=least_slack,{ROOM})"
OTHERS = (f"cost(fairness=fair_share,ordering=least_slack,{ROOM})", f"cost(fairness=fcfs,{ROOM})", "least_request")
POINTS = 0.02


def adherence(run: RunResult) -> float | None:
    """Returns the share of requests that kept their objective, of the worst tenant in the worst 5 minutes."""
    return run.fairness.adherence_least


def optimum(found: Found) -> float | None:
    """Returns the max-min optimum in the fullest 5 minutes.

    This is the number of completions of a busy fleet, divided by all requests that ended. All requests cost the same
    and have one objective, so that the best shares of all tenants are equal. The most completions per second under any
    policy count as the capacity of the fleet. None if no request ended.
    """
    runs = [run for some in found.runs.values() for run in some]
    done = max((run.loaded.output_tokens_per_s / OUTPUT_TOKENS for run in runs), default=0.0)
    ended = worst(found.runs[OURS], lambda run: float(run.fairness.ended_most))
    return min(1.0, ADHERENCE_S * done / ended) if ended and done else None


def goals(found: Found) -> list[Goal]:
    """Returns the goal: how far the worst tenant is from the optimum."""
    best = optimum(found)
    others = [(policy, least(found.runs[policy], adherence)) for policy in OTHERS]
    about = ", ".join(f"{policy} {value:.3f}" for policy, value in others if value is not None)
    return [
        Goal(
            "least adherence of a tenant in 5 min",
            least(found.runs[OURS], adherence),
            (best or 1.0) - POINTS,
            about=f"the optimum {best or 1.0:.3f} less 2 points; {about}",
        )
    ]


SCENARIO = Scenario(
    "W4b",
    "Objectives",
    "Four tenants with equal requests and a first token due within 2 s, each with twice the rate of the tenant before,"
    " at 1.3 times the capacity of the fleet. The best share of the worst tenant is known: the same for all.",
    Metric("least adherence", adherence),
    (
        Case(
            "four tenants, 1 x 8B",
            f"gen:unequal_tenants,tenants=4,ratio=2,rate=20,ttft_slo_s=2,duration_s=480,output_tokens={OUTPUT_TOKENS}",
            "1xllama-8b-h100",
            (1.3,),
            # Late requests should leave soon enough to be counted in their own 5 minutes.
            overrides={"queue.max_wait_s": "4"},
            shape=sized(max_num_seqs=16),
            policies=(OURS, *OTHERS),
            goals=goals,
        ),
    ),
)
