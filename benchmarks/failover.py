"""One of three replicas dies under load: which requests notice, and when does it take load again once it is back?

Real processes: simulated replicas, the proxy, and an open loop of streams. In each scenario replica 0 breaks after a
few seconds and is later started anew on its old port; the proxy is left alone. Run `python -m benchmarks.failover`; it
takes about 40 seconds. The goal is that no request fails before its first byte. Streams whose replica dies after that
cannot be saved: the client has part of an answer that only that replica could go on with.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp

from benchmarks.fleet import Fleet, fleet, is_whole, value_of
from benchmarks.overload import percentile

MODEL = "sim"
TOKENS = 48
REPLICA_FLAGS = ("--model", MODEL, "--profile", "llama-8b-h100", "--max-num-seqs", "16", "--speed", "0.5")
BODY = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell me how things break."}],
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "stream": True,
}


@dataclass(frozen=True, slots=True)
class Plan:
    """`rate` is requests per second; the others are seconds from the start of the load."""

    rate: float
    break_s: float
    restart_s: float
    end_s: float


@dataclass(slots=True)
class Seen:
    """What a client saw of one request; times are those of the loop, None for what never came."""

    sent_s: float
    first_byte_s: float | None = None
    backend: str | None = None
    whole: bool = False
    story: str = ""


@dataclass(slots=True)
class Run:
    """One scenario as it was; `hit` counts the requests that `backend` had when it broke."""

    backend: str
    seen: list[Seen] = field(default_factory=list)
    broken_s: float = 0.0
    hit: int = 0
    restarted_s: float = 0.0
    retries: int = 0

    def failed(self) -> list[Seen]:
        return [request for request in self.seen if request.first_byte_s is None]

    def cut(self) -> list[Seen]:
        return [request for request in self.seen if request.first_byte_s is not None and not request.whole]

    def ttft_s(self, begin_s: float, end_s: float, share: float) -> float:
        """A percentile of the time to the first byte, of requests sent between two instants."""
        waits = [r.first_byte_s - r.sent_s for r in self.seen if r.first_byte_s and begin_s <= r.sent_s < end_s]
        return percentile(waits, share)

    def back_s(self) -> float | None:
        """Time from the start of the new process to the first byte that it sent to a client."""
        times = (r.first_byte_s for r in self.seen if r.backend == self.backend and r.first_byte_s)
        return min((at - self.restarted_s for at in times if at > self.restarted_s), default=None)


# --- ways to break ----------------------------------------------------------------------------------------------------


async def kill(running: Fleet, _: aiohttp.ClientSession) -> None:
    await running.replicas[0].stop(signal.SIGKILL)


def fault(kind: str) -> Callable[[Fleet, aiohttp.ClientSession], Awaitable[None]]:
    async def switch_on(running: Fleet, session: aiohttp.ClientSession) -> None:
        async with session.post(running.replica_urls[0] + "/sim/fault", json={"kind": kind}, raise_for_status=True):
            pass

    return switch_on


SCENARIOS = {
    "kill -9": kill,
    "hangs, as after SIGTERM": fault("hang"),
    "drains, with /health 200": fault("draining_500"),
}


# --- the load ---------------------------------------------------------------------------------------------------------


async def scenario(plan: Plan, breaks: Callable[[Fleet, aiohttp.ClientSession], Awaitable[None]], seed: int) -> Run:
    """Run one scenario on a fleet of its own."""
    loop = asyncio.get_running_loop()
    connector = aiohttp.TCPConnector(limit=0)
    async with fleet(3, REPLICA_FLAGS) as running, aiohttp.ClientSession(connector=connector) as session:
        run = Run(running.replica_urls[0].removeprefix("http://"))
        start_s = loop.time()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_offer(run, plan, session, running.url, random.Random(seed), tasks))
            await asyncio.sleep(plan.break_s)
            run.hit = int(await _metric(session, running, f'llmproxy_in_flight_requests{{backend="{run.backend}"}}'))
            run.broken_s = loop.time()
            await breaks(running, session)
            await asyncio.sleep(start_s + plan.restart_s - loop.time())
            await running.replicas[0].stop(signal.SIGKILL)
            run.restarted_s = loop.time()
            await running.restart_replica(0)
        run.retries = int(await _metric(session, running, "llmproxy_retries_total"))
    return run


async def _offer(
    run: Run, plan: Plan, session: aiohttp.ClientSession, url: str, rng: random.Random, tasks: asyncio.TaskGroup
) -> None:
    loop = asyncio.get_running_loop()
    start_s = at_s = loop.time()
    while (at_s := at_s + rng.expovariate(plan.rate)) < start_s + plan.end_s:
        await asyncio.sleep(at_s - loop.time())
        seen = Seen(loop.time())
        run.seen.append(seen)
        tasks.create_task(_one(seen, session, url))


async def _one(seen: Seen, session: aiohttp.ClientSession, url: str) -> None:
    loop = asyncio.get_running_loop()
    data = b""
    try:
        async with asyncio.timeout(30.0), session.post(url + "/v1/chat/completions", json=BODY) as answer:
            seen.backend = answer.headers.get("x-llmproxy-backend")
            if answer.status != 200:
                seen.story = f"{answer.status} {(await answer.text())[:200]}"
                return
            async for piece in answer.content.iter_any():
                seen.first_byte_s = seen.first_byte_s or loop.time()
                data += piece
    except (aiohttp.ClientError, TimeoutError) as error:
        seen.story = f"{type(error).__name__}: {error}"
        return
    seen.whole = is_whole(data, stream=True)
    seen.story = "" if seen.whole else data.strip().rpartition(b"\n\n")[2].decode(errors="replace")


async def _metric(session: aiohttp.ClientSession, running: Fleet, series: str) -> float:
    async with session.get(running.url + "/metrics") as answer:
        value = value_of(await answer.text(), series)
    if value is None:
        raise RuntimeError(f"the proxy has no series {series}")
    return value


# --- the story --------------------------------------------------------------------------------------------------------

HEAD = (
    "| scenario | requests | on the replica | failed before the first byte | broken after it | retries "
    "| TTFT p99 before s | TTFT p99 of the 2 s after s | load again after s |"
)


def row(name: str, run: Run) -> str:
    before, after = run.ttft_s(0.0, run.broken_s, 0.99), run.ttft_s(run.broken_s, run.broken_s + 2.0, 0.99)
    back_s = run.back_s()
    back = "never" if back_s is None else f"{back_s:.2f}"
    return (
        f"| {name} | {len(run.seen)} | {run.hit} | {len(run.failed())} | {len(run.cut())} | {run.retries} "
        f"| {before:.3f} | {after:.3f} | {back} |"
    )


async def main() -> int:
    """Print one row for each scenario. 1 when a request failed before its first byte, or a replica never came back."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=60.0, help="streams per second")
    parser.add_argument("--seconds", type=float, default=11.0, help="length of each scenario")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    plan = Plan(options.rate, options.seconds * 0.25, options.seconds * 0.55, options.seconds)
    print(f"{plan.rate:g} streams/s of {TOKENS} tokens on 3 replicas; replica 0 breaks at {plan.break_s:.1f} s, "
          f"is started again at {plan.restart_s:.1f} s\n")  # fmt: skip
    print(HEAD)
    print("| --- |" + " --: |" * 8)
    stories: list[str] = []
    bad = False
    for name, breaks in SCENARIOS.items():
        run = await scenario(plan, breaks, options.seed)
        print(row(name, run), flush=True)
        stories += [f"{name}: {request.story}" for request in (*run.failed(), *run.cut()[:1])]
        bad = bad or bool(run.failed()) or run.back_s() is None
    print("\n" + "\n".join(stories))
    return int(bad)


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
