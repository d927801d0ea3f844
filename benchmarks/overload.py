"""What a critical client notices while the fleet is offered twice what it can serve, and who gets how much of it.

Real processes: simulated replicas, the proxy, and this load. Everything is read from the proxy's own request lines.
Run `python -m benchmarks.overload`; it takes about three minutes. `benchmarks/README.md` says how to read it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.fleet import Fleet, fleet

MODEL = "sim"


@dataclass(frozen=True, slots=True)
class Source:
    """One kind of traffic: Poisson arrivals at `rate` per second, marked with an objective and a fairness id."""

    rate: float
    objective: str
    flow: str | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Size of every request, and of the fleet that serves it.

    Answers have lengths drawn evenly from `output_tokens`: if all were equal, a batch that began together would end
    together, and whoever came in between would wait for all of it.
    """

    prompt_words: int = 150
    output_tokens: tuple[int, int] = (16, 112)
    batch: int = 32
    replicas: int = 2
    speed: float = 0.25

    @property
    def output_tokens_mean(self) -> float:
        return sum(self.output_tokens) / 2

    def replica_flags(self) -> list[str]:
        return [
            "--model", MODEL, "--profile", "llama-8b-h100", "--speed", str(self.speed), "--max-num-seqs",
            str(self.batch),
        ]  # fmt: skip

    def body(self, rng: random.Random) -> dict[str, Any]:
        # Random numbers, so that no two prompts share a prefix worth caching.
        words = " ".join(str(rng.randrange(10_000_000)) for _ in range(self.prompt_words))
        return {
            "model": MODEL,
            "messages": [{"role": "user", "content": words}],
            "max_tokens": rng.randint(*self.output_tokens),
            "ignore_eos": True,
            "stream": True,
        }


