"""Load at 70 % of the measured capacity and a fault every minute: requests, tasks and memory that stay behind.

    python -m benchmarks.soak --minutes 60

`llmproxy serve` runs over three replicas of one model and two replicas of another model. Each request has an id. The
exit status is 1 if at the end one of these conditions does not hold:

- For each request, the client and the log line agree, and the metrics count as many requests.
- The proxy has no more requests, leases, bookings, bytes, tasks, timers and descriptors than before the first request.
- In runs of 50 minutes and more, memory grew by at most 8 MB an hour over the second half.

Ctrl-C ends the run early, with its report.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from benchmarks.faults import Fault, broken, drained, killed, misconfigured, removed, stopped
from benchmarks.fleet import Fleet, until
from benchmarks.soak import ledger as sums
from benchmarks.soak.fleet import MODELS, SEQUENCES, Log, all_available, counted, probed, soaked, usage_of
from benchmarks.soak.ledger import End, Ledger
from benchmarks.soak.load import Sender, sending_traced
from benchmarks.table import Table

SHARE = 0.7
CAPACITY_WARM_S, CAPACITY_S = 8.0, 20.0
MINUTE_S = 60.0
FAULT_AFTER_S = 5.0  # The seconds from the beginning of a minute to its fault.
LOOK_EVERY_S = 10.0
SETTLE_S = 120.0  # The longest wait until nothing is left of the requests: idle connections stay open for a while.
SLOPE_SPAN_S = 1_500.0
SLOPE_BYTES_MAX = 8e6
"""The maximum growth of memory per hour, about 150 bytes for each of 50,000 requests.

