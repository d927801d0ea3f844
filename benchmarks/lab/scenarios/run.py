"""The comparison of policies: W1 to W9 and W11, in virtual time.

    make lab         # the quick set, one seed
    make lab-full    # all cases, five paired seeds, 95 % intervals

Each workload is one file in `workloads`. Every place (a case at a load) is run with the calibrated cost of a prompt
token and with 1.9 times that cost, because published runs disagree about it. A ranking counts only if it holds with
both.

Each place has a table: the figure that decides, goodput (of all offered requests), TTFT, hits, the drift between the
service of two waiting tenants, and the ratio of our policy to each other policy on the same arrivals. Each case has a
folder below `--out` with a `result.json` and a `report.html`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.lab.scenarios.scenario import Place, places
from benchmarks.lab.scenarios.tables import found_at, print_goals, print_place, print_verdicts, write_pages
from benchmarks.lab.scenarios.workloads import SCENARIOS
from llmproxy.lab.results.result import Point
from llmproxy.lab.run.runs import Finished, run_all

OUT = Path(__file__).resolve().parents[2] / "out"
PREFILL_SCALES = (1.0, 1.9)
QUICK_SEEDS = (1,)
FULL_SEEDS = (1, 2, 3, 4, 5)


class RunSet:
    """The finished runs, by place (a case at a load), policy and seed."""

    def __init__(self) -> None:
        self.finished: dict[tuple[str, Point], Finished] = {}

    def run(self, wanted: Iterable[tuple[Place, Point]]) -> None:
        """Runs all `wanted` points, and keeps the results in `finished`."""
        todo = [(place.label, place.simulation(point.seed), point) for place, point in wanted]
        columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TextColumn("runs"), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("simulating", total=len(todo))
            for index, one in run_all([(simulation, point) for _, simulation, point in todo]):
                label, _, point = todo[index]
                self.finished[label, point] = one
                bar.advance(task)

    def of(self, place: Place, policy: str, seeds: Sequence[int]) -> list[Finished]:
        """Returns the runs of a policy at a place, in the order of `seeds`."""
        found = [self.finished.get((place.label, place.point(policy, seed))) for seed in seeds]
        return [one for one in found if one is not None]


def main() -> None:
    """Runs a set of cases and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all cases with intervals instead of the quick set")
    parser.add_argument("--only", default="", help="workloads, such as W1,W5; all unless given")
    parser.add_argument("--out", type=Path, default=OUT / "lab", help="folder of result.json and the pages")
    args = parser.parse_args()
    began_s = time.monotonic()
    only = {name.strip().upper() for name in args.only.split(",") if name.strip()}
    if unknown := only - {scenario.key.upper() for scenario in SCENARIOS}:
        parser.error(f"no workload {', '.join(sorted(unknown))}; known: {', '.join(s.key for s in SCENARIOS)}")
    chosen = [scenario for scenario in SCENARIOS if not only or scenario.key.upper() in only]
    seeds = FULL_SEEDS if args.full else QUICK_SEEDS
    run_set = RunSet()
    found = places(chosen, not args.full, PREFILL_SCALES, seeds[0])
    run_set.run((q, q.point(policy, seed)) for seed in seeds for place in found for q, policy in _all_of(place))
    console = Console(width=None if Console().is_terminal else 132)
    for place in found:
        print_place(console, place, {policy: run_set.of(place, policy, seeds) for policy in place.case.policies})
        print_goals(console, found_at(place, run_set.of, seeds))
    print_verdicts(console, found, run_set.of, seeds)
    write_pages(args.out, found, run_set.of, seeds)
    # CPU time says more than wall time beside other work. The workers have ended, so that their seconds count.
    used = os.times()
    cpu_s = used.user + used.system + used.children_user + used.children_system
    took = f"{time.monotonic() - began_s:.0f} s, {cpu_s:.0f} s of CPU time"
    console.print(f"{len(run_set.finished)} runs in {took}; pages in {args.out}", soft_wrap=True)


def _all_of(place: Place) -> Iterator[tuple[Place, str]]:
    """Yields all runs of a place, and the additional runs for its comparisons."""
    yield from ((place, policy) for policy in place.case.policies)
    yield from ((place.beside(one), one.policy) for one in place.case.beside)


if __name__ == "__main__":
    main()
