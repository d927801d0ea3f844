"""The timed soak itself: load at a share of what was measured, a fault every minute, and what is left at the end."""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.endurance import ledger as sums
from benchmarks.endurance.faults import FAULTS, Fault
from benchmarks.endurance.ledger import End, Ledger
from benchmarks.endurance.load import Load, capacity, sending_traced, shown
from benchmarks.endurance.rig import MODELS, SEQUENCES, UP_S, Rig, rig, usage_of
from benchmarks.fleet import total_of

SHARE = 0.7
CAPACITY_WARM_S, CAPACITY_S = 8.0, 20.0
MINUTE_S = 60.0
FAULT_AFTER_S = 5.0
"""From the beginning of a minute to its fault."""
LOOK_EVERY_S = 10.0
WARM_UP_S = 300.0
"""What the slope over all leaves out at its beginning."""
SETTLE_S = 120.0
"""How long what is left over may take to go: idle connections are kept for a while."""
SLOPE_SPAN_S = 1_500.0
SLOPE_BYTES_MAX = 8e6
"""Growth per hour over the second half, judged where that half is `SLOPE_SPAN_S` or longer: of 50,000 requests an hour,
150 bytes for each would be more."""

EXPECTED_ERRORS = frozenset({"reload_failed"})
"""What the log calls an error and a fault here requests for."""


@dataclass(slots=True)
class Figures:
    """What the report is made of. Times are seconds since the load began."""

    rate: float = 0.0
    capacity: float = 0.0
    samples: list[dict[str, float]] = field(default_factory=list)
    minutes: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def rss(self) -> sums.Samples:
        return [(sample["at_s"], sample["rss_bytes"]) for sample in self.samples]