The growth is measured over the second half of the run if that takes at least SLOPE_SPAN_S.
"""
FAULTS: dict[str, tuple[Fault, float]] = {
    "killed, and started again": (killed, 3.0),
    "its gauges lie: always idle": (broken("lies"), 15.0),
    "stopped (SIGSTOP), and goes on": (stopped(), 5.0),
    "removed by a reload, and added": (removed, 10.0),
    "answers 503": (broken("busy_503"), 5.0),
    "five answers are reset in the middle": (broken("reset", after_bytes=2_000, times=5), 5.0),
    "drained, and undrained": (drained, 10.0),
    "hangs as after SIGTERM, and is started again": (broken("hang", restarted=True), 3.0),
    "ten times as slow": (broken("slow", factor=10), 10.0),
    "answers 500 while it drains, and is started again": (broken("draining_500", restarted=True), 3.0),
    "frozen, with /health 200": (broken("frozen"), 5.0),
    "its streams begin with an error, and the rest is 500": (broken("stream_error"), 5.0),
    "an invalid configuration": (misconfigured, 5.0),
    "its engine is dead, and is started again": (broken("engine_dead", restarted=True), 3.0),
    "all are stopped at once, and go on": (stopped(every=True), 3.0),
}
"""Name -> fault and its length in seconds. The faults hit the replicas in turn."""
EXPECTED_ERRORS = frozenset({"reload_failed"})  # The log events of level error that a fault causes.


@dataclass(slots=True)
class Minute:
    """A minute and its fault. `again_s` is the time until all backends were available again; None if they were not."""

    fault: str
    sent: int
    ends: dict[str, int]
    again_s: float | None


@dataclass(slots=True)
class Figures:
    """The figures of the report."""

    capacity: float = 0.0
    """The requests per second of the full fleet."""
    rss: list[tuple[float, float]] = field(default_factory=list)
    """Pairs of the seconds since the load began and the resident bytes of the proxy."""
    minutes: list[Minute] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Soak:
    """A run of the load and the faults. `stop` ends it early."""

    def __init__(self, running: Fleet, socket: Path, sender: Sender, stop: asyncio.Event) -> None:
        self._running = running
        self._socket = socket
        self._sender = sender
        self._stop = stop
        self._log = Log(running.proxy.log)
        self.ledger = sender.ledger
        self.figures = Figures()

    async def run(self, minutes: float, seed: int) -> None:
        """Runs the load and the faults. Failures of the fleet become problems in the figures."""
        loop, figures = asyncio.get_running_loop(), self.figures
        before = await self._idle()
        figures.capacity = await self._sender.capacity(2 * SEQUENCES * len(MODELS), CAPACITY_WARM_S, CAPACITY_S)
        rate = SHARE * figures.capacity
        print(f"capacity {figures.capacity:.1f} requests/s; {SHARE:.0%} of it is {rate:.1f} requests/s", flush=True)
        began_s = loop.time()
        offering = asyncio.create_task(self._sender.offer(rate, seed, self._stop))
        looking = asyncio.create_task(self._look(began_s))
        number = 0
        while not self._stop.is_set() and loop.time() < began_s + minutes * MINUTE_S:
            await self._minute(number, began_s + min(number + 1, minutes) * MINUTE_S)
            number += 1
        self._stop.set()
        await offering
        figures.seconds = loop.time() - began_s
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await self._settle(before)

    # --- the load -----------------------------------------------------------------------------------------------------

    async def _pause(self, until_s: float) -> None:
        """Waits until the time `until_s`, or until the run is stopped."""
        seconds = until_s - asyncio.get_running_loop().time()
        if seconds > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), seconds)

    async def _minute(self, number: int, ends_s: float) -> None:
        loop = asyncio.get_running_loop()
        ends, sent = Counter(self.ledger.ends), self.ledger.sent
        fault, (_, lasts_s) = list(FAULTS.items())[number % len(FAULTS)]
        # In each round of the faults, another replica has each of them.
        index = (number + number // len(FAULTS)) % len(MODELS)
        name, again_s = "no fault", None
        await self._pause(loop.time() + FAULT_AFTER_S)
        if loop.time() + lasts_s < ends_s and not self._stop.is_set():
            name, again_s = fault, await self._apply(fault, index)
        await self._pause(ends_s)
        counts = {str(end): self.ledger.ends[end] - ends[end] for end in End}
        minute = Minute(name, self.ledger.sent - sent, counts, again_s)
        self.figures.minutes.append(minute)
        ended = ", ".join(f"{count} {end}" for end, count in counts.items() if count)
        again = "–" if again_s is None else f"{again_s:.1f} s"
        rss, descriptors = usage_of(self._running.proxy.child.pid)
        print(
            f"minute {number + 1}: {MODELS[index]} {index} {name}, all available again after {again}; sent "
            f"{minute.sent}: {ended}; RSS {rss / 1e6:.1f} MB, {descriptors} descriptors", flush=True,
        )  # fmt: skip

    async def _apply(self, name: str, index: int) -> float | None:
        """Applies a fault, and waits until all backends are available again.

        Returns the seconds from the end of the fault until then. If they do not become available, adds a problem and
        returns None.
        """
        loop, (fault, lasts_s) = asyncio.get_running_loop(), FAULTS[name]
        try:
            async with fault(self._running, index):
                await self._pause(loop.time() + lasts_s)
            mended_s = loop.time()
            await until(lambda: all_available(self._running))
        except (aiohttp.ClientError, OSError) as error:
            self.figures.problems.append(f"{name} ({self._running.name(index)}): {type(error).__name__} {error}")
            return None
        return loop.time() - mended_s

    async def _look(self, began_s: float) -> None:
        """Reads memory and the log every ten seconds."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_EVERY_S - (loop.time() - began_s) % LOOK_EVERY_S)
            self._read_log()
            try:
                self.figures.rss.append((loop.time() - began_s, usage_of(self._running.proxy.child.pid)[0]))
            except OSError as error:
                self.figures.problems.append(f"the proxy is gone: {error}")
                self._stop.set()
                return

    def _read_log(self) -> None:
        for entry in self._log.new():
            self.figures.events[entry["event"]] += 1
            if entry["event"] == "request":
                self.ledger.log(entry["request_id"], entry["outcome"], entry["status"])
            elif entry["level"] in ("error", "critical") and entry["event"] not in EXPECTED_ERRORS:
                self.figures.problems.append(f"the log: {json.dumps(entry)[:300]}")

    # --- leftovers ----------------------------------------------------------------------------------------------------

    async def _idle(self) -> dict[str, dict[str, int]]:
        """Returns the largest number of tasks, timers and descriptors of each kind while there are no requests.

        The numbers vary, because polls come and go.
        """
        most: dict[str, Counter[str]] = {"tasks": Counter(), "timers": Counter(), "descriptors": Counter()}
        for _ in range(10):
            answer = await probed(self._running, self._socket)
            for kind, counts in most.items():
                counts |= Counter(answer[kind])
            await asyncio.sleep(0.23)
        return {kind: dict(counts) for kind, counts in most.items()}

    async def _settle(self, before: dict[str, dict[str, int]]) -> None:
        """Waits until nothing is left of the requests. Leftovers become problems."""
        loop, figures = asyncio.get_running_loop(), self.figures
        # The clients have to close their idle connections.
        await self._sender.session.close()
        ends_s = loop.time() + SETTLE_S
        while (left := await self._left(before)) and loop.time() < ends_s:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.5)
        figures.problems += [f"left over: {one}" for one in left]
        figures.problems += self.ledger.closed(await counted(self._running))
        figures.problems += [f"the log: {line[:200]}" for line in self._log.strange[:5]]
        figures.rss.append((figures.seconds, usage_of(self._running.proxy.child.pid)[0]))
        slope = sums.slope_per_hour(sums.second_half(figures.rss))
        if figures.seconds / 2 >= SLOPE_SPAN_S and slope > SLOPE_BYTES_MAX:
            figures.problems.append(f"memory grew by {slope / 1e6:.1f} MB an hour over the second half")

    async def _left(self, before: dict[str, dict[str, int]]) -> list[str]:
        self._read_log()
        answer = await probed(self._running, self._socket)
        found = [f"{count} {name}" for name, count in answer["requests"].items() if count]
        for kind, earlier in before.items():
            found += [f"{kind}: {count} {name}" for name, count in sums.left_over(earlier, answer[kind]).items()]
        if answer["check"] != "sound":
            found.append(f"the sums of the scheduler are {answer['check']}")
        if self.ledger.silent:
            found.append(f"{self.ledger.silent} requests that are not logged yet")
        return found


