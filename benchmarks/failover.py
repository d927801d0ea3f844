"""Replicas die, hang, become slow and come back under load: lost requests, broken streams, seconds to detection.

    python -m benchmarks.failover [--only killed]

Streams arrive at random at a proxy with four simulated replicas. In each scene a replica breaks after some seconds, and
recovers later. The exit status is 1 if a goal is missed:

- No request fails before its first byte.
- A stream that breaks after its first byte ends with exactly one error event.
- The log names a killed replica within 1 s, and a slow replica within 5 s.
- The log names a hung replica within 2 s after its next byte is due, or within five times the p99 of the time to the
  first byte if that is longer.
- Requests take at most 1.05 attempts in the mean.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from math import inf

from benchmarks.faults import Fault, broken, killed, stopped
from benchmarks.fleet import WITH_ADMIN, Fleet, fleet
from benchmarks.load import Clients, Seen, Work, percentile
from benchmarks.table import Table
from llmproxy.lab.simulator.server.metrics import unix_now_s

REPLICAS = 4
FLAGS = ("--model", "sim", "--profile", "llama-8b-h100", "--max-num-seqs", "16", "--speed", "0.4")
WORK = Work(tokens=(96,), words=5)
ATTEMPTS_MAX = 1.05
EVENTS = ("backend_ejected", "backend_back", "backend_down", "backend_up")
RESET_SHARE, RESETS_S = 0.05, 10.0
RESET_AFTER_BYTES = 4_000  # About a third of an answer.
AFTER_S = 6.0  # The seconds of load after the recovery.


@dataclass(slots=True)
class Run:
    """A scene: the fleet, its load, and the times at which replica 0 broke and recovered."""

    running: Fleet
    clients: Clients
    rate: float
    broken_s: float = inf
    broken_unix_s: float = 0.0
    healed_s: float = inf
    events: list[tuple[float, str]] = field(default_factory=list)
    retries: float = 0.0

    def breaks(self) -> None:
        self.broken_s, self.broken_unix_s = asyncio.get_running_loop().time(), unix_now_s()

    def heals(self) -> None:
        self.healed_s = asyncio.get_running_loop().time()

    async def available(self, index: int) -> None:
        await self.running.becomes(f'llmproxy_backend_available{{backend="{self.running.name(index)}"}}', 1.0)

    # --- figures ------------------------------------------------------------------------------------------------------

    @property
    def lost(self) -> list[Seen]:
        return [one for one in self.clients.seen if one.byte_s is None]

    @property
    def cut(self) -> list[Seen]:
        return [one for one in self.clients.seen if one.byte_s is not None and not one.whole]

    def ttft_p99_s(self) -> float:
        """Returns the p99 of the seconds to the first byte, of requests that were sent before the fault."""
        sent = [one for one in self.clients.seen if one.sent_s < self.broken_s]
        return percentile([one.byte_s - one.sent_s for one in sent if one.byte_s], 0.99)

    @property
    def found_s(self) -> float | None:
        """The seconds from the fault to the first line of the log about it; None without a line."""
        named = (at_s for at_s, words in self.events if words.startswith(("backend_ejected", "backend_down")))
        return next(named, None)

    @property
    def back_s(self) -> float | None:
        """The seconds from the recovery to the first byte of replica 0; None without a byte."""
        name = self.running.name(0)
        times = (one.byte_s for one in self.clients.seen if one.backend == name and one.byte_s)
        return min((at_s - self.healed_s for at_s in times if at_s > self.healed_s), default=None)

    @property
    def attempts(self) -> float:
        """The mean number of attempts of a request."""
        return 1.0 + self.retries / len(self.clients.seen)

    def read_log(self) -> None:
        """Reads the events of replica 0 since it broke from the proxy's log."""
        for event in EVENTS:
            for entry in self.running.events(event):
                at_s = datetime.fromisoformat(entry["timestamp"]).timestamp() - self.broken_unix_s
                if entry["backend"] == self.running.name(0) and at_s >= 0.0:
                    self.events.append((at_s, f"{event} {entry.get('why', '')}".strip()))
        self.events.sort()


# --- scenes -----------------------------------------------------------------------------------------------------------


def during(fault: Fault, lasts_s: float, times: int = 1) -> Callable[[Run], Awaitable[None]]:
    """Returns a scene in which replica 0 has a fault for some seconds."""

    async def happens(run: Run) -> None:
        run.breaks()
        for _ in range(times):
            async with fault(run.running, 0):
                await asyncio.sleep(lasts_s)
            run.heals()
            await run.available(0)

    return happens


async def resets(run: Run) -> None:
    """Resets RESET_SHARE of all streams in mid-answer, at any replica."""
    rng, loop = random.Random(7), asyncio.get_running_loop()
    ends_s = loop.time() + RESETS_S
    while loop.time() < ends_s:
        await asyncio.sleep(rng.expovariate(RESET_SHARE * run.rate))
        await run.running.fault(rng.randrange(REPLICAS), "reset", after_bytes=RESET_AFTER_BYTES, times=1)


