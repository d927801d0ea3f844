"""Clients of a critical band while the fleet is offered twice its capacity, and the shares of two flows.

    python -m benchmarks.overload

Simulated replicas, the proxy and the clients run in separate processes. All figures come from the log lines of
requests. The first table has critical traffic alone, and then traffic of twice the capacity: 20 % critical, 60 %
default and 20 % sheddable. The second table has two flows of one band. The first flow sends ten times as much as the
second flow.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from benchmarks.fleet import Fleet, fleet
from benchmarks.load import FLOW, OBJECTIVE, Clients, Work, percentile
from benchmarks.table import Table

BATCH, REPLICAS, SPEED = 32, 2, 0.25
FLAGS = ("--model", "sim", "--profile", "llama-8b-h100", "--speed", str(SPEED), "--max-num-seqs", str(BATCH))
WORDS = 240
TOKENS = range(16, 113)
"""The lengths of answers. They vary, because all answers of a batch would otherwise end at the same time."""
LEVELS = {"critical": 100, "default": 0, "sheddable": -100}

Source = tuple[float, str, str]
"""The requests per second, the objective and the flow ("" for none) of one kind of traffic."""


async def offer(running: Fleet, sources: Sequence[Source], seconds: float, seed: int) -> None:
    """Sends the requests of all sources for `seconds`, and waits for the answers. Equal seeds give equal arrivals."""
    async with AsyncExitStack() as stack:
        every = []
        for rate, objective, flow in sources:
            headers = {OBJECTIVE: objective} | ({FLOW: flow} if flow else {})
            work = Work(tokens=TOKENS, words=WORDS, headers=headers)
            clients = await stack.enter_async_context(Clients(running.session, work, seed + LEVELS[objective]))
            clients.poisson(rate, lambda: running.url)
            every.append(clients)
        await asyncio.sleep(seconds)
        await asyncio.gather(*(clients.ended() for clients in every))


async def capacity() -> float:
    """Returns the requests per second that the full fleet serves."""
    async with fleet([FLAGS] * REPLICAS) as running:
        await offer(running, [(60.0 * SPEED * REPLICAS, "default", "")], 25.0, seed=1)
        done = [one for one in running.exits() if one["outcome"] == "completed"]
    first_s = min(one["granted_s"] for one in done)
    # The first answers come from a batch that is still filling, and the last from a batch that empties.
    window = [one for one in done if first_s + 8.0 < one["arrived_s"] + one["duration_s"] < first_s + 22.0]
    return len(window) / 14.0


def inversions(exits: Sequence[Mapping[str, Any]], levels: Mapping[str, int] = LEVELS) -> int:
    """Returns the number of grants to a lower band while a request of a higher band had waited for at least 20 ms.

    All replicas serve the same model, so the higher request could have had the slot. The first 20 ms are left out,
    because the arrival is noted before the body is read.
    """
    events = []
    for entry in exits:
        if entry.get("granted_s") is not None:
            level = levels[entry["band"]]
            events += [(entry["granted_s"], 1, level), (entry["arrived_s"] + 0.02, 0, level)]
    waiting: dict[int, int] = defaultdict(int)
    count = 0
    for _, granted, level in sorted(events):
        if granted:
            count += any(number > 0 for other, number in waiting.items() if other > level)
        waiting[level] += -1 if granted else 1
    return count


async def priority(rate: float, seconds: float, seed: int) -> None:
    critical = (0.4 * rate, "critical", "")
    others = [(1.2 * rate, "default", ""), (0.4 * rate, "sheddable", "")]
    p99_s = {}
    table = Table(
        "run", "band", "offered", "completed", "TTFT p50 s", "TTFT p99 s", "queue wait p99 s", "inversions", texts=2
    )
    for name, sources in (("critical alone", [critical]), ("20/60/20 at 2x", [critical, *others])):
        async with fleet([FLAGS] * REPLICAS, ["--queue-max-wait-s", "20"]) as running:
            await offer(running, sources, seconds, seed)
            exits = running.exits()
        for band in LEVELS:
            mine = [one for one in exits if one["band"] == band]
            served = [one for one in mine if one.get("ttft_s") is not None]
            if mine:
                p50, p99 = (percentile([one["ttft_s"] for one in served], share) for share in (0.5, 0.99))
                p99_s[name, band] = p99
                wait = percentile([one["queue_wait_s"] for one in served], 0.99)
                done = sum(one["outcome"] == "completed" for one in mine)
                table.row(name, band, len(mine), done, f"{p50:.3f}", f"{p99:.3f}", f"{wait:.3f}", inversions(exits))
    alone_s, mixed_s = p99_s["critical alone", "critical"], p99_s["20/60/20 at 2x", "critical"]
    print(f"\ncritical p99 TTFT: {mixed_s:.3f} s against {alone_s:.3f} s alone (x{mixed_s / alone_s:.2f})\n")


async def shares(rate: float, seconds: float, seed: int) -> None:
    sources = [(6.0 * rate, "default", "aggressor"), (0.6 * rate, "default", "victim")]
    table = Table("fairness", "flow", "offered/s", "output tokens", "share while both wait", texts=2)
    for policy in ("fcfs", "fair_share"):
        async with fleet([FLAGS] * REPLICAS, ["--fairness", policy, "--queue-max-wait-s", "15"]) as running:
            await offer(running, sources, seconds, seed)
            exits = [one for one in running.exits() if one.get("granted_s") is not None]
        start_s = min(one["arrived_s"] for one in exits)
        both = [one for one in exits if start_s + 5.0 < one["granted_s"] < start_s + seconds]
        total = sum(one.get("output_tokens", 0) for one in both)
        for offered, _, flow in sources:
            mine = sum(one.get("output_tokens", 0) for one in both if one["flow"] == flow)
            table.row(policy, flow, f"{offered:.1f}", mine, f"{mine / total:.2f}")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0, help="length of each measured run")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    rate = await capacity()
    print(f"fleet: {REPLICAS} replicas x {BATCH} sequences at {SPEED:g} of real speed, {rate:.1f} requests/s\n")
    await priority(rate, options.seconds, options.seed)
    await shares(rate, options.seconds / 2, options.seed)


if __name__ == "__main__":
    asyncio.run(main())