def print_report(figures: Figures, ledger: Ledger) -> None:
    print(f"\n{figures.seconds / MINUTE_S:.1f} minutes, {ledger.sent} requests\n")
    table = Table("fault", "times", "sent in these minutes", "an error", "broken", "all available again after s")
    for name in FAULTS:
        rows = [one for one in figures.minutes if one.fault == name]
        if rows:
            again = [one.again_s for one in rows if one.again_s is not None]
            counts = [sum(one.ends[str(end)] for one in rows) for end in (End.REFUSED, End.BROKEN)]
            table.row(name, len(rows), sum(one.sent for one in rows), *counts, f"{max(again):.1f}" if again else "–")
    pairs = {f"{end} / {outcome}": count for (end, outcome), count in ledger.pairs.items()}
    print(f"\nclients: {shown(ledger.ends)}\nlog: {shown(ledger.outcomes)}\nboth: {shown(pairs)}")
    print(f"lines of the log: {shown(figures.events)}")
    first, last, most = figures.rss[0][1], figures.rss[-1][1], max(size for _, size in figures.rss)
    slope = sums.slope_per_hour(sums.second_half(figures.rss))
    print(f"RSS {first / 1e6:.1f} MB at first, {last / 1e6:.1f} at last, {most / 1e6:.1f} at most; "
          f"{slope / 1e6:+.2f} MB/h over the second half")  # fmt: skip
    print("\n".join(f"PROBLEM {one}" for one in figures.problems) or "nothing left over, and everything adds up")


def shown(counts: Mapping[Any, int]) -> str:
    """Returns counts as text, the largest first."""
    return json.dumps({str(name): count for name, count in sorted(counts.items(), key=lambda each: -each[1])})


async def soak(minutes: float, seed: int) -> Figures:
    """Runs the soak, and prints a line for each minute and a report."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(connector=connector, trace_configs=[sending_traced()]) as session,
        soaked() as (running, socket),
    ):
        run = Soak(running, socket, Sender(session, running.url, Ledger()), stop)
        await run.run(minutes, seed)
        if code := await running.proxy.stop():
            run.figures.problems.append(f"the proxy ended with status {code}")
    print_report(run.figures, run.ledger)
    return run.figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    return int(bool(uvloop.run(soak(options.minutes, options.seed)).problems))


if __name__ == "__main__":
    sys.exit(main())