class Soak:
    """One run. `stop` ends it early, with its report at the end."""

    def __init__(self, rig: Rig, session: aiohttp.ClientSession, stop: asyncio.Event) -> None:
        self._rig = rig
        self._session = session
        self._stop = stop
        self.ledger = Ledger()
        self.figures = Figures()
        self._events: Counter[str] = Counter()
        self._cpu_s = (0.0, 0.0, 0.0)

    async def run(self, minutes: float, seed: int) -> None:
        """Raises nothing that the fleet can do: it becomes a problem of the figures."""
        loop, figures = asyncio.get_running_loop(), self.figures
        before = await self._least_left()
        clients = 2 * SEQUENCES * len(MODELS)
        figures.capacity = await capacity(
            self._session, self._rig.url, clients, CAPACITY_WARM_S, CAPACITY_S, self.ledger
        )
        figures.rate = SHARE * figures.capacity
        print(f"capacity {figures.capacity:.1f} requests/s, measured over {CAPACITY_S:g} s; {SHARE:.0%} of it is "
              f"{figures.rate:.1f} requests/s", flush=True)  # fmt: skip
        began_s = loop.time()
        load = Load(self._session, self._rig.url, seed, self.ledger)
        offering = asyncio.create_task(load.offer(figures.rate, self._stop))
        looking = asyncio.create_task(self._look(began_s))
        self._cpu_s = self._cpu()
        minute = 0
        while not self._stop.is_set() and loop.time() < began_s + minutes * MINUTE_S:
            ends_s = began_s + min(minute + 1, minutes) * MINUTE_S
            await self._minute(minute, ends_s)
            minute += 1
        self._stop.set()
        await offering
        await load.ended()
        figures.seconds = loop.time() - began_s
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await self._settle(before)

    # --- while it runs ------------------------------------------------------------------------------------------------

    async def _pause(self, until_s: float) -> None:
        """Wait until then, or until it is to stop."""
        seconds = until_s - asyncio.get_running_loop().time()
        if seconds > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), seconds)

    async def _minute(self, number: int, ends_s: float) -> None:
        loop = asyncio.get_running_loop()
        began_s, ends, sent = loop.time(), Counter(self.ledger.ends), self.ledger.sent
        fault = FAULTS[number % len(FAULTS)]
        # Each fault hits another replica with every round.
        index = (number + number // len(FAULTS)) % len(MODELS)
        name = "nothing befell it"
        await self._pause(loop.time() + FAULT_AFTER_S)
        whole_s = None
        if loop.time() + fault.lasts_s < ends_s and not self._stop.is_set():
            name, whole_s = fault.name, await self._apply(fault, index)
        await self._pause(ends_s)
        cpu, earlier, lasted_s = self._cpu(), self._cpu_s, loop.time() - began_s
        self._cpu_s = cpu
        cores = [(now - then) / lasted_s for now, then in zip(cpu, earlier, strict=True)]
        row = {
            "minute": number + 1,
            "fault": name,
            "replica": f"{MODELS[index]} {index}",
            "whole_again_s": whole_s,
            "sent": self.ledger.sent - sent,
            "ends": {str(end): self.ledger.ends[end] - ends[end] for end in End},
            "cores": dict(zip(("proxy", "replicas", "clients"), cores, strict=True)),
        }
        self.figures.minutes.append(row)
        print(self._line(row), flush=True)

    def _line(self, row: dict[str, Any]) -> str:
        ends = ", ".join(f"{count} {name}" for name, count in row["ends"].items() if count)
        again = "–" if row["whole_again_s"] is None else f"{row['whole_again_s']:.1f} s"
        last = self.figures.samples[-1] if self.figures.samples else {}
        cpu = ", ".join(f"{name} {share:.0%}" for name, share in row["cores"].items())
        return (
            f"minute {row['minute']}: {row['replica']} {row['fault']}, all available again after {again}; "
            f"sent {row['sent']}: {ends}; "
            f"in flight {last.get('in_flight', 0):.0f}, queued {last.get('queued', 0):.0f}; "
            f"RSS {last.get('rss_bytes', 0) / 1e6:.1f} MB, {last.get('descriptors', 0):.0f} descriptors; CPU {cpu}"
        )

    async def _apply(self, fault: Fault, index: int) -> float | None:
        """One fault from its beginning until all backends may be given work again. Returns how many seconds that took
        since its replica was well; None, and a problem, where it did not come about.
        """
        loop = asyncio.get_running_loop()
        try:
            async with fault.applied(self._rig, index):
                await self._pause(loop.time() + fault.lasts_s)
            mended_s = loop.time()
            async with asyncio.timeout(UP_S):
                while await self._rig.available() < len(MODELS):  # noqa: ASYNC110 - it is another process
                    await asyncio.sleep(0.2)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self.figures.problems.append(f"{fault.name} ({self._rig.name(index)}): {type(error).__name__} {error}")
            return None
        return loop.time() - mended_s

    def _cpu(self) -> tuple[float, float, float]:
        """CPU seconds so far: the proxy's, the replicas', and of this process, which is the clients'."""
        return usage_of(self._rig.proxy_pid).cpu_s, self._rig.replicas_cpu_s(), time.process_time()

    async def _look(self, began_s: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_EVERY_S - (loop.time() - began_s) % LOOK_EVERY_S)
            self._read_log()
            try:
                self.figures.samples.append(await self._sample(loop.time() - began_s))
            except (aiohttp.ClientError, OSError) as error:
                self.figures.problems.append(f"the proxy could not be looked at: {type(error).__name__} {error}")
                self._stop.set()
                return

    async def _sample(self, at_s: float) -> dict[str, float]:
        usage, page = usage_of(self._rig.proxy_pid), await self._rig.metrics()
        return {
            "at_s": round(at_s, 1),
            "rss_bytes": usage.rss_bytes,
            "descriptors": usage.descriptors,
            "cpu_s": usage.cpu_s,
            "in_flight": total_of(page, "llmproxy_in_flight_requests"),
            "queued": total_of(page, "llmproxy_queued_requests"),
            "sent": self.ledger.sent,
        }

    def _read_log(self) -> None:
        for entry in self._rig.news():
            self._events[entry["event"]] += 1
            if entry["event"] == "request":
                self.ledger.log(entry["request_id"], entry["outcome"], entry["status"])
            elif entry["level"] in ("error", "critical") and entry["event"] not in EXPECTED_ERRORS:
                self.figures.problems.append(f"the log: {json.dumps(entry)[:300]}")

    # --- when it is over ----------------------------------------------------------------------------------------------

    async def _least_left(self) -> dict[str, dict[str, int]]:
        """The most that there is of each kind while nobody requests for anything: polls come and go."""
        most: dict[str, Counter[str]] = {"tasks": Counter(), "timers": Counter(), "descriptors": Counter()}
        for _ in range(10):
            probed = await self._rig.probe()
            for kind, counts in most.items():
                counts |= Counter(probed[kind])
            await asyncio.sleep(0.23)
        return {kind: dict(counts) for kind, counts in most.items()}

    async def _settle(self, before: dict[str, dict[str, int]]) -> None:
        """Wait until nothing is left, and make a problem of what stays."""
        loop, figures = asyncio.get_running_loop(), self.figures
        # Kept connections of clients are the clients' to close.
        await self._session.close()
        ends_s = loop.time() + SETTLE_S
        while (left := await self._left(before)) and loop.time() < ends_s:  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(0.5)
        figures.problems += [f"left over: {one}" for one in left]
        figures.problems += self.ledger.closed(await self._rig.counted())
        figures.problems += [f"the log: {line[:200]}" for line in self._rig.strange()[:5]]
        figures.samples.append(await self._sample(figures.seconds))
        slope = sums.slope_per_hour(sums.second_half(figures.rss()))
        if figures.seconds / 2 >= SLOPE_SPAN_S and slope > SLOPE_BYTES_MAX:
            figures.problems.append(f"memory grew by {slope / 1e6:.1f} MB an hour over the second half")

    async def _left(self, before: dict[str, dict[str, int]]) -> list[str]:
        self._read_log()
        probed = await self._rig.probe()
        found = [f"{count} {name}" for name, count in probed["requests"].items() if count]
        for kind, earlier in before.items():
            found += [f"{kind}: {count} {name}" for name, count in sums.left_over(earlier, probed[kind]).items()]
        if probed["check"] != "sound":
            found.append(f"the scheduler's books are {probed['check']}")
        if self.ledger.silent:
            found.append(f"{self.ledger.silent} requests that are not logged yet")
        return found

    # --- the report ---------------------------------------------------------------------------------------------------

    def report(self) -> str:
        """The report, as text."""
        figures, ledger = self.figures, self.ledger
        rss = figures.rss()
        all_slope = sums.slope_per_hour(sums.since(rss, WARM_UP_S))
        half_slope = sums.slope_per_hour(sums.second_half(rss))
        lines = [
            f"\n{figures.seconds / MINUTE_S:.1f} minutes, {ledger.sent} requests",
            "",
            "| fault | times | sent in these minutes | an error | broken | all available again after s |",
            "| --- | --: | --: | --: | --: | --: |",
        ]
        for fault in FAULTS:
            rows = [row for row in figures.minutes if row["fault"] == fault.name]
            if rows:
                again = [row["whole_again_s"] for row in rows if row["whole_again_s"] is not None]
                longest = f"{max(again):.1f}" if again else "–"
                counts = [sum(row["ends"][str(end)] for row in rows) for end in (End.REFUSED, End.BROKEN)]
                lines.append(
                    f"| {fault.name} | {len(rows)} | {sum(row['sent'] for row in rows)} | {counts[0]} | {counts[1]} "
                    f"| {longest} |"
                )
        pairs = Counter({f"{end} / {outcome}": count for (end, outcome), count in ledger.pairs.items()})
        lines += [
            "",
            f"as clients saw it: {shown(ledger.ends)}",
            f"as the proxy logged it: {shown(ledger.outcomes)}",
            f"both: {shown(pairs)}",
            f"in the log: {shown(self._events)}",
        ]
        if rss:
            first, last, most = (
                f"{value / 1e6:.1f}" for value in (rss[0][1], rss[-1][1], max(size for _, size in rss))
            )
            lines += [
                f"RSS {first} MB at first, {last} at last, {most} at most",
                f"slope {half_slope / 1e6:+.2f} MB/h over the second half, {all_slope / 1e6:+.2f} after five minutes",
            ]
        lines += [f"PROBLEM {problem}" for problem in figures.problems] or ["nothing left over, and everything adds up"]
        return "\n".join(lines)

    def written(self) -> dict[str, Any]:
        """The same for machines."""
        rss = self.figures.rss()
        return {
            "seconds": self.figures.seconds,
            "capacity_per_s": self.figures.capacity,
            "rate_per_s": self.figures.rate,
            "sent": self.ledger.sent,
            "ends": {str(end): count for end, count in self.ledger.ends.items()},
            "outcomes": dict(self.ledger.outcomes),
            "slope_bytes_per_hour": sums.slope_per_hour(sums.second_half(rss)),
            "slope_after_warm_up_bytes_per_hour": sums.slope_per_hour(sums.since(rss, WARM_UP_S)),
            "problems": self.figures.problems,
            "minutes": self.figures.minutes,
            "samples": self.figures.samples,
        }


async def soak(minutes: float, seed: int, out: Path | None) -> bool:
    """Print a line for each minute and a report at the end, which SIGINT brings about early. True when all is well."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    with tempfile.TemporaryDirectory(prefix="llmproxy-soak-") as folder:
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            # A replica closes what is idle for five seconds, and what is posted into that moment would be lost.
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as looking,
            aiohttp.ClientSession(connector=connector, trace_configs=[sending_traced()]) as session,
            rig(Path(folder), looking) as opened,
        ):
            run = Soak(opened, session, stop)
            await run.run(minutes, seed)
            code = await opened.stop()
            if code != 0:
                run.figures.problems.append(f"the proxy ended with status {code}")
    print(run.report(), flush=True)
    if out is not None:
        await asyncio.to_thread(write, out, run.written())
    return not run.figures.problems


def write(out: Path, written: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "soak.json").write_text(json.dumps(written, indent=1))
