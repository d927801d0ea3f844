"""Who is served first by real vLLM replicas that are offered three times what they run at once.

    python -m benchmarks.validation.bands --backend http://127.0.0.1:18001 --backend http://127.0.0.1:18002

Starts the proxy over them, keeps `--oversubscription` times their batch of streams open (20 % critical, 60 % default,
20 % sheddable; each that ends is followed by one of the same band), and reads everything from the decision log: the
order of grants and of ends by band, the waits, and *inversions*, grants to a band while the log's own account says that
a higher band waited. A grant below a waiting band may be right, where what waits there fits nowhere; here every request
fits every replica, so that each would be a fault.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from benchmarks.validation.vllm_replica import proxied
from llmproxy.observe import logs

BANDS = {"critical": 0.2, "default": 0.6, "sheddable": 0.2}
LEVELS = {100: "critical", 0: "default", -100: "sheddable"}


async def measure(backends: list[str], batch: int, oversubscription: float, seconds: float, log: Path) -> None:
    """Run the load, which ends by itself; `log` has it afterwards."""
    configured = [{"url": url, "max_in_flight": batch} for url in backends]
    async with proxied(configured, decision_log=str(log)) as proxy, aiohttp.ClientSession() as http:
        ends_s = asyncio.get_running_loop().time() + seconds
        open_streams = round(oversubscription * batch * len(backends))
        bands = random.Random(1).choices(list(BANDS), list(BANDS.values()), k=open_streams)
        await asyncio.gather(
            *(_client(http, proxy.url, band, seed, ends_s) for seed, band in enumerate(bands)),
        )


async def _client(http: aiohttp.ClientSession, url: str, band: str, seed: int, ends_s: float) -> None:
    rng = random.Random(seed)
    while asyncio.get_running_loop().time() < ends_s:
        body = {
            "messages": [{"role": "user", "content": f"Tell me the story of number {rng.randrange(10_000_000)}."}],
            "max_tokens": rng.randrange(16, 64), "ignore_eos": True, "stream": True,
        }  # fmt: skip
        headers = {"x-llm-d-inference-objective": band}
        async with http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
            await response.read()
        # A band without a pause would never let go of the seats, and nothing below it could be seen at all.
        await asyncio.sleep(rng.expovariate(1 / 0.2))


def report(log: Path) -> int:
    """Print what the log says. Answers the number of inversions."""
    lines = [orjson.loads(line) for line in log.read_bytes().splitlines()]
    rows = [row for row in lines if row.get("granted_at_s") is not None]
    by_grant = sorted(rows, key=lambda row: row["granted_at_s"])
    inversions = [row for row in by_grant if _waits_above(row)]
    outcomes = Counter((LEVELS[row["criticality"]], row["outcome"]) for row in lines if "outcome" in row)
    print(f"{len(rows)} requests granted; outcomes: {dict(outcomes)}")
    print("| band | requests | queue wait p50 s | p99 s | TTFT p50 s | p99 s | granted while a higher band waited |")
    print("| --- | --: | --: | --: | --: | --: | --: |")
    for level, name in LEVELS.items():
        mine = [row for row in rows if row["criticality"] == level]
        if not mine:
            continue
        waits = [row["queue_wait_s"] for row in mine]
        ttfts = [row["ttft_s"] for row in mine if row.get("ttft_s") is not None]
        passed = sum(row["criticality"] == level for row in inversions)
        cells = (name, len(mine), _at(waits, 50), _at(waits, 99), _at(ttfts, 50), _at(ttfts, 99), passed)
        print("| " + " | ".join(map(str, cells)) + " |")
    contended = [row for row in by_grant if len(row["why"]["waiting"]) > 1]
    print(f"\n{len(contended)} grants while two or more bands waited, by band: "
          f"{dict(Counter(LEVELS[row['criticality']] for row in contended))}")  # fmt: skip
    print("order of grants   :", "".join(LEVELS[row["criticality"]][0] for row in by_grant[:120]))
    by_end = sorted(rows, key=lambda row: row["ended_at_s"])
    print("order of completion:", "".join(LEVELS[row["criticality"]][0] for row in by_end[:120]))
    return len(inversions)


def _waits_above(row: dict[str, Any]) -> bool:
    return any(int(level) > row["criticality"] and number > 0 for level, number in row["why"]["waiting"].items())


def _at(values: list[float], percent: int) -> str:
    return f"{statistics.quantiles(values, n=100)[percent - 1]:.3f}" if len(values) > 1 else "-"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", required=True, metavar="URL")
    parser.add_argument("--batch", type=int, default=4, help="--max-num-seqs of each replica")
    parser.add_argument("--oversubscription", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    given = parser.parse_args()
    logs.configure("text", "error")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "decisions.jsonl"
        asyncio.run(measure(given.backend, given.batch, given.oversubscription, given.seconds, log))
        inversions = report(log)
    print(f"\ninversions: {inversions}")
    return 1 if inversions else 0


if __name__ == "__main__":
    sys.exit(main())
