"""What llmproxy adds to a request: one table of time, CPU and memory, measured beside direct access in the same run.

Run `make bench`, or `python -m benchmarks.run --help`. The cases are measured in rounds, and within a round directly,
then through each proxy, case by case: a machine whose speed drifts then slows all columns alike. Each proxy is started
anew in every round. `README.md` in this folder says how to read the table.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import orjson

from benchmarks.client import CHAT_PATH, chat_body
from benchmarks.loadgen import RAMP_PER_S, Result
from benchmarks.proxy import (
    ROOT,
    BenchError,
    Child,
    Cores,
    llmproxy_argv,
    raise_open_files_limit,
    template_argv,
    wait_ready,
)
from benchmarks.table import CASES, DIRECT, Case, Rounds, render, warnings

LLMPROXY = "llmproxy"


@dataclass(frozen=True, slots=True)
class Subject:
    """One column: `template` is a command to start in every round, `url` is somebody who runs already.

    While it is measured, `url` and `pid` are set for everybody, and `child` for those that were started here.
    """

    name: str
    template: str | None = None
    url: str | None = None
    pid: int = 0
    child: Child | None = None


@dataclass(frozen=True, slots=True)
class Bench:
    """What all measurements of a run share."""

    cores: Cores
    folder: Path
    backends: tuple[str, ...]
    mock_pid: int
    seconds: float

    def measure(self, case: Case, subject: Subject) -> Result:
        """Runs one case against one running subject, in a load generator process of its own."""
        core = None if subject.child is None else self.cores.proxy
        plan = replace(
            case.plan,
            target=subject.url or self.backends[0],
            seconds=min(self.seconds, case.plan.seconds) if case.plan.shape == "idle" else self.seconds,
            proxy_pid=subject.pid,
            mock_pid=self.mock_pid,
            core=-1 if core is None else core,
        )
        limit_s = 60 + plan.clients / RAMP_PER_S + plan.warmup_s + plan.seconds
        command = [sys.executable, "-m", "benchmarks.loadgen", *plan.argv()]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=limit_s, check=False)
        except subprocess.TimeoutExpired as error:
            raise BenchError(f"{case.name} through {subject.name} did not end within {limit_s:.0f} s") from error
        if subject.child is not None and subject.child.ended():
            raise subject.child.failure(f"ended during {case.name}")
        if done.returncode:
            raise BenchError(f"{case.name} through {subject.name}: {done.stderr.decode(errors='replace').strip()}")
        return Result.parse(done.stdout)

    @contextmanager
    def running(self, subject: Subject) -> Iterator[Subject]:
        """The subject with its address and process while it serves; what was started here is ended here."""
        if subject.url is not None:
            wait_ready(subject.url, CHAT_PATH, chat_body(), None)
            yield subject
            return
        port = _free_port()
        if subject.template is None:
            argv = llmproxy_argv(port, self.backends, self.folder / "llmproxy.yaml")
        else:
            argv = template_argv(subject.template, port, self.backends)
        cores = self.cores.harness if self.cores.proxy is None else {self.cores.proxy}
        child = Child(argv, cores, self.folder / f"{subject.name}.log")
        try:
            url = f"http://127.0.0.1:{port}"
            wait_ready(url, CHAT_PATH, chat_body(), child)
            yield replace(subject, url=url, pid=child.pid, child=child)
        finally:
            child.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_round(bench: Bench, cases: Sequence[Case], subjects: Sequence[Subject]) -> dict[str, dict[str, Result]]:
    """One pass over all cases; returns results by case and subject."""
    results: dict[str, dict[str, Result]] = {}
    with ExitStack() as stack:
        columns = [Subject(DIRECT), *(stack.enter_context(bench.running(subject)) for subject in subjects)]
        for case in cases:
            chosen = [subject for subject in columns if case.direct or subject.name != DIRECT]
            results[case.name] = {subject.name: bench.measure(case, subject) for subject in chosen}
            print(f"  {case.name}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results


def facts(cores: Cores, options: argparse.Namespace) -> list[str]:
    """What the figures depend on, one line each."""
    model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    packages = ", ".join(f"{name} {version(name)}" for name in ("llmproxy", "aiohttp", "uvloop", "orjson"))
    return [
        f"{platform.python_implementation()} {platform.python_version()} ({platform.python_compiler()}), {packages}",
        f"{model.group(1) if model else platform.machine()}, {os.cpu_count()} cores, {platform.system()} "
        f"{platform.release()}, load average before the run {os.getloadavg()[0]:.2f}",
        cores.describe(),
        f"{options.rounds} interleaved rounds, windows of {options.seconds:g} s; median [smallest..largest]",
    ]


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Measures what a proxy costs.")
    add = parser.add_argument
    names = [case.name for case in CASES]
    add("--rounds", type=int, default=3, help="interleaved rounds (3)")
    add("--seconds", type=float, default=3.0, help="length of each window (3)")
    add("--case", action="append", choices=names, help="only this case, repeatable")
    add(
        "--command",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="another proxy, repeatable; {port}, {backends}, {backend0} and {backend1} are filled in",
    )
    add("--target", metavar="URL", help="a proxy that runs already, in front of --mock-port; not pinned, not ended")
    add("--target-pid", type=int, default=0, help="the process of --target, to read its CPU time and memory")
    add("--without-llmproxy", action="store_true", help="measure only --command and --target")
    add("--mock-port", type=int, action="append", help="port of a mock backend, repeatable (two free ports)")
    add("--json", type=Path, metavar="FILE", help="write every single result there, too")
    options = parser.parse_args(argv)
    if options.rounds < 1 or options.seconds <= 0:
        parser.error("--rounds and --seconds must be positive")
    if options.target and not options.mock_port:
        parser.error("--target needs --mock-port: the proxy that runs already must know where the mocks will be")
    options.subjects = [] if options.without_llmproxy else [Subject(LLMPROXY)]
    for command in options.command:
        named = re.fullmatch(r"([\w.-]+)=(.+)", command)
        if named is None:
            parser.error(f"--command wants NAME=COMMAND, not {command!r}")
        options.subjects.append(Subject(named.group(1), template=named.group(2)))
    if options.target:
        options.subjects.append(Subject("target", url=options.target, pid=options.target_pid))
    taken = [DIRECT, *(subject.name for subject in options.subjects)]
    if len(taken) < 2 or len(set(taken)) < len(taken):
        parser.error(f"there must be something to measure, under names that differ: {', '.join(taken)}")
    return options


def bench(options: argparse.Namespace, cores: Cores) -> Rounds:
    cases = [case for case in CASES if not options.case or case.name in options.case]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llmproxy-bench-")))
        ports = options.mock_port or [0, 0]
        argv = [sys.executable, "-m", "benchmarks.mock_backend", *(f"--port={port}" for port in ports)]
        mock = Child(argv, cores.harness, folder / "mock.log", piped=True)
        stack.callback(mock.stop)
        urls = tuple(mock.line() for _ in ports)
        context = Bench(cores, folder, urls, mock.pid, options.seconds)
        rounds: Rounds = []
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds}:", end="", file=sys.stderr, flush=True)
            rounds.append(run_round(context, cases, options.subjects))
    return rounds


def main() -> None:
    options = parse_options()
    # A terminated run must end its children as an interrupted one does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        raise_open_files_limit()
        cores = Cores.split()
        header = facts(cores, options)
        os.sched_setaffinity(0, cores.harness)
        rounds = bench(options, cores)
    except BenchError as error:
        sys.exit(f"\nbenchmark stopped: {error}")
    except KeyboardInterrupt:
        sys.exit("\nbenchmark interrupted")
    names = [subject.name for subject in options.subjects]
    doubts = warnings(rounds, len(cores.harness))
    print("\n".join(f"- {line}" for line in header), "", render(rounds, names), "", sep="\n")
    print("\n".join(f"- {line}" for line in doubts) or "No failed requests, nobody else on the proxy's core.")
    if options.json:
        results = [{case: {name: asdict(r) for name, r in by.items()} for case, by in one.items()} for one in rounds]
        options.json.write_bytes(orjson.dumps({"facts": header, "doubts": doubts, "rounds": results}))
    failed = any(result.failures for one in rounds for by in one.values() for result in by.values())
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
