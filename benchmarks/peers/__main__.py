"""llmproxy and its peers in interleaved rounds: `python -m benchmarks.peers --help`, or `make bench`.

Every round takes the cases in turn, and each case takes every proxy in turn, in reverse order in each second round, so
that a machine of varying speed slows neighbours alike. Ratios are taken inside a round. `benchmarks/README.md` explains
the tables.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.cases import CASES
from benchmarks.peers.competitors import Competitor, commanded, found_peers, llmproxy
from benchmarks.peers.measure import Bench
from benchmarks.peers.stage import Results, Stage
from benchmarks.peers.table import Round, doubts, render
from benchmarks.proxy import ROOT, BenchError, Cores, raise_open_files_limit

OUT = ROOT / "benchmarks" / "out" / "peers"
BASES = ("llmproxy", "nginx", "vllm-router")
AROUND_S = 0.6
"""The seconds of a window in addition to the load: its start, its end, and the end of its connections in the proxy."""
VENVS_VARIABLE = "BENCH_VENVS"


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="Measures proxies side by side.")
    add = parser.add_argument
    several: dict[str, Any] = {"type": lambda text: [word for word in text.split(",") if word], "action": "extend"}
    add("--case", metavar="NAME,...", **several, help=f"of {', '.join(case.name for case in CASES)} (all)")
    add("--only", metavar="NAME,...", **several, help="only these peers (all that are installed)")
    add("--rounds", type=int, default=5, help="interleaved rounds (5)")
    add("--seconds", type=float, default=1.5, help="length of each window (1.5)")
    add("--tries", type=int, default=2, help="windows that are tried while others disturb them (2)")
    add("--workers", metavar="N,...", **several, help="workers and cores, each as a proxy of its own (1)")
    add("--realtime", action="store_true", help="run before all else on the machine (SCHED_RR); needs root")
    add("--tree", action="append", default=[], metavar="NAME=PATH", help="an llmproxy from there, repeatable (this)")
    add("--command", action="append", default=[], metavar="NAME=COMMAND", help="another proxy, repeatable")
    add("--peers-venv", action="append", type=Path, metavar="DIR", help=f"where peers are (${VENVS_VARIABLE})")
    add("--against", metavar="NAME,...", **several, help=f"bases of ratios ({', '.join(BASES)})")
    add("--out", type=Path, default=OUT, metavar="DIR", help="folder of results.md and results.json")
    options = parser.parse_args(argv)
    known = {case.name: case for case in CASES}
    unknown = [name for name in options.case or () if name not in known]
    options.workers = [int(text) if text.isdecimal() else 0 for text in options.workers or ["1"]]
    if unknown or options.rounds < 1 or options.seconds <= 0 or options.tries < 1 or min(options.workers) < 1:
        parser.error(f"unknown case: {', '.join(unknown)}" if unknown else "numbers must be positive")
    options.cases = [known[name] for name in options.case] if options.case else list(CASES)
    return options


def competitors(options: argparse.Namespace) -> list[Competitor]:
    """Returns the proxies of a run. Raises BenchError if a chosen proxy is not installed."""
    named = [tree.partition("=") for tree in options.tree] or [("llmproxy", "=", str(ROOT))]
    trees = {name: Path(path).resolve() for name, _, path in named}
    mine = [*(llmproxy(name, tree) for name, tree in trees.items()), *(commanded(text) for text in options.command)]
    venvs = options.peers_venv or [Path(p) for p in os.environ.get(VENVS_VARIABLE, "").split(os.pathsep) if p]
    found, missing = found_peers(venvs)
    everybody = [*mine, *found]
    if options.only:
        names = {one.name for one in everybody}
        absent = [name for name in options.only if name not in names and not (name == "llmproxy" and options.tree)]
        if absent:
            raise BenchError(f"not here: {', '.join(absent)}; there are {', '.join(sorted(names))}")
        everybody = [one for one in everybody if one.name in options.only or one in mine]
    elif missing:
        print(f"not installed, so left out: {', '.join(missing)}", file=sys.stderr)
    return [one.with_workers(workers) for one in everybody for workers in options.workers]


def facts(cores: Cores, options: argparse.Namespace, chosen: Sequence[Competitor]) -> list[str]:
    """Returns the facts on which the figures depend, one line each."""
    model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return [
        f"{model.group(1) if model else platform.machine()}, {os.cpu_count()} cores, {platform.system()} "
        f"{platform.release()}, {platform.python_implementation()} {platform.python_version()}, "
        f"load average before the run {os.getloadavg()[0]:.2f}",
        cores.describe()
        + ("; NAME@2 has 2 workers and a core of the harness" if max(options.workers) > 1 else "")
        + ("; real-time priority (SCHED_RR) for all of them" if options.realtime else ""),
        f"{options.rounds} interleaved rounds, windows of {options.seconds:g} s, {time.strftime('%Y-%m-%d %H:%M')}; "
        "median [smallest..largest]; ratios, and times added to direct access, are taken inside each round",
        *(f"{one.name}: {one.about}" for one in chosen),
    ]


def run_first() -> None:
    """Gives this process and its children real-time priority. Raises BenchError without the right."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError as error:
        raise BenchError("--realtime needs root, or CAP_SYS_NICE") from error


