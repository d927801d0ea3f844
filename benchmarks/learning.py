"""How soon placement by cost knows how fast its backends are, and how soon it is over one that becomes slow.

    python -m benchmarks.learning --seeds 5

Both in virtual time, on the fleet and the conversations of W7: four H100 and four A100 without labels, and half way one
H100 takes twice as long for everything. The first table holds what was learned after so many answers against the
step times of the simulated engines: how many times as long an A100 takes for a prompt of 1,000 tokens, and for a step
of 16 sequences. The second puts requests side by side that are the same but for the fault, by when they arrived after
it, and has the p99 of their TTFT with the fault over that without it, for `cost` and for the oracle, which knows.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from rich.console import Console
from rich.table import Table

from benchmarks.scenarios.scenario import Place, placed
from benchmarks.scenarios.workloads.w7_mixed_fleet import SCENARIO
from llmproxy.core.domain import Learned, Outcome
from llmproxy.lab.policies.by_name import plan_named
from llmproxy.lab.results.objectives import scaled_profile
from llmproxy.lab.results.record import Record
from llmproxy.lab.run.replay import SETTLE_S, Run, Setup
from llmproxy.lab.run.runs import Simulation, prepared
from llmproxy.lab.run.virtual_time import run

AFTER_ANSWERS = (25, 50, 100, 150, 200, 300, 500, 1_000)
PROMPT_TOKENS = 1_000
SEQUENCES, CONTEXT_TOKENS = 16, 1_200
"""The step that is compared, and the mean context of W7's conversations."""
WINDOWS_S = ((0.0, 5.0), (5.0, 10.0), (10.0, 15.0), (15.0, 30.0))


@dataclass(slots=True)
class Observed:
    """(arrival, TTFT) in seconds of each completed request, and what was learned after so many answers."""

    ttft_s: dict[str, tuple[float, float]] = field(default_factory=dict)
    learned: dict[int, Learned] = field(default_factory=dict)


def observed(place: Place, policy: str, seed: int, *, faults: bool) -> Observed:
    """One run of a place, with or without the faults of its fleet."""
    simulation: Simulation = place.simulation(seed)
    fleet = simulation.fleet if faults else replace(simulation.fleet, faults=())
    trace, found = prepared(simulation, seed, place.rate_scale)
    plan = plan_named(policy, simulation.config)
    seen = Observed()

    def add(record: Record) -> None:
        if record.outcome is not Outcome.COMPLETED or record.ttft_s is None:
            return
        arrival = record.arrival
        # Both runs have the same arrivals, each of which is identified by its time and length.
        seen.ttft_s[f"{arrival.at_s}/{arrival.prompt_tokens}"] = (record.arrived_s, record.ttft_s)
        if len(seen.ttft_s) in AFTER_ANSWERS:
            choices = one.proxies[0].pools.choices(asyncio.get_running_loop().time())
            if choices and choices[0].learned is not None:
                seen.learned[len(seen.ttft_s)] = choices[0].learned

    setup = Setup(trace, fleet, plan, simulation.config, seed, place.prefill_scale, found.duration_s, ())
    one = Run(setup, on_record=add)
    run(one.go())
    return seen


def true_ratios(place: Place) -> tuple[float, float]:
    """How many times as long the last replica takes as the first: for a prompt, and for a step."""
    slow, fast = (scaled_profile(place.fleet.replicas[i], place.prefill_scale) for i in (-1, 0))
    prompt = [(0, PROMPT_TOKENS)]
    context = SEQUENCES * CONTEXT_TOKENS
    return (
        (slow.frontend_s + slow.step_s(0, 0, prompt)) / (fast.frontend_s + fast.step_s(0, 0, prompt)),
        slow.step_s(SEQUENCES, context, []) / fast.step_s(SEQUENCES, context, []),
    )


def learned_ratios(place: Place, learned: Learned) -> tuple[float, float]:
    """The same as it was learned: the mean of each kind's backends."""
    first = place.fleet.replicas[0].profile_name
    fast = {spec.name for spec in place.fleet.replicas if spec.profile_name == first}
    prompts: dict[bool, list[float]] = {True: [], False: []}
    steps: dict[bool, list[float]] = {True: [], False: []}
    for pace in learned.backends:
        kind = pace.backend in fast
        prompts[kind].append(pace.prefill_factor)
        steps[kind].append(pace.step_factor)
    return fmean(prompts[False]) / fmean(prompts[True]), fmean(steps[False]) / fmean(steps[True])


def p99(values: Sequence[float]) -> float:
    """Nearest rank."""
    return sorted(values)[max(0, -(-99 * len(values) // 100) - 1)]


def main() -> None:
    """Run both and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--load", type=float, default=0.7, help="share of what the fleet can balance")
    parser.add_argument("--prefill-scale", type=float, default=1.0)
    args = parser.parse_args()
    seeds = range(1, args.seeds + 1)
    place = placed(SCENARIO, SCENARIO.cases[0], args.load, args.prefill_scale, 1)
    console = Console()
    with_fault = {p: [observed(place, p, seed, faults=True) for seed in seeds] for p in ("cost", "oracle")}
    without = {p: [observed(place, p, seed, faults=False) for seed in seeds] for p in ("cost", "oracle")}

    true_prompt, true_step = true_ratios(place)
    table = Table(title=f"learned after so many answers: A100 over H100 (true {true_prompt:.2f}, {true_step:.2f})")
    for column in ("answers", "a prompt", "error, median of seeds", "a step", "error, median of seeds"):
        table.add_column(column, justify="right")
    for count in AFTER_ANSWERS:
        ratios = [learned_ratios(place, d.learned[count]) for d in with_fault["cost"] if count in d.learned]
        if not ratios:
            continue
        prompts, steps = zip(*ratios, strict=True)
        table.add_row(
            str(count),
            f"{median(prompts):.2f}",
            f"{median(abs(x / true_prompt - 1.0) for x in prompts):.1%}",
            f"{median(steps):.2f}",
            f"{median(abs(x / true_step - 1.0) for x in steps):.1%}",
        )
    console.print(table)

    fault_s = place.fleet.faults[0].at_s
    table = Table(title="TTFT p99 with a replica at half its speed over that without, by arrival after it slowed down")
    for column in ("seconds after", *with_fault, "requests"):
        table.add_column(column, justify="right")
    for first, last in ((-30.0, 0.0), *WINDOWS_S):
        row, count = [], 0
        for policy in with_fault:
            with_s, without_s = [], []
            for slowed, plain in zip(with_fault[policy], without[policy], strict=True):
                for name, (arrived_s, ttft_s) in plain.ttft_s.items():
                    if first <= arrived_s - fault_s < last and name in slowed.ttft_s:
                        with_s.append(slowed.ttft_s[name][1])
                        without_s.append(ttft_s)
            count = len(with_s)
            row.append(f"{p99(with_s) / p99(without_s):.2f} ({p99(with_s):.2f} s)" if with_s else "")
        table.add_row(f"{first:g} to {last:g}", *row, str(count))
    console.print(table)
    console.print(f"load {args.load:g}, prefill x{args.prefill_scale:g}, {args.seeds} seeds; settled {SETTLE_S:g} s")


if __name__ == "__main__":
    main()
