"""The processes of a measurement: how they are started, pinned to cores, measured (CPU time, memory) and ended.

Linux only: CPU time and memory come from the kernel, and not from the measured process.
"""

from __future__ import annotations

import http.client
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OPEN_FILES_NEEDED = 10_000
IN_FLIGHT_MAX = 8192
READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class BenchError(Exception):
    """A measurement cannot continue. The text has the reason and a remedy."""


# --- CPU time and memory ----------------------------------------------------------------------------------------------


@contextmanager
def _alive(pid: int) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, ProcessLookupError) as gone:
        raise BenchError(f"process {pid} ended while it was being measured; see why it did") from gone


def family(pid: int) -> list[int]:
    """Returns `pid` and all its descendants."""
    with _alive(pid):
        tasks = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return [pid, *(below for task in tasks for child in task.split() for below in family(int(child)))]


def cpu_s(pids: Iterable[int]) -> float:
    """Returns the CPU seconds of these processes: user and system time of all threads, ended threads included."""
    total = 0.0
    for pid in pids:
        # The kernel's number for the scheduler's CPU clock of a process: what clock_getcpuclockid(3) gives.
        try:
            total += time.clock_gettime(((~pid) << 3) | 2)
        except OSError as gone:
            raise BenchError(f"process {pid} ended while it was being measured; see why it did") from gone
    return total


def rss_bytes(pids: Iterable[int]) -> int:
    """Returns the sum of the resident memory of these processes. A shared page counts for each process."""
    pages = 0
    for pid in pids:
        with _alive(pid):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def rss_peak_bytes(pids: Iterable[int]) -> int:
    """Returns the sum of the largest resident memory of each of these processes."""
    kilobytes = 0
    for pid in pids:
        with _alive(pid):
            status = Path(f"/proc/{pid}/status").read_text()
        # A zombie has no memory.
        if peak := status.partition("VmHWM:")[2]:
            kilobytes += int(peak.split()[0])
    return kilobytes * 1024


def core_times_s(stat: str) -> dict[int, tuple[float, float]]:
    """Returns core -> (busy seconds without stolen time, stolen seconds) since boot, from the text of /proc/stat."""
    times = {}
    for line in stat.splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit():
            user, nice, system, _idle, _iowait, irq, softirq, steal = (int(ticks) * _TICK_S for ticks in fields[:8])
            times[int(name[3:])] = (user + nice + system + irq + softirq, steal)
    return times


# --- cores ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cores:
    """The core of the proxy, and the cores of the load generator and the mock replicas.

    With a single core, `proxy` is None and nothing is pinned.
    """

    proxy: int | None
    harness: frozenset[int]

    @classmethod
    def split(cls) -> Cores:
        """Gives the last core of this process to the proxy, and all others to the harness."""
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            return cls(None, frozenset(cores))
        return cls(cores[-1], frozenset(cores[:-1]))

    def describe(self) -> str:
        if self.proxy is None:
            return "one core for all, so the load generator and the proxy disturb each other"
        return f"proxy alone on core {self.proxy}, load generator and mock backends on {sorted(self.harness)}"


def raise_open_files_limit() -> None:
    """Raises the limit of open files for 4,000 streams on both sides of the proxy."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < OPEN_FILES_NEEDED:
        raise BenchError(
            f"at most {hard} open files are allowed here and {OPEN_FILES_NEEDED} are needed: raise `ulimit -Hn`"
        )
    if soft < OPEN_FILES_NEEDED:
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES_NEEDED, hard))


# --- starting and ending ----------------------------------------------------------------------------------------------


class Child:
    """A child process. Signals go only to this process, by its id.

    `cores` are the cores on which it runs. With `piped`, its standard output is read by `line`; otherwise it goes to
    the file `log`, like standard error.
    """

    def __init__(
        self,
        argv: Sequence[str],
        cores: Iterable[int],
        log: Path,
        *,
        piped: bool = False,
        cwd: Path = ROOT,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.argv = list(argv)
        self.log = log
        mine = os.sched_getaffinity(0)
        # A child inherits the cores of its parent, so that it never runs on another core.
        os.sched_setaffinity(0, cores)
        try:
            with log.open("wb") as sink:
                self._process = subprocess.Popen(
                    self.argv,
                    cwd=cwd,
                    env=None if env is None else {**os.environ, **env},
                    stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if piped else sink,
                    stderr=sink,
                )
        except OSError as error:
            raise BenchError(f"cannot start {shlex.join(self.argv)}: {error}") from error
        finally:
            os.sched_setaffinity(0, mine)
        self.pid = self._process.pid

    def line(self) -> str:
        """Returns a line of the standard output of a child that was started with `piped`.

        Raises BenchError if the child has ended.
        """
        assert self._process.stdout is not None
        text = self._process.stdout.readline().decode().strip()
        if not text:
            raise self.failure("ended before it was ready")
        return text

    def ended(self) -> bool:
        return self._process.poll() is not None

    def failure(self, what: str) -> BenchError:
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
        return BenchError(f"{shlex.join(self.argv)} {what}; the end of its log:\n{tail}")

    def stop(self) -> None:
        """Sends SIGTERM, and SIGKILL if the child has not ended after STOP_TIMEOUT_S."""
        if not self.ended():
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def llmproxy_argv(port: int, backends: Sequence[str], config: Path) -> list[str]:
    """Returns a command for llmproxy with its defaults, except for a `max_in_flight` so high that no request waits.

    Writes the configuration to `config`.
    """
    settings = {"backends": [{"url": url, "max_in_flight": IN_FLIGHT_MAX} for url in backends]}
    config.write_text(json.dumps(settings))
    serve = [sys.executable, "-m", "llmproxy", "serve", "--config", str(config)]
    return [*serve, "--host", "127.0.0.1", "--port", str(port)]


def template_argv(template: str, port: int, backends: Sequence[str]) -> list[str]:
    """Returns the words of a command, with `{port}`, `{backends}` (URLs with commas), `{backend0}`, ... filled in.

    Raises BenchError for an unknown name.
    """
    names = {"port": str(port), "backends": ",".join(backends)}
    names |= {f"backend{number}": url for number, url in enumerate(backends)}
    try:
        return [word.format(**names) for word in shlex.split(template)]
    except (KeyError, IndexError, ValueError) as error:
        raise BenchError(f"cannot fill in {template!r}: {error}; the known names are {', '.join(names)}") from error


def _post(url: str, path: str, body: bytes) -> int:
    """Returns the status of the answer to a POST. Raises OSError or HTTPException if there is no answer."""
    address = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=5)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def wait_ready(url: str, path: str, body: bytes, child: Child | None) -> None:
    """Waits until a POST is answered with 200, because a proxy that listens may not be ready yet.

    Raises BenchError after READY_TIMEOUT_S, or if `child` ends.
    """
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    seen: object = "nothing"
    while time.monotonic() < deadline_s:
        if child is not None and child.ended():
            raise child.failure("ended before it was ready")
        try:
            seen = _post(url, path, body)
        except (OSError, http.client.HTTPException) as error:
            seen = repr(error)
        if seen == 200:
            return
        time.sleep(0.05)
    what = f"did not answer a chat request at {url} with 200 within {READY_TIMEOUT_S:.0f} s (last seen: {seen})"
    raise child.failure(what) if child is not None else BenchError(f"the target {what}; is it running?")
