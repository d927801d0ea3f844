"""The laboratory's standing comparison: W1 to W11, every policy, in virtual time.

    make lab         # the quick set, one seed
    make lab-full    # the decisive points: more loads, five paired seeds, three baselines tuned, 95 % intervals

Each workload is one file in `workloads`. Every place (a case at a load) is run with the calibrated cost of a prompt
token and with 1.9 times that cost, because published runs disagree about it: a ranking counts only where it holds in
both. Runs are kept by all that they depend on, so a set that was stopped goes on where it was, and a change of the code
makes it run anew. `--minutes` ends a set early and says what is missing.

It prints one table for each place: the figure that decides, goodput (of all offered requests), TTFT, hits, how far
apart the service of two waiting tenants drifted, and how our policy compares with each other one on the same arrivals.
One folder per case below `--out` gets a `result.json` and a `report.html`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.lab.scenarios.scenario import Place, places
from benchmarks.lab.scenarios.store import Store
from benchmarks.lab.scenarios.tables import found_at, print_goals, print_place, print_verdicts, write_pages
from benchmarks.lab.scenarios.tuning import TUNING_SEEDS, Tuned, contenders, pick
from benchmarks.lab.scenarios.workloads import SCENARIOS
from llmproxy.lab.results.result import Point
from llmproxy.lab.run.runs import Finished, Simulation, run_all

HERE = Path(__file__).resolve().parents[2]
PREFILL_SCALES = (1.0, 1.9)
QUICK_SEEDS = (1,)
FULL_SEEDS = (1, 2, 3, 4, 5)


@dataclass(slots=True)
class RunSet:
    """What has been run, by place, policy and seed; and what was left out for want of time."""

    store: Store
    ends_s: float
    finished: dict[tuple[str, Point], Finished] = field(default_factory=dict)
    missing: int = 0

    def run(self, wanted: Iterable[tuple[Place, Point]], what: str) -> None:
        """Run what is not kept yet, until the time is over."""
        todo: list[tuple[str, Simulation, Point]] = []
        for place, point in wanted:
            simulation = place.simulation(point.seed)
            kept = self.store.get(simulation, point)
            if kept is None:
                todo.append((place.label, simulation, point))
            else:
                self.finished[place.label, point] = kept
        done = 0
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("runs"), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=len(todo))
            for index, one in run_all([(simulation, point) for _, simulation, point in todo]):
                label, simulation, point = todo[index]
                self.store.put(simulation, one)
                self.finished[label, point] = one
                done += 1
                bar.update(task, completed=done)
                if time.monotonic() > self.ends_s:
                    break
        self.missing += len(todo) - done

    def of(self, place: Place, policy: str, seeds: Sequence[int]) -> list[Finished]:
        """The runs of one policy at one place, by seed."""
        found = [self.finished.get((place.label, place.point(policy, seed))) for seed in seeds]
        return [one for one in found if one is not None]


def main() -> None:
    """Run a set and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the decisive points with intervals, not the quick set")
    parser.add_argument("--only", default="", help="workloads to run, such as W1,W5; all unless given")
    parser.add_argument("--minutes", type=float, default=90.0, help="when to stop, whatever is left")
    parser.add_argument("--out", type=Path, default=HERE / "out" / "lab", help="where result.json and the pages go")
    parser.add_argument("--store", type=Path, default=HERE / "out" / "runs", help="where runs are kept")
    args = parser.parse_args()
    began_s = time.monotonic()
    only = {name.strip().upper() for name in args.only.split(",") if name.strip()}
    if unknown := only - {scenario.key.upper() for scenario in SCENARIOS}:
        parser.error(f"no workload {', '.join(sorted(unknown))}; known: {', '.join(s.key for s in SCENARIOS)}")
    chosen = [scenario for scenario in SCENARIOS if not only or scenario.key.upper() in only]
    seeds = FULL_SEEDS if args.full else QUICK_SEEDS
    run_set = RunSet(Store(args.store), began_s + 60.0 * args.minutes)
    found = places(chosen, not args.full, PREFILL_SCALES, seeds[0])
    tuned = _tune(run_set, found) if args.full else {}
    policies = {place.label: policies_of(place, tuned) for place in found}
    # The places of the quick set first, and seed by seed, so that a set that ends early has what decides, and every
    # policy on the same arrivals.
    first = [place for place in found if place.quick]
    for some in (first, [place for place in found if not place.quick]):
        run_set.run(
            ((q, q.point(policy, s)) for s in seeds for p in some for q, policy in _all_of(p, policies)), "simulating"
        )
    console = Console(width=None if Console().is_terminal else 132)
    for place in found:
        print_place(console, place, {policy: run_set.of(place, policy, seeds) for policy in policies[place.label]})
        print_goals(console, found_at(place, policies, run_set.of, seeds))
    print_verdicts(console, found, policies, run_set.of, seeds)
    write_pages(args.out, found, policies, run_set.of, seeds, tuned)
    # Beside other work the clock on the wall says little. The workers have ended, so that their seconds are counted.
    used = os.times()
    cpu_s = used.user + used.system + used.children_user + used.children_system
    took = f"{time.monotonic() - began_s:.0f} s, {cpu_s:.0f} s of CPU time"
    console.print(f"{len(run_set.finished)} runs in {took}; pages in {args.out}", soft_wrap=True)
    if run_set.missing:
        console.print(f"{run_set.missing} runs are missing: the time was over. The same command goes on from here.")


def _all_of(place: Place, policies: Mapping[str, Sequence[str]]) -> Iterator[tuple[Place, str]]:
    """What is to be run for one place, with what is run beside it."""
    yield from ((place, policy) for policy in policies[place.label])
    yield from ((place.beside(one), one.policy) for one in place.case.beside)


def policies_of(place: Place, tuned: dict[str, Tuned]) -> list[str]:
    """The policies that run at a place: its own, and in the cases of the quick set what tuning found."""
    ran = place.case.policies
    if not place.case.quick:
        return list(ran)
    extra = [one.best for one in tuned.values() if one.workload == place.scenario.key and one.baseline in ran]
    extra = [name for name in extra if name not in ran]
    return [*ran, *dict.fromkeys(extra)]


def _tune(run_set: RunSet, found: Sequence[Place]) -> dict[str, Tuned]:
    """The best variant of each strong baseline for a workload's first case, found on seeds that no comparison uses."""
    first: dict[str, Place] = {}
    for place in found:
        if place.prefill_scale == PREFILL_SCALES[0]:
            first.setdefault(place.scenario.key, place)
    trials = [
        (place, place.point(variant, seed))
        for place in first.values()
        for name in contenders(place)
        for variant in contenders(place)[name]
        for seed in TUNING_SEEDS
    ]
    run_set.run(trials, "tuning")
    return {
        f"{place.scenario.key}: {name}": pick(place, name, variants, run_set.of)
        for place in first.values()
        for name, variants in contenders(place).items()
    }


if __name__ == "__main__":
    main()
