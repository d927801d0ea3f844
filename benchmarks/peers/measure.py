"""Measures a proxy under load.

The module starts the load generator, reads CPU clocks at the beginning and the end of the window, and returns the
results.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.fleet import free_port
from benchmarks.peers.cases import Case
from benchmarks.peers.competitors import Competitor, Site
from benchmarks.proxy import (
    ROOT,
    BenchError,
    Child,
    Cores,
    core_times_s,
    cpu_s,
    family,
    rss_bytes,
    rss_peak_bytes,
    wait_ready,
)

SOURCES = Path(__file__).parent
BUILT = ROOT / "benchmarks" / "out" / "bin"
CHAT_PATH = "/v1/chat/completions"
READY_BODY = b'{"model":"mock","messages":[{"role":"user","content":"Are you there?"}],"max_tokens":1}'
DISTURBED_SHARE = 0.15
"""A window is disturbed if other processes or the hypervisor used more than this share of the proxy's cores."""
SETTLE_LIMIT_S = 3.0
SETTLED_SHARE = 0.3


def built(name: str) -> Path:
    """Returns the program of `name`.c, compiled if the source is newer. Raises BenchError without a C compiler."""
    source, program = SOURCES / f"{name}.c", BUILT / name
    if program.exists() and program.stat().st_mtime >= source.stat().st_mtime:
        return program
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise BenchError(f"a C compiler is needed for {source.name}, and none of cc, gcc, clang is on PATH")
    BUILT.mkdir(parents=True, exist_ok=True)
    done = subprocess.run([compiler, "-O2", "-o", program, source, "-lm"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"{compiler} could not compile {source.name}:\n{done.stderr}")
    return program


# --- results of a window ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spread:
    """The percentiles of `count` samples, in microseconds."""

    count: int
    p50_us: float
    p99_us: float
    max_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The results of a window. A figure that the window does not have is None."""

    window_s: float
    requests: int
    chunks: int
    bytes: int
    skipped: int
    """The requests of an open loop that were not sent, because no client was free."""
    streams: int
    failures: dict[str, int]
    """Reason -> the number of failed requests during the whole load."""
    latency: Spread | None
    ttft: Spread | None
    transit: Spread | None
    gap: Spread | None
    harness_cpu_s: float
    """CPU time of the load generator and the mock replicas."""
    stolen_s: float
    """CPU time that the hypervisor took from the cores of the run."""
    disturbed_share: float
    """The part of the window in which other processes or the hypervisor had the proxy's cores."""
    cpu_s: float | None = None
    """The CPU time of all processes of the proxy."""
    foreign_s: float | None = None
    """CPU time of other processes on the proxy's cores."""
    harness_foreign_s: float | None = None
    """CPU time of other processes on the harness's cores, None if the proxy shares them, or with real-time priority."""
    rss_before_bytes: int | None = None
    """The resident memory of the proxy before the load."""
    rss_bytes: int | None = None
    """The resident memory of the proxy at the end of the window."""
    rss_peak_bytes: int | None = None

    @classmethod
    def parse(cls, line: str, books: Books, cores: int, realtime: bool) -> Window:
        """Returns the results from the load generator's output line and the CPU times of the window.

        With `realtime`, other processes get only the idle time of the proxy's `cores`, which disturbs nothing.
        """
        measured = json.loads(line)
        for name in ("latency", "ttft", "transit", "gap"):
            measured[name] = None if measured[name] is None else Spread(**measured[name])
        foreign_s = None if books.proxy_s is None else max(0.0, books.busy_s - books.proxy_s - books.harness_here_s)
        lost_s = books.stolen_s + (0.0 if realtime or foreign_s is None else foreign_s / cores)
        blind = realtime or books.harness_here_s > 0
        return cls(
            **measured,
            harness_cpu_s=books.harness_s,
            stolen_s=books.stolen_s,
            disturbed_share=lost_s / measured["window_s"],
            cpu_s=books.proxy_s,
            foreign_s=foreign_s,
            harness_foreign_s=None if blind else max(0.0, books.harness_busy_s - books.harness_s),
        )


@dataclass(frozen=True, slots=True)
class Books:
    """The CPU clocks at one moment, in seconds. The difference between two moments has the CPU times of a window."""

    proxy_s: float | None
    harness_s: float
    harness_here_s: float
    """The CPU time of the harness if it shares a core with the proxy, otherwise 0."""
    busy_s: float
    """The busy time of the proxy's cores, without stolen time."""
    harness_busy_s: float
    """The busy time of the harness's cores, without stolen time."""
    stolen_s: float

    def since(self, before: Books) -> Books:
        proxy_s = None if self.proxy_s is None or before.proxy_s is None else self.proxy_s - before.proxy_s
        return Books(
            proxy_s,
            self.harness_s - before.harness_s,
            self.harness_here_s - before.harness_here_s,
            self.busy_s - before.busy_s,
            self.harness_busy_s - before.harness_busy_s,
            self.stolen_s - before.stolen_s,
        )


# --- what runs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Running:
    """A running proxy. If `child` is None, the mock replicas themselves."""

    name: str
    port: int
    child: Child | None = None
    cores: frozenset[int] = frozenset()

    def pids(self) -> list[int]:
        return [] if self.child is None else family(self.child.pid)


class Bench:
    """The mock replicas and the load generator of a run."""

    def __init__(self, folder: Path, cores: Cores, realtime: bool = False, replicas: int = 4) -> None:
        self.cores = cores
        self._realtime = realtime
        self._folder = folder
        self._loadgen = built("loadgen")
        self._mock = Child([str(built("mockd")), str(replicas)], cores.harness, folder / "mock.log", piped=True)
        ports = [int(port) for port in self._mock.line().split()]
        self.backends = tuple(f"http://127.0.0.1:{port}" for port in ports)
        self.direct = Running("direct", ports[0])
        self._requests: dict[str, list[Path]] = {}
        self._started = 0

    def stop(self) -> None:
        self._mock.stop()

    def _cores_of(self, competitor: Competitor) -> frozenset[int]:
        """Returns the core of the proxy, and a core of the harness for each further worker."""
        if self.cores.proxy is None:
            return self.cores.harness
        return frozenset([self.cores.proxy, *sorted(self.cores.harness, reverse=True)[: competitor.workers - 1]])

    def start(self, competitor: Competitor) -> Running:
        """Starts a proxy, and waits until it answers a chat request. Raises BenchError if it does not answer."""
        self._started += 1
        folder = self._folder / f"{competitor.name}-{self._started}"
        folder.mkdir()
        site = Site(folder, free_port(), free_port(), self.backends, competitor.workers)
        launch = competitor.launch(site)
        cores = self._cores_of(competitor)
        log = folder / "output.log"
        child = Child(launch.argv, cores, log, cwd=launch.cwd, env=launch.env)
        try:
            wait_ready(f"http://127.0.0.1:{site.port}", CHAT_PATH, READY_BODY, child)
        except BenchError:
            child.stop()
            raise
        return Running(competitor.name, site.port, child, cores)

    def measure(self, case: Case, running: Running, seconds: float) -> Window:
        """Runs a case against a proxy for `seconds`.

        Raises BenchError if the proxy or the load generator ends early.
        """
        if case.name not in self._requests:
            self._requests[case.name] = case.requests(self._folder)
        files = self._requests[case.name]
        command = [str(self._loadgen), *case.load_argv(running.port, seconds), *(str(file) for file in files)]
        pids = running.pids()
        rss_before = rss_bytes(pids) if pids else None
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as load:
            try:
                before = self._books_at("begin", load, running)
                after = self._books_at("end", load, running)
                memory = (rss_bytes(now), rss_peak_bytes(now)) if (now := running.pids()) else (None, None)
                line = _line(load)
            except BaseException:
                load.kill()
                raise
        if running.child is not None and running.child.ended():
            raise running.child.failure(f"ended during {case.name}")
        self._settle(running)
        window = Window.parse(line, after.since(before), max(1, len(running.cores)), self._realtime)
        return replace(window, rss_before_bytes=rss_before, rss_bytes=memory[0], rss_peak_bytes=memory[1])

    def _books_at(self, moment: str, load: subprocess.Popen[str], running: Running) -> Books:
        said = _line(load)
        if said != moment:
            raise BenchError(f"the load generator said {said!r}, not {moment!r}")
        pids = running.pids()
        harness_s = cpu_s([self._mock.pid, load.pid])
        times = core_times_s(Path("/proc/stat").read_text())
        return Books(
            cpu_s(pids) if pids else None,
            harness_s,
            harness_s if running.cores & self.cores.harness else 0.0,
            sum(times[core][0] for core in running.cores),
            sum(times[core][0] for core in self.cores.harness),
            sum(times[core][1] for core in running.cores | self.cores.harness),
        )

    def _settle(self, running: Running) -> None:
        """Waits until a proxy has handled the end of its connections, so that the next proxy has the core."""
        pids, limit_s = running.pids(), time.monotonic() + SETTLE_LIMIT_S
        share = 1.0
        while pids and share > SETTLED_SHARE and time.monotonic() < limit_s:
            used_s = cpu_s(pids)
            time.sleep(0.05)
            share = (cpu_s(pids) - used_s) / 0.05


def _line(load: subprocess.Popen[str]) -> str:
    """Returns the next line of the load generator, which reports errors on standard error."""
    assert load.stdout is not None
    line = load.stdout.readline().strip()
    if not line:
        raise BenchError("the load generator ended early; see above")
    return line


def measured(measure: Callable[[], Window], tries: int) -> Window:
    """Returns the first undisturbed window of up to `tries`, or the least disturbed window."""
    windows: list[Window] = []
    while len(windows) < tries and not (windows and windows[-1].disturbed_share <= DISTURBED_SHARE):
        windows.append(measure())
    return min(windows, key=lambda window: window.disturbed_share)
