"""How fast the laboratory is: simulated requests per second of one core, and memory against the length of a trace.

    python -m benchmarks.lab_speed
    python -m benchmarks.lab_speed --trace mooncake_conversation.jsonl.gz    # all of a longer file

Each line is a process of its own, so that its peak memory is its own. The first table replays one trace, as fast as it
was recorded, on 8, 64 and 512 replicas under our default policy: what grows with the fleet is mostly reading every
replica's metrics five times a second of virtual time. The second replays generated traffic of one rate for longer and
longer: memory must follow the requests that live at once, which stay as many.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from llmproxy.config import Config
from llmproxy.lab.fleet.fleet_file import fleet_named
from llmproxy.lab.results.result import Point
from llmproxy.lab.run.runs import Simulation, run_one

TRACE = Path(__file__).resolve().parent / "traces" / "mooncake_conversation.jsonl.gz"
FLEETS = (8, 64, 512)
LENGTHS_S = (60, 240, 960)
CHILD_S = 580.0


def measure(trace: str, fleet: str, policy: str) -> dict[str, float]:
    """One run in this process: requests, wall and CPU seconds, virtual seconds, peak memory in MB before and after."""
    before_mb = _peak_mb()
    simulation = Simulation(trace, fleet_named(fleet), Config())
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    run = run_one(simulation, Point(policy, 1)).run
    return {
        "requests": run.offered,
        "wall_s": time.perf_counter() - began_s,
        "cpu_s": time.process_time() - began_cpu_s,
        "virtual_s": run.duration_s,
        "before_mb": before_mb,
        "peak_mb": _peak_mb(),
    }


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _in_child(trace: str, fleet: str, policy: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.lab_speed", "--child", trace, fleet, policy]
    done = subprocess.run(command, capture_output=True, check=True, timeout=CHILD_S)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def _table(title: str, what: str, rows: Sequence[tuple[str, dict[str, float]]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column(what)
    for name in ("requests", "virtual s", "wall s", "CPU s", "requests/s", "x real time", "peak MB"):
        table.add_column(name, justify="right")
    for name, figures in rows:
        table.add_row(
            name,
            f"{figures['requests']:,.0f}",
            f"{figures['virtual_s']:,.0f}",
            f"{figures['wall_s']:.1f}",
            f"{figures['cpu_s']:.1f}",
            f"{figures['requests'] / figures['cpu_s']:,.0f}",
            f"{figures['virtual_s'] / figures['cpu_s']:,.0f}",
            f"{figures['peak_mb']:.0f} (from {figures['before_mb']:.0f})",
        )
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default=str(TRACE), help="what to replay on 8, 64 and 512 replicas")
    parser.add_argument("--policy", default="blend")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(*args.child)))
        return
    console = Console(width=None if Console().is_terminal else 110)
    rows = [(f"{n} x 8B", _in_child(args.trace, f"{n}xllama-8b-h100", args.policy)) for n in FLEETS]
    console.print(_table(f"{Path(args.trace).name}, {args.policy}, one core", "fleet", rows))
    generated = [(f"{s} s", f"gen:step_bursts,rate=40,factor=1,duration_s={s}") for s in LENGTHS_S]
    rows = [(name, _in_child(trace, "8xllama-8b-h100", args.policy)) for name, trace in generated]
    console.print(_table("40 requests/s for longer and longer, 8 x 8B", "length", rows))


if __name__ == "__main__":
    main()
