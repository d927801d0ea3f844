"""Replicas die, hang, become slow and come back under load: which requests notice, and how soon does the proxy?

Real processes: four simulated replicas, the proxy, and an open loop of streams. In each scenario something breaks after
some seconds of good health and is whole again later; the proxy is left alone. Run `python -m benchmarks.failover`; it
takes about three minutes. The goals: no request fails before its first byte; a stream that breaks after it (which only
its own replica could go on with) ends in exactly one error event; who is killed is found within 1 s, who is ten times
as slow within 5 s, and who hangs within 2 s of the first byte that it owes, or five times the 99th percentile of the
time to one; and requests take no more than 1.05 attempts each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from math import inf
from typing import Any

import aiohttp

from benchmarks.fleet import Fleet, fleet, value_of
from benchmarks.overload import percentile
from llmproxy.config.value_types import hash_of
from llmproxy.lab.simulator.server.metrics import unix_now_s

REPLICAS = 4
MODEL = "sim"
TOKENS = 96
REPLICA_FLAGS = ("--model", MODEL, "--profile", "llama-8b-h100", "--max-num-seqs", "16", "--speed", "0.4")
MESSAGES = [{"role": "user", "content": "Tell me how things break."}]
BODY = {"model": MODEL, "messages": MESSAGES, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
ADMIN_KEY = "for-the-rolling-restart"
PROXY_FLAGS = ("--admin-key", hash_of(ADMIN_KEY))
ATTEMPTS_MAX = 1.05
EVENTS = ("backend_ejected", "backend_back", "backend_down", "backend_up")
RESET_SHARE = 0.05
RESET_AFTER_BYTES = 4_000
"""About a third of an answer."""
AFTER_S = 6.0
"""How long the load goes on when all is well again."""
UP_S = 60.0
"""How long a process may take to be up again."""


@dataclass(slots=True)
class Seen:
    """What a client saw of one request; times are those of the loop, None for what never came."""

    sent_s: float
    first_byte_s: float | None = None
    backend: str | None = None
    whole: bool = False
    errors: int = 0
    detail: str = ""


@dataclass(slots=True)
class Run:
    """One scenario as it was. `broken_s` is when replica 0 broke, of the loop and of the clock that the log has."""

    seen: list[Seen] = field(default_factory=list)
    broken_s: float = inf
    healed_s: float = inf
    broken_unix_s: float = 0.0
    events: list[tuple[float, str]] = field(default_factory=list)
    retries: int = 0
    back_s: float | None = None

    def lost(self) -> list[Seen]:
        return [request for request in self.seen if request.first_byte_s is None]

    def cut(self) -> list[Seen]:
        return [request for request in self.seen if request.first_byte_s is not None and not request.whole]

    def ttft_before_s(self) -> float:
        """The 99th percentile of the time to the first byte of those that had it before anything broke."""
        before = [r.first_byte_s - r.sent_s for r in self.seen if r.first_byte_s and r.first_byte_s < self.broken_s]
        return percentile(before, 0.99)

    def ttft_after_s(self) -> float:
        """The same of those that were sent in the three seconds after."""
        after = [r for r in self.seen if self.broken_s <= r.sent_s < self.broken_s + 3.0]
        return percentile([r.first_byte_s - r.sent_s for r in after if r.first_byte_s], 0.99)

    @property
    def found_s(self) -> float | None:
        """When the proxy first knew, in seconds since it broke."""
        return next(
            (at_s for at_s, words in self.events if words.startswith(("backend_ejected", "backend_down"))), None
        )

    @property
    def attempts(self) -> float:
        """For each request."""
        return 1.0 + self.retries / len(self.seen)


@dataclass(slots=True)
class Stage:
    """The fleet that a scenario breaks, and the load on it while it does."""

    running: Fleet
    session: aiohttp.ClientSession
    run: Run
    rng: random.Random
    on_send: Callable[[], Awaitable[None]] | None = None

    def name(self, index: int) -> str:
        """What the proxy calls a replica."""
        return self.running.replica_urls[index].removeprefix("http://")

    def breaks(self) -> None:
        """Replica 0 is about to break."""
        self.run.broken_s, self.run.broken_unix_s = asyncio.get_running_loop().time(), unix_now_s()

    def heals(self) -> None:
        """What broke becomes whole now."""
        self.run.healed_s = asyncio.get_running_loop().time()

    async def fault(self, index: int, kind: str | None, **how: Any) -> None:
        url = self.running.replica_urls[index] + "/sim/fault"
        # A broken replica may close a kept connection, and a POST is not sent twice.
        close = {"connection": "close"}
        async with self.session.post(url, json={"kind": kind} | how, headers=close, raise_for_status=True):
            pass

    async def restart(self, index: int) -> None:
        """End what is left of a replica, start it anew, and wait until the proxy may give it work."""
        await self.running.replicas[index].stop(signal.SIGKILL)
        self.heals()
        await self.running.restart_replica(index)
        await self.metric_is("llmproxy_backend_available", index, 1.0)

    async def metric_is(self, series: str, index: int, value: float) -> None:
        async with asyncio.timeout(UP_S):
            while await self.metric(f'{series}{{backend="{self.name(index)}"}}') != value:  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.1)

    async def metric(self, series: str) -> float:
        async with self.session.get(self.running.url + "/metrics") as answer:
            found = value_of(await answer.text(), series)
        if found is None:
            raise RuntimeError(f"the proxy has no series {series}")
        return found

    async def admin(self, index: int, verb: str) -> None:
        url = f"{self.running.url}/admin/backends/{self.name(index)}/{verb}"
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        async with self.session.post(url, headers=headers, raise_for_status=True):
            pass


# --- what happens -----------------------------------------------------------------------------------------------------


async def killed(stage: Stage) -> None:
    stage.breaks()
    await stage.running.replicas[0].stop(signal.SIGKILL)
    await asyncio.sleep(3.0)
    await stage.restart(0)


async def stopped(stage: Stage) -> None:
    """SIGSTOP, and later SIGCONT: sockets accept, and nothing answers, polls included."""
    stage.breaks()
    stage.running.replicas[0].child.send_signal(signal.SIGSTOP)
    await asyncio.sleep(5.0)
    stage.heals()
    stage.running.replicas[0].child.send_signal(signal.SIGCONT)


def faulted(kind: str, lasts_s: float, *, restarted: bool = False, **how: Any) -> Callable[[Stage], Awaitable[None]]:
    """Replica 0 has a fault for so long, until it is taken away or the replica is started anew."""

    async def happens(stage: Stage) -> None:
        stage.breaks()
        await stage.fault(0, kind, **how)
        await asyncio.sleep(lasts_s)
        if restarted:
            await stage.restart(0)
        else:
            stage.heals()
            await stage.fault(0, None)

    return happens


async def resets(stage: Stage) -> None:
    """Of all streams, a share is reset in mid-answer, wherever it is."""

    async def reset_one() -> None:
        if stage.rng.random() < RESET_SHARE:
            await stage.fault(stage.rng.randrange(REPLICAS), "reset", after_bytes=RESET_AFTER_BYTES, times=1)

    stage.on_send = reset_one
    await asyncio.sleep(10.0)
    stage.on_send = None


async def flapping(stage: Stage) -> None:
    """Killed anew as soon as it is up again, three times."""
    stage.breaks()
    for _ in range(3):
        await stage.running.replicas[0].stop(signal.SIGKILL)
        await stage.restart(0)


async def rolling(stage: Stage) -> None:
    """Each in its turn: drained, ended once it is empty, started anew, given work again."""
    for index in range(REPLICAS):
        await stage.admin(index, "drain")
        await stage.metric_is("llmproxy_in_flight_requests", index, 0.0)
        await stage.running.replicas[index].stop(signal.SIGTERM)
        await stage.running.restart_replica(index)
        await stage.admin(index, "undrain")
        await stage.metric_is("llmproxy_backend_available", index, 1.0)


@dataclass(frozen=True, slots=True)
class Scenario:
    """`healthy_s` is how long all is well before; `found_within_s` is a goal, None where nothing is to be found."""

    name: str
    happens: Callable[[Stage], Awaitable[None]]
    found_within_s: float | None = None
    healthy_s: float = 3.0
    breaks_streams: bool = True


SCENARIOS = (
    Scenario("killed (`kill -9`)", killed, 1.0),
    Scenario("stopped (SIGSTOP, SIGCONT 5 s later)", stopped, 2.0, breaks_streams=False),
    # Polls are answered as ever, and no stream moves.
    Scenario("frozen, with /health 200", faulted("frozen", 5.0), 2.0, breaks_streams=False),
    # What vLLM does on SIGTERM: the port refuses, and open streams get no byte and no end.
    Scenario("hangs, as after SIGTERM", faulted("hang", 3.0, restarted=True), 2.0),
    # 500 for what is new under a `/health` that says 200.
    Scenario("drains, with /health 200", faulted("draining_500", 3.0, restarted=True), 1.0),
    # Slowness is measured against the time before, which takes ten observations of 0.8 s.
    Scenario("ten times as slow", faulted("slow", 8.0, factor=10), 5.0, healthy_s=14.0, breaks_streams=False),
    Scenario("5 % of streams reset in mid-answer", resets),
    Scenario("flapping: killed three times", flapping, 1.0),
    Scenario("rolling restart", rolling, breaks_streams=False),
)


# --- the load ---------------------------------------------------------------------------------------------------------


async def play(scenario: Scenario, rate: float, seed: int) -> Run:
    """Run one scenario on a fleet of its own, under `rate` streams per second."""
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        fleet([REPLICA_FLAGS] * REPLICAS, PROXY_FLAGS) as running,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        run = Run()
        stage = Stage(running, session, run, random.Random(seed))
        async with asyncio.TaskGroup() as clients:
            offering = clients.create_task(_offer(stage, rate, random.Random(seed + 1), clients))
            await asyncio.sleep(scenario.healthy_s)
            await scenario.happens(stage)
            await asyncio.sleep(AFTER_S)
            offering.cancel()
        run.retries = int(await stage.metric("llmproxy_retries_total"))
        if scenario.found_within_s is not None:
            run.events = _events(stage)
            times = (r.first_byte_s for r in run.seen if r.backend == stage.name(0) and r.first_byte_s)
            run.back_s = min((at - run.healed_s for at in times if at > run.healed_s), default=None)
    return run


def _events(stage: Stage) -> list[tuple[float, str]]:
    """What the log says of replica 0 since it broke, and how long after that."""
    found = []
    for line in stage.running.proxy.log.read_text(errors="replace").splitlines():
        entry = json.loads(line) if line.startswith("{") else {}
        if entry.get("event") in EVENTS and entry["backend"] == stage.name(0):
            at_s = datetime.fromisoformat(entry["timestamp"]).timestamp() - stage.run.broken_unix_s
            found.append((at_s, f"{entry['event']} {entry.get('why', '')}".strip()))
    return [(at_s, words) for at_s, words in found if at_s >= 0.0]


async def _offer(stage: Stage, rate: float, rng: random.Random, clients: asyncio.TaskGroup) -> None:
    loop = asyncio.get_running_loop()
    at_s = loop.time()
    while True:
        at_s += rng.expovariate(rate)
        await asyncio.sleep(at_s - loop.time())
        if stage.on_send is not None:
            await stage.on_send()
        seen = Seen(loop.time())
        stage.run.seen.append(seen)
        clients.create_task(_one(seen, stage.session, stage.running.url))


async def _one(seen: Seen, session: aiohttp.ClientSession, url: str) -> None:
    loop = asyncio.get_running_loop()
    data = b""
    try:
        async with asyncio.timeout(45.0), session.post(url + "/v1/chat/completions", json=BODY) as answer:
            seen.backend = answer.headers.get("x-llmproxy-backend")
            if answer.status != 200:
                seen.detail = f"{answer.status} {(await answer.text())[:200]}"
                return
            async for piece in answer.content.iter_any():
                seen.first_byte_s = seen.first_byte_s or loop.time()
                data += piece
    except (aiohttp.ClientError, TimeoutError) as error:
        seen.detail = f"{type(error).__name__}: {error}"
    seen.errors = sum(event.startswith(b'data: {"error"') for event in data.split(b"\n\n"))
    seen.whole = data.endswith(b"data: [DONE]\n\n") and not seen.errors and not seen.detail
    if not seen.whole and not seen.detail:
        seen.detail = data.strip().rpartition(b"\n\n")[2].decode(errors="replace")


# --- the table --------------------------------------------------------------------------------------------------------

HEAD = (
    "| scenario | requests | lost before the first byte | broken after it | of these with one error event "
    "| found after s | attempts for each request "
    "| TTFT p99 before s | TTFT p99 of the 3 s after s | load again after s |"
)


def row(scenario: Scenario, run: Run) -> str:
    one_error = sum(request.errors == 1 for request in run.cut())
    cells = [scenario.name, len(run.seen), len(run.lost()), len(run.cut()), one_error]
    if scenario.found_within_s is None:
        cells += ["–", f"{run.attempts:.3f}", f"{run.ttft_before_s():.3f}", "–", "–"]
    else:
        found, back = ("never" if at_s is None else f"{at_s:.2f}" for at_s in (run.found_s, run.back_s))
        cells += [found, f"{run.attempts:.3f}", f"{run.ttft_before_s():.3f}", f"{run.ttft_after_s():.3f}", back]
    return f"| {' | '.join(map(str, cells))} |"


def missed(scenario: Scenario, run: Run) -> list[str]:
    """The goals that were not reached."""
    problems = [f"lost: {request.detail}" for request in run.lost()]
    cut = run.cut()
    problems += [f"{request.errors} error events: {request.detail}" for request in cut if request.errors != 1]
    if cut and not scenario.breaks_streams:
        problems.append(f"{len(cut)} streams broke: {cut[0].detail}")
    if run.attempts > ATTEMPTS_MAX:
        problems.append(f"{run.attempts:.3f} attempts for each request")
    if scenario.found_within_s is not None:
        goal_s, found_s = scenario.found_within_s, run.found_s
        silent = re.search(r"silent for (\S+) s", run.events[0][1]) if run.events else None
        if silent is not None:
            # A silent replica cannot be found before it owes a byte.
            goal_s, found_s = max(goal_s, 5.0 * run.ttft_before_s()), float(silent[1])
        if found_s is None or found_s > goal_s:
            problems.append(f"found after {found_s} s, not within {goal_s:.1f} s")
        if run.back_s is None:
            problems.append("never given work again")
    return problems


async def main() -> int:
    """Print one row for each scenario, and what the log said. 1 when a goal was not reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=16.0, help="streams per second")
    parser.add_argument("--only", default="", help="those scenarios whose name has this in it")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    print(f"{options.rate:g} streams/s of {TOKENS} tokens on {REPLICAS} replicas\n\n{HEAD}\n| --- |" + " --: |" * 9)
    events, problems = [], []
    for scenario in SCENARIOS:
        if options.only not in scenario.name:
            continue
        run = await play(scenario, options.rate, options.seed)
        print(row(scenario, run), flush=True)
        if run.events:
            events.append(f"{scenario.name}: " + "; ".join(f"{at_s:.2f} s {words}" for at_s, words in run.events))
        problems += [f"MISSED {scenario.name}: {problem}" for problem in missed(scenario, run)]
    print("\n" + "\n".join(events + problems))
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