def run(options: argparse.Namespace, header: list[str], results: Results, failures: list[str]) -> None:
    """Measures all rounds, and adds to `header`, `results` and `failures` meanwhile.

    Raises BenchError if it cannot continue.
    """
    raise_open_files_limit()
    chosen = competitors(options)
    cores = Cores.split()
    header += facts(cores, options, chosen)
    os.sched_setaffinity(0, cores.harness)
    if options.realtime:
        run_first()
    each_s = sum(case.ramp_s + case.warmup_s + options.seconds + AROUND_S for case in options.cases)
    minutes = options.rounds * each_s * (len(chosen) + 1) / 60
    print(f"{len(chosen)} proxies: {minutes:.0f} minutes if nothing is repeated", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="llmproxy-bench-") as folder, ExitStack() as stack:
        bench = Bench(Path(folder), cores, options.realtime)
        stack.callback(bench.stop)
        stage = Stage(bench, chosen, options.seconds, options.tries, failures)
        stack.enter_context(stage.open())
        stage.rounds(options.cases, options.rounds, results)


def main() -> None:
    options = parse_options()
    # A terminated run must end its children and print its results, like an interrupted run.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    header: list[str] = []
    results: Results = {case.name: [] for case in options.cases}
    failures: list[str] = []
    try:
        run(options, header, results, failures)
    except BenchError as error:
        failures.append(f"stopped: {error}")
    except KeyboardInterrupt:
        failures.append("interrupted")
    if not any(results.values()):
        sys.exit("\n" + "\n".join(failures))
    failed = write(options, header, results, failures)
    sys.exit(1 if failed or failures else 0)


def write(
    options: argparse.Namespace, header: Sequence[str], results: Mapping[str, Sequence[Round]], failures: Sequence[str]
) -> bool:
    """Writes the tables and all windows to files, and prints the tables. Returns whether a request failed."""
    cases = [case for case in options.cases if results[case.name]]
    found = [*failures, *(line for case in cases for line in doubts(case, results[case.name]))]
    text = "\n".join(f"- {line}" for line in header) + "\n\n"
    text += "\n\n".join(render(case, results[case.name], options.against or BASES) for case in cases) + "\n\n"
    text += "\n".join(f"- {line}" for line in found) or "No failed requests, and no other process on the proxy's core."
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.md").write_text(text + "\n")
    raw = {
        name: [{who: asdict(seen) for who, seen in one.items()} for one in rounds] for name, rounds in results.items()
    }
    (options.out / "results.json").write_text(json.dumps({"facts": header, "doubts": found, "cases": raw}))
    print(text)
    return any(seen.failures for rounds in results.values() for one in rounds for seen in one.values())


if __name__ == "__main__":
    main()
