"""What slow start is worth: a replica returns cold under load, with and without it (`health.slow_start_s`).

    python -m benchmarks.slow_start --seeds 5

In virtual time: one of eight replicas dies, and is back five seconds later with an empty cache, while conversations go
on at a share of what the fleet can balance. The table is of the requests that arrived within 30 s of its return: of
those that it served itself, and of all. Goodput is the share of them that kept both objectives.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.learning import p99
from benchmarks.scenarios.scenario import GOODPUT, Case, Place, Scenario, both, placed, sized, with_fault
from llmproxy.config import Config
from llmproxy.lab.fleet.spec import FleetFaultKind
from llmproxy.lab.policies.by_name import plan_named
from llmproxy.lab.results.record import Record
from llmproxy.lab.run.replay import Setup, records_of
from llmproxy.lab.run.runs import Simulation, prepared

AWAY_S = 5.0
FIRST_S = 30.0
DIES_AT = 0.4
FLEET = "8xllama-8b-h100"
RETURNS = with_fault(DIES_AT, FleetFaultKind.RESTART, 1, AWAY_S)
CASES = (
    # Prompts of up to 126,000 tokens that build on each other: an empty cache costs most.
    Case("Mooncake conversations", "mooncake_conversation.jsonl.gz", FLEET, (), requests=1_000, shape=RETURNS),
    Case(
        "Azure conversations, batches of 16", "azure2023_conv.csv.gz", FLEET, (), requests=2_000,
        shape=both(sized(max_num_seqs=16), RETURNS),
    ),
)  # fmt: skip
SCENARIO = Scenario("slow start", "Slow start", "", GOODPUT, CASES)
POLICIES = ("cost", "late_least_request")


@dataclass(frozen=True, slots=True)
class After:
    """Requests of some seconds after a return: how many, the share of good ones, and the TTFT of those that had one."""

    count: int
    good: int
    ttft_s: tuple[float, ...]

    @classmethod
    def of(cls, records: Sequence[Record]) -> After:
        answered = tuple(record.ttft_s for record in records if record.ttft_s is not None)
        return cls(len(records), sum(record.met for record in records), answered)

    def cells(self) -> list[str]:
        if not self.ttft_s:
            return [str(self.count), "", ""]
        return [str(self.count), f"{self.good / self.count:.3f}", f"{p99(self.ttft_s):.2f}"]


def with_slow_start(config: Config, seconds: float) -> Config:
    return config.model_copy(update={"health": config.health.model_copy(update={"slow_start_s": seconds})})


def after_return(place: Place, policy: str, slow_start_s: float, seed: int) -> list[Record]:
    """The requests that arrived within `FIRST_S` of the return."""
    simulation: Simulation = place.simulation(seed)
    config = with_slow_start(simulation.config, slow_start_s)
    trace, found = prepared(simulation, seed, place.rate_scale)
    plan = plan_named(policy, config)
    setup = Setup(trace, simulation.fleet, plan, config, seed, place.prefill_scale, found.duration_s, ())
    (fault,) = simulation.fleet.faults
    back_s = fault.at_s + AWAY_S
    return [record for record in records_of(setup) if back_s <= record.arrived_s < back_s + FIRST_S]


def main() -> None:
    """Run all and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--load", type=float, action="append", help="share of what the fleet can balance; repeatable")
    parser.add_argument("--slow-start-s", type=float, action="append", help="seconds to compare; repeatable")
    args = parser.parse_args()
    columns = ("load", "placement", "slow start s", "served by it", "goodput", "TTFT p99 s")
    console = Console(width=160)
    for case in CASES:
        table = Table(title=f"{case.name}, {FLEET}: {args.seeds} seeds, {FIRST_S:g} s after the return")
        for column in (*columns, "of all", "goodput", "TTFT p99 s"):
            table.add_column(column, justify="right")
        for load in args.load or (0.7, 0.85):
            place = placed(SCENARIO, case, load, 1.0, 1)
            back = place.fleet.replicas[0].name
            for policy in POLICIES:
                for slow_start_s in args.slow_start_s or (0.0, 5.0):
                    records = [
                        record
                        for seed in range(1, args.seeds + 1)
                        for record in after_return(place, policy, slow_start_s, seed)
                    ]
                    its = After.of([record for record in records if record.backend == back])
                    row = [f"{load:g}", policy, f"{slow_start_s:g}", *its.cells(), *After.of(records).cells()]
                    table.add_row(*row)
        console.print(table)


if __name__ == "__main__":
    main()
