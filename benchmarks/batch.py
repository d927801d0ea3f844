"""The latency of interactive clients with and without a batch beside them, and the results of a batch that is killed.

    python -m benchmarks.batch

Two simulated replicas, the proxy, the clients and `llmproxy batch` run in separate processes. In each repetition, the
same streams arrive three times: without a batch, with a batch, and with a batch that has `--while-idle`. Each batch is
ended by `kill -9`. Finally the batch is run to its end, and its results are counted. *Idle capacity used* is the rate
of the batch, divided by the difference between the rate of a fleet that serves only the batch and the clients' rate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import monotonic

from benchmarks.fleet import Fleet, Process, fleet, start, until
from benchmarks.load import Clients, Seen, Work, first_s, percentile
from benchmarks.table import Table

BATCH, REPLICAS = 8, 2
WORK = Work(words=240)
ARMS: dict[str, Sequence[str] | None] = {
    "alone": None,
    "sheddable": (),
    "--while-idle": ("--while-idle",),
}
"""Name of an arm -> flags of `llmproxy batch`; None for no batch."""
SETTLE_S = 5.0
"""A measurement begins this long after the start of a batch, which then has found its number of open requests."""


def batch_file(folder: Path, requests: int) -> Path:
    rng, file = random.Random(3), folder / "batch.jsonl"
    work = Work(stream=False, words=WORK.words)
    lines = (
        {"custom_id": f"r-{number}", "method": "POST", "url": "/v1/chat/completions", "body": work.body(rng)}
        for number in range(requests)
    )
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def results(file: Path) -> list[str]:
    """Returns the ids in all complete lines of a results file with status 200.

    An id in several lines appears several times.
    """
    try:
        lines = file.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    found = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return [one["custom_id"] for one in found if one["response"] and one["response"]["status_code"] == 200]


async def sending(running: Fleet, file: Path, out: Path, flags: Sequence[str]) -> Process:
    command = ["batch", str(file), "--out", str(out), "--url", running.url, *flags]
    return await start(command, running.folder / f"{out.stem}.log")


async def window(running: Fleet, rate: float, seconds: float, seed: int) -> list[Seen]:
    """Returns the requests of clients that arrived within `seconds`, `rate` per second (0: none)."""
    async with Clients(running.session, WORK, seed) as clients:
        if rate:
            clients.poisson(rate, lambda: running.url)
        await asyncio.sleep(seconds)
        await clients.ended()
        return clients.seen


async def one_start(table: Table, number: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Prints a row of the table for each arm, and returns the figures of each."""
    flags = ("--model", "sim", "--max-num-seqs", str(BATCH), "--speed", str(options.speed))
    figures: dict[str, list[float]] = {}
    async with fleet([flags] * REPLICAS) as running:
        file, out = batch_file(running.folder, options.requests), running.folder / "results.jsonl"
        arms = list(ARMS) if number % 2 else list(reversed(ARMS))
        full = 0.0
        for name in ["full", *arms]:
            more = () if name == "full" else ARMS[name]
            process = None
            if more is not None:
                process = await sending(running, file, out, more)
                began = len(results(out))
                await until(lambda: len(results(out)) > began)  # noqa: B023 - awaited here
            await asyncio.sleep(SETTLE_S)
            before, began_s = len(results(out)), monotonic()
            seen = await window(running, options.rate if name != "full" else 0.0, options.seconds, number)
            done = (len(results(out)) - before) / (monotonic() - began_s)
            if process is not None:
                await process.stop(signal.SIGKILL)
            if name == "full":
                full = done
                continue
            whole_s = [one.ended_s - one.sent_s for one in seen if one.whole and one.ended_s is not None]
            used = done / (full - options.rate)
            figures[name] = [first_s(seen, 0.5), first_s(seen, 0.95), percentile(whole_s, 0.95), used]
            first_ms, late_ms, whole_ms = (f"{1e3 * value:.0f}" for value in figures[name][:3])
            failed = sum(not one.whole for one in seen)
            table.row(number, name, len(seen), failed, first_ms, late_ms, whole_ms, f"{done:.1f}", f"{used:.0%}")
        last = await sending(running, file, out, ())
        code = await last.child.wait()
        counts = Counter(results(out))
        twice = sum(count > 1 for count in counts.values())
        print(f"killed {len(ARMS)} times: {len(counts)} of {options.requests} answers, {twice} twice; exit code {code}")
    return figures


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000, help="requests of the batch")
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second of the clients")
    parser.add_argument("--seconds", type=float, default=40.0, help="length of each window")
    parser.add_argument("--speed", type=float, default=1.0, help="speed of the replicas")
    parser.add_argument("--starts", type=int, default=3)
    options = parser.parse_args()
    names = "requests", "failed", "TTFT p50, ms", "p95", "whole p95, ms", "batch/s", "idle capacity used"
    table = Table("start", "arm", *names, texts=2)
    found = [await one_start(table, number, options) for number in range(options.starts)]
    print()
    ratios = Table("beside alone, median", "TTFT p50", "TTFT p95", "whole p95")
    for name in list(ARMS)[1:]:
        ratios.row(name, *(f"{median(one[name][i] / one['alone'][i] for one in found):.2f}" for i in range(3)))


if __name__ == "__main__":
    asyncio.run(main())