async def rolling(run: Run) -> None:
    """Drains each replica in turn, ends it once it is empty, starts it, and uses it again."""
    for index in range(REPLICAS):
        await run.running.admin(index, "drain")
        await run.running.becomes(f'llmproxy_in_flight_requests{{backend="{run.running.name(index)}"}}', 0.0)
        await run.running.replicas[index].stop()
        await run.running.start_replica(index)
        await run.running.admin(index, "undrain")
        await run.available(index)


@dataclass(frozen=True, slots=True)
class Scene:
    """A fault, and the goals for the proxy's reaction."""

    name: str
    happens: Callable[[Run], Awaitable[None]]
    found_within_s: float | None = None
    """The seconds within which the proxy must find the fault; None if it has nothing to find."""
    healthy_s: float = 3.0
    """The seconds of load before the fault."""
    breaks_streams: bool = True


SCENES = (
    Scene("killed (`kill -9`)", during(killed, 3.0), 1.0),
    Scene("stopped (SIGSTOP, SIGCONT 5 s later)", during(stopped(), 5.0), 2.0, breaks_streams=False),
    # Polls are answered as before, and no stream moves.
    Scene("frozen, with /health 200", during(broken("frozen"), 5.0), 2.0, breaks_streams=False),
    # As vLLM on SIGTERM: the port refuses, and open streams get no byte and no end.
    Scene("hangs, as after SIGTERM", during(broken("hang", restarted=True), 3.0), 2.0),
    # 500 for new requests under a `/health` of 200.
    Scene("drains, with /health 200", during(broken("draining_500", restarted=True), 3.0), 1.0),
    # Slowness is measured against the time before, which takes ten observations of 0.8 s.
    Scene("ten times as slow", during(broken("slow", factor=10), 8.0), 5.0, healthy_s=14.0, breaks_streams=False),
    Scene("5 % of streams reset in mid-answer", resets),
    Scene("flapping: killed three times", during(killed, 0.0, times=3), 1.0),
    Scene("rolling restart", rolling, breaks_streams=False),
)


async def play(scene: Scene, rate: float, seed: int) -> Run:
    """Starts a fleet, and runs a scene under `rate` streams per second."""
    async with fleet([FLAGS] * REPLICAS, settings=WITH_ADMIN) as running:
        async with Clients(running.session, WORK, seed) as clients:
            run = Run(running, clients, rate)
            clients.poisson(rate, lambda: running.url)
            await asyncio.sleep(scene.healthy_s)
            await scene.happens(run)
            await asyncio.sleep(AFTER_S)
            await clients.ended()
        run.retries = await running.metric("llmproxy_retries_total") or 0.0
        if scene.found_within_s is not None:
            run.read_log()
    return run


# --- the table --------------------------------------------------------------------------------------------------------

COLUMNS = (
    "scene",
    "requests",
    "lost before the first byte",
    "broken after it",
    "of these with one error event",
    "found after s",
    "attempts for each request",
    "load again after s",
)


def row(scene: Scene, run: Run) -> list[object]:
    one_error = sum(one.errors == 1 for one in run.cut)
    found, back = "–", "–"
    if scene.found_within_s is not None:
        found, back = ("never" if at_s is None else f"{at_s:.2f}" for at_s in (run.found_s, run.back_s))
    counts = [len(run.clients.seen), len(run.lost), len(run.cut), one_error]
    return [scene.name, *counts, found, f"{run.attempts:.3f}", back]


def missed(scene: Scene, run: Run) -> list[str]:
    """Returns a sentence for each goal that was missed."""
    problems = [f"lost: {one.detail}" for one in run.lost]
    problems += [f"{one.errors} error events: {one.detail}" for one in run.cut if one.errors != 1]
    if run.cut and not scene.breaks_streams:
        problems.append(f"{len(run.cut)} streams broke: {run.cut[0].detail}")
    if run.attempts > ATTEMPTS_MAX:
        problems.append(f"{run.attempts:.3f} attempts for each request")
    if scene.found_within_s is not None:
        goal_s, found_s = scene.found_within_s, run.found_s
        silent = re.search(r"silent for (\S+) s", run.events[0][1]) if run.events else None
        if silent is not None:
            # A silent replica cannot be found before its next byte is due.
            goal_s, found_s = max(goal_s, 5.0 * run.ttft_p99_s()), float(silent[1])
        if found_s is None or found_s > goal_s:
            problems.append(f"found after {found_s} s, not within {goal_s:.1f} s")
        if run.back_s is None:
            problems.append("never used again")
    return problems


async def main() -> int:
    """Prints a row for each scene, and the lines of the log. Returns 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=16.0, help="streams per second")
    parser.add_argument("--only", default="", help="part of a scene's name")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    table, lines = Table(*COLUMNS), list[str]()
    problems: list[str] = []
    for scene in SCENES:
        if options.only in scene.name:
            run = await play(scene, options.rate, options.seed)
            table.row(*row(scene, run))
            if run.events:
                lines.append(f"{scene.name}: " + "; ".join(f"{at_s:.2f} s {words}" for at_s, words in run.events))
            problems += [f"MISSED {scene.name}: {problem}" for problem in missed(scene, run)]
    print("\n" + "\n".join(lines + problems))
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