async def offer(running: Fleet, load: Load, sources: list[Source], seconds: float, seed: int) -> None:
    """Send every source's arrivals for `seconds`, then wait until all are answered. Paired by `seed` and source."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as tasks:
        for index, source in enumerate(sources):
            rng = random.Random(f"{seed} {index} {source.objective} {source.flow}")
            tasks.create_task(_arrivals(session, running.url, load, source, seconds, rng, tasks))


async def _arrivals(
    session: aiohttp.ClientSession,
    url: str,
    load: Load,
    source: Source,
    seconds: float,
    rng: random.Random,
    tasks: asyncio.TaskGroup,
) -> None:
    loop = asyncio.get_running_loop()
    start_s = at_s = loop.time()
    while (at_s := at_s + rng.expovariate(source.rate)) < start_s + seconds:
        await asyncio.sleep(at_s - loop.time())
        tasks.create_task(_one(session, url, load.body(rng), source))


async def _one(session: aiohttp.ClientSession, url: str, body: dict[str, Any], source: Source) -> None:
    headers = {"x-llm-d-inference-objective": source.objective}
    if source.flow is not None:
        headers["x-llm-d-inference-fairness-id"] = source.flow
    async with session.post(url + "/v1/chat/completions", json=body, headers=headers) as answer:
        async for _ in answer.content.iter_any():
            pass


async def capacity(load: Load) -> float:
    """Requests per second that the fleet serves when it never lacks work: measured, not assumed."""
    async with fleet([load.replica_flags()] * load.replicas) as running:
        seconds = 25.0
        await offer(running, load, [Source(60.0 * load.speed * load.replicas, "default")], seconds, seed=1)
        done = [e for e in running.exits() if e["outcome"] == "completed"]
        first = min(e["granted_s"] for e in done)
        # The first answers come from a batch that is still filling, and the last from one that empties.
        window = [e for e in done if first + 8.0 < e["arrived_s"] + e["duration_s"] < first + 22.0]
        return len(window) / 14.0


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def inversions(exits: list[dict[str, Any]], level: dict[str, int]) -> int:
    """Grants given to a lower band while a request of a higher one had been waiting for 20 ms or more.

    All replicas are alike here and all serve the one model, so whoever is granted took a place that the higher request
    could have had. The first 20 ms are left out because arrival is stamped before the body is read.
    """
    events = []
    for entry in exits:
        if entry.get("granted_s") is None:
            continue
        events.append((entry["granted_s"], 1, level[entry["band"]]))
        events.append((entry["arrived_s"] + 0.02, 0, level[entry["band"]]))
    waiting: dict[int, int] = defaultdict(int)
    count = 0
    for _, kind, band in sorted(events):
        if kind == 0:
            waiting[band] += 1
        else:
            count += any(n > 0 for b, n in waiting.items() if b > band)
            waiting[band] -= 1
    return count


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0, help="length of each measured run")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    load = Load()
    rate = await capacity(load)
    print(f"fleet: {load.replicas} replicas x {load.batch} sequences at {load.speed:g} of real speed, "
          f"{rate:.1f} requests/s of {load.output_tokens_mean:.0f} tokens on average")  # fmt: skip
    await _priority(load, rate, options.seconds, options.seed)
    await _shares(load, rate, options.seconds, options.seed)


async def _priority(load: Load, rate: float, seconds: float, seed: int) -> None:
    critical = Source(0.2 * 2 * rate, "critical")
    others = [Source(0.6 * 2 * rate, "default"), Source(0.2 * 2 * rate, "sheddable")]
    rows = []
    for name, sources in (("critical alone", [critical]), ("20/60/20 at 2x", [critical, *others])):
        async with fleet([load.replica_flags()] * load.replicas, ["--queue-max-wait-s", "20"]) as running:
            await offer(running, load, sources, seconds, seed)
            exits = running.exits()
            wrong = inversions(exits, {"critical": 100, "default": 0, "sheddable": -100})
            for band in ("critical", "default", "sheddable"):
                mine = [e for e in exits if e["band"] == band]
                ttft = [e["ttft_s"] for e in mine if e.get("ttft_s") is not None]
                wait = [e["queue_wait_s"] for e in mine if e.get("ttft_s") is not None]
                if mine:
                    done = sum(e["outcome"] == "completed" for e in mine)
                    rows.append((name, band, len(mine), done, percentile(ttft, 0.5), percentile(ttft, 0.99),
                                 percentile(wait, 0.99), wrong))  # fmt: skip
    print("\n| run | band | offered | completed | TTFT p50 s | TTFT p99 s | queue wait p99 s | inversions |")
    print("| --- | --- | --: | --: | --: | --: | --: | --: |")
    for row in rows:
        print("| {} | {} | {} | {} | {:.3f} | {:.3f} | {:.3f} | {} |".format(*row))
    solo = next(row[5] for row in rows if row[0] == "critical alone")
    mixed = next(row[5] for row in rows if row[0] != "critical alone" and row[1] == "critical")
    print(f"\ncritical p99 TTFT: {mixed:.3f} s against {solo:.3f} s alone (x{mixed / solo:.2f})")
    print(bound_text(load, solo))


def bound_text(load: Load, solo_p99_s: float) -> str:
    """The model's bound: the solo figure, two steps of a full batch, and the wait for a slot.

    A replica of B sequences that take s seconds each frees a slot every s / B on average; 1 % of such exponential gaps
    exceed 4.6 of them. Who is let into the look-ahead waits for a slot of that one replica.
    """
    from llmproxy.lab.simulator.engine.profiles import profile_named

    profile = profile_named("llama-8b-h100")
    tokens = load.prompt_words * 3
    step_s = profile.step_s(load.batch, load.batch * tokens, [(0, tokens)]) / load.speed
    wait_s = 4.6 * load.output_tokens_mean * step_s / load.batch
    return (
        f"model bound: solo {solo_p99_s:.3f} + two steps of a full batch {2 * step_s:.3f} + p99 wait for a slot of one "
        f"replica {wait_s:.3f} = {solo_p99_s + 2 * step_s + wait_s:.3f} s"
    )


async def _shares(load: Load, rate: float, seconds: float, seed: int) -> None:
    sources = [Source(6.0 * rate, "default", "aggressor"), Source(0.6 * rate, "default", "victim")]
    print("\n| fairness | flow | offered/s | output tokens | share while both wait |")
    print("| --- | --- | --: | --: | --: |")
    for policy in ("fcfs", "fair_share"):
        flags = ["--fairness", policy, "--queue-max-wait-s", "15"]
        async with fleet([load.replica_flags()] * load.replicas, flags) as running:
            await offer(running, load, sources, seconds / 2, seed)
            exits = [e for e in running.exits() if e.get("granted_s") is not None]
            start = min(e["arrived_s"] for e in exits)
            both = [e for e in exits if start + 5.0 < e["granted_s"] < start + seconds / 2]
            total = sum(e.get("output_tokens", 0) for e in both)
            for source in sources:
                mine = sum(e.get("output_tokens", 0) for e in both if e["flow"] == source.flow)
                print(f"| {policy} | {source.flow} | {source.rate:.1f} | {mine} | {mine / total:.2f} |")


if __name__ == "__main__":
    asyncio.run(main())
