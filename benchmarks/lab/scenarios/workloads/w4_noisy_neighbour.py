"""W4: a tenant asks for ten times as much as before. Do other tenants notice?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

from benchmarks.lab.scenarios.goals import Figure, least, mean, versus, worst
from benchmarks.lab.scenarios.scenario import VICTIMS_GOODPUT, Beside, Case, Found, Goal, Scenario, config_of, sized
from llmproxy.lab.results.result import RunResult
from llmproxy.lab.traces.mix import Mix

FCFS, ROUND_ROBIN = "cost(fairness=fcfs)", "cost(fairness=round_robin)"
FAIRNESS = (FCFS, ROUND_ROBIN, "least_request", "epp_sticky", "cache_aware")
POLICIES = ("cost", *FAIRNESS, "oracle")
SHARED = ("cost", FCFS, ROUND_ROBIN, "least_request")
ALONE = "victims alone"
VICTIM_REQUESTS = 30

COUNTER: Figure = lambda run: run.fairness.counter_difference  # noqa: E731
SERVICE: Figure = lambda run: run.service_difference_tokens  # noqa: E731
JAIN: Figure = lambda run: run.fairness.jain_least  # noqa: E731


def victims_ttft_p99(run: RunResult, noisy: str) -> float | None:
    """Returns the TTFT p99 of the median tenant in seconds, without `noisy` and tenants that have few requests.

    None if no tenant is left.
    """
    figures = [
        group.ttft_s.p99
        for name, group in run.by_tenant.items()
        if name not in (noisy, "(other)") and group.offered >= VICTIM_REQUESTS and group.ttft_s.p99 is not None
    ]
    return median(figures) if figures else None


def against(found: Found, figure: Figure) -> str:
    """Returns the same figure under the policies without shares, as text."""
    about = [(name, worst(found.runs[policy], figure)) for name, policy in (("fcfs", FCFS), ("in turn", ROUND_ROBIN))]
    return ", ".join(f"{name} {value:.3g}" for name, value in about if value is not None)


def shared(found: Found) -> list[Goal]:
    """Returns the goals for tenants that together want more than the capacity."""
    ours, fcfs = found.runs["cost"], found.runs[FCFS]
    chosen = config_of(found.place.case).scheduling
    longest = max((run.fairness.prompt_tokens_most for run in ours), default=0)
    in_flight = max((run.fairness.unfinished_tokens_most for run in ours), default=0)
    bound = max(chosen.input_weight * longest, chosen.output_weight * in_flight)
    measured = f"L {longest:,}, M {in_flight:,}"
    return [
        Goal("counter difference", worst(ours, COUNTER), bound, False, f"{measured}; {against(found, COUNTER)}"),
        Goal("service difference", worst(ours, SERVICE), 2 * bound, False, against(found, SERVICE)),
        Goal("service difference, half the bound", worst(ours, SERVICE), bound, False),
        Goal("least Jain index of 60 s", least(ours, JAIN), 0.99, True, against(found, JAIN)),
        Goal("output tokens/s / fcfs", versus(ours, fcfs, lambda run: run.loaded.output_tokens_per_s), 0.98),
    ]


def noisy(tenant: str) -> Callable[[Found], list[Goal]]:
    """Returns goals for a case in which `tenant` asks too often: the other tenants must not notice."""

    def goals(found: Found) -> list[Goal]:
        ours, fcfs = (
            versus(found.runs[policy], found.beside[ALONE], lambda run: victims_ttft_p99(run, tenant))
            for policy in ("cost", FCFS)
        )
        with_it_s = mean(found.runs["cost"], lambda run: victims_ttft_p99(run, tenant))
        about = f"fcfs {fcfs or 0.0:.3g}; {with_it_s or 0.0:.3g} s with it"
        return [*shared(found), Goal("median victim's TTFT p99 / alone", ours, 1.2, False, about)]

    return goals


EQUAL = partial(Case, fleet="2xllama-8b-h100", loads=(None,), shape=sized(max_num_seqs=64))
FULL = partial(Case, fleet="1xllama-8b-h100", loads=(1.2,))
ARENA = "lmsys_arena_vtc_real.csv.gz"


def _loud(name: str, trace: str, tenant: str, sequences: int, requests: int | None = None) -> Case:
    """Returns a case in which a tenant asks for ten times as much as in the file."""
    return FULL(
        name,
        trace,
        requests=requests,
        mix=Mix(loud=tenant),
        beside=(Beside(ALONE, "cost", Mix(loud=tenant, without=tenant)),),
        goals=noisy(tenant),
        shape=sized(max_num_seqs=sequences),
        policies=SHARED,
        quick=False,
    )


SCENARIO = Scenario(
    "W4",
    "Noisy neighbour",
    "Eight equal tenants until one of them asks for ten times as much; the tenants of a production hour (ServeGen): one"
    " makes 41 % of the requests, and the next comes ten times as often; 27 tenants of a chat arena, the first at its"
    " rate or ten times it. Both files at 1.2 times the capacity of the fleet. `cost` shares by tokens here.",
    VICTIMS_GOODPUT,
    (
        EQUAL(
            "aggressor x10, 2 x 8B",
            trace="gen:noisy_neighbour,tenants=8,rate=30,start_s=20,end_s=70,ramp_s=10,duration_s=90",
            policies=POLICIES,
        ),
        EQUAL(
            "nobody noisy, 2 x 8B",
            trace="gen:noisy_neighbour,tenants=8,rate=30,factor=1,start_s=20,end_s=70,ramp_s=10,duration_s=90",
            policies=("cost", "least_request"),
            quick=False,
        ),
        _loud("ServeGen m-large, second tenant x10, 1 x 8B", "servegen_mlarge_1h.csv.gz", "142", 64, requests=3_000),
        _loud("arena, first tenant x10, 1 x 8B", ARENA, "2", 32),
        FULL("arena, 1 x 8B", ARENA, goals=shared, shape=sized(max_num_seqs=16), policies=(*SHARED, "epp_sticky")),
    ),
)
