"""Replicas fail under open streams: broken streams, wrong texts, and the pause that clients see.

    python -m benchmarks.continued [--only killed] [--times 20] [--results FILE]

The fleet has three simulated replicas with numbered words, a proxy with its defaults, and 60 clients. Each client keeps
one stream open: chat and completions, with and without usage and token ids. In each scene a replica fails several
times, half of the times with `retry.continue: off`, in alternation. Every text is checked token by token. Each fault
and each failed stream is printed at once, the stream with the proxy's log line. With `--results`, the rounds are kept
in a file, and a later run continues after the last round. The exit status is 1 if a stream broke or a text was wrong
while the proxy continued streams.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from msgspec import Struct, json

from benchmarks.faults import Fault, broken, drained, killed, restart, stopped
from benchmarks.fleet import WITH_ADMIN, Fleet, fleet
from benchmarks.load import percentile
from benchmarks.table import Table
from llmproxy.lab.simulator.server.text import tokens_of
from tests.numbered import fault_in

REPLICAS, CLIENTS = 3, 60
FLAGS = ("--model", "sim", "--text", "numbered", "--speed", "0.4")
TOKENS = range(155, 401, 7)
"""The lengths of the answers. A numbered text of such a length does not end inside a character."""
DEADLINE_S = 2  # The seconds between a drain and the end of the replica, or of its streams.
GAP_S = 1.0  # The seconds between two faults.
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USAGE = {"stream_options": {"include_usage": True}}
KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {}),
    (CHAT, USAGE),
    (COMPLETIONS, {}),
    (COMPLETIONS, USAGE),
    (COMPLETIONS, USAGE | {"return_token_ids": True}),
)


@dataclass(slots=True, eq=False)
class Stream:
    """A stream as its client saw it. Times are seconds of the event loop."""

    path: str
    asked: dict[str, Any]
    request_id: str = ""
    backend: str = ""
    status: int = 0
    last_s: float = inf
    gap_s: float = 0.0
    """The longest time between two pieces of the answer."""
    hit: bool = False
    """Whether the stream was open on a replica that failed."""
    body: bytes = b""
    why: str = ""
    """How the stream failed; "" if it was complete and correct."""

    @property
    def continued(self) -> bool:
        return b": continued\n\n" in self.body

    def judge(self) -> None:
        """Sets `why`: the stream must look as if no replica had failed."""
        if self.why:
            return
        lines = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        events = [orjson.loads(line) for line in lines if line != b"[DONE]"]
        if self.status != 200 or any("error" in event for event in events):
            self.why = f"broken: {self.status} {self.body[-200:].decode(errors='replace')}"
        else:
            self.why = self._wrong(events, lines.count(b"[DONE]"))

    def _wrong(self, events: list[Any], done: int) -> str:
        choices = [choice for event in events for choice in event["choices"]]
        text = "".join(choice.get("text", choice.get("delta", {}).get("content", "")) or "" for choice in choices)
        roles = sum("role" in choice.get("delta", ()) for choice in choices)
        ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        tokens, usage = self.asked["max_tokens"], [event["usage"] for event in events if event.get("usage")]
        if ends == ["abort"]:
            return "broken: finish_reason abort"
        if (fault := fault_in(text)) is not None:
            return f"wrong: {fault}"
        seen = {
            "tokens": (len(tokens_of(text)), tokens),
            "roles": (roles, int(self.path == CHAT)),
            "ends": (ends, ["length"]),
            "done": (done, 1),
            "ids": (len({event["id"] for event in events}), 1),
            "usage": ([one["completion_tokens"] for one in usage], [tokens] if "stream_options" in self.asked else []),
            "sum": (all(one["total_tokens"] == tokens + one["prompt_tokens"] for one in usage), True),
        }
        return "; ".join(
            f"wrong {name}: {found}, not {right}" for name, (found, right) in seen.items() if found != right
        )


class Clients:
    """Clients that each keep one stream open."""

    def __init__(self, running: Fleet, seed: int) -> None:
        self._running, self._rng = running, random.Random(seed)
        self.open: set[Stream] = set()
        self.seen: list[Stream] = []
        self.faults: list[tuple[float, str]] = []
        """The time and the replica of each fault. The time is on the event loop's clock, as in the proxy's log."""
        self._over = False
        self._tasks = [asyncio.create_task(self._one_after_another(KINDS[i % len(KINDS)])) for i in range(CLIENTS)]

    async def ended(self) -> None:
        """Sends no more requests, and waits until all open requests have ended."""
        self._over = True
        await asyncio.gather(*self._tasks)

    def hit(self, index: int) -> None:
        """Notes the open streams of a replica that fails now."""
        name = self._running.name(index)
        self.faults.append((asyncio.get_running_loop().time(), name))
        hit = [stream for stream in self.open if stream.backend == name]
        for stream in hit:
            stream.hit = True
        print(f"{time.strftime('%T')} {name} fails, {len(hit)} of {len(self.open)} streams began there", flush=True)

    async def _one_after_another(self, kind: tuple[str, dict[str, Any]]) -> None:
        while not self._over:
            stream = await self._ask(*kind)
            if stream.why:
                await asyncio.sleep(0.2)

    async def _ask(self, path: str, more: dict[str, Any]) -> Stream:
        loop, rng = asyncio.get_running_loop(), self._rng
        prompt = f"{rng.randrange(10**9)} Count, please: é " + "word " * rng.randint(5, 200)
        content = {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
        asked = {"model": "sim", "stream": True, "max_tokens": rng.choice(TOKENS), "ignore_eos": True}
        stream = Stream(path, asked | content | more)
        pieces: list[bytes] = []
        try:
            async with (
                asyncio.timeout(120.0),
                self._running.session.post(self._running.url + path, json=stream.asked) as answer,
            ):
                stream.status, stream.backend = answer.status, answer.headers.get("x-llmproxy-backend", "")
                stream.request_id = answer.headers["x-request-id"]
                self.open.add(stream)
                async for piece in answer.content.iter_any():
                    now = loop.time()
                    stream.gap_s = max(stream.gap_s, now - stream.last_s)
                    stream.last_s = now
                    pieces.append(piece)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            stream.why = f"broken: {type(error).__name__} {error}"
        self.open.discard(stream)
        stream.body = b"".join(pieces)
        stream.judge()
        self.seen.append(stream)
        return stream


# --- scenes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """A running fleet and its clients."""

    running: Fleet
    clients: Clients

    async def available(self, index: int) -> None:
        await self.running.becomes(f'llmproxy_backend_available{{backend="{self.running.name(index)}"}}', 1.0)

    async def start(self, index: int, *, drained: bool = False) -> None:
        await restart(self.running, index)
        if drained:
            await self.running.admin(index, "undrain")
        await self.available(index)


def during(fault: Fault, lasts_s: float, *, at_once: bool = True) -> Callable[[Run, int], Awaitable[None]]:
    """Returns a scene in which a replica has a fault. `at_once`: the fault hits all streams that are open there."""

    async def happens(run: Run, index: int) -> None:
        if at_once:
            run.clients.hit(index)
        async with fault(run.running, index):
            await asyncio.sleep(lasts_s)
        await run.available(index)

    return happens


async def drained_and_killed(run: Run, index: int) -> None:
    async with drained(run.running, index):
        await asyncio.sleep(DEADLINE_S)
        run.clients.hit(index)
        async with killed(run.running, index):
            await asyncio.sleep(3.0)
    await run.available(index)


async def drained_with_deadline(run: Run, index: int) -> None:
    """Drains a replica with `?deadline_s=`, and ends it when its streams have moved."""
    await run.running.admin(index, f"drain?deadline_s={DEADLINE_S}")
    await asyncio.sleep(DEADLINE_S - 0.1)
    run.clients.hit(index)
    await asyncio.sleep(1.1)
    await run.running.replicas[index].stop(signal.SIGKILL)
    await asyncio.sleep(2.0)
    await run.start(index, drained=True)


async def ended(run: Run, index: int) -> None:
    """Sends SIGTERM to a replica. Its flag `--shutdown` decides about open streams."""
    run.clients.hit(index)
    await run.running.replicas[index].stop()
    await asyncio.sleep(3.0)
    await run.start(index)


async def rolled(run: Run, _: int) -> None:
    """Restarts all replicas, each as soon as the previous one is back."""
    for index in range(REPLICAS):
        run.clients.hit(index)
        await run.running.replicas[index].stop()
        await run.start(index)


async def rolled_after_drains(run: Run, _: int) -> None:
    """Restarts all replicas as `rolled` does, but drains each first, as discovery does before Kubernetes ends a pod."""
    for index in range(REPLICAS):
        await run.running.admin(index, "drain")
        run.clients.hit(index)
        await run.running.replicas[index].stop()
        await run.start(index, drained=True)


@dataclass(frozen=True, slots=True)
class Scene:
    name: str
    happens: Callable[[Run, int], Awaitable[None]]
    flags: tuple[str, ...] = ()
    share: float = 1.0
    """The share of `--times` for which the scene is repeated; less than 1 for scenes that take longer."""


TEN_ERRORS = broken("stream_error", after_tokens=50, times=10)
"""Gives each of the next ten streams of a replica an error event after 50 tokens."""
MODES = ("off", "safe")
SCENES = (
    Scene("killed (`kill -9`)", during(killed, 3.0)),
    Scene("stopped (SIGSTOP, SIGCONT 6 s later)", during(stopped(), 6.0)),
    Scene("drained, killed 2 s later", drained_and_killed),
    Scene("drained with `deadline_s=2`", drained_with_deadline),
    Scene("error event in mid-stream", during(TEN_ERRORS, 5.0, at_once=False)),
    Scene("engine dead", during(broken("engine_dead", restarted=True), 3.0)),
    Scene("SIGTERM, finish reason `abort`", ended, ("--shutdown", "abort")),
    Scene("rolling restart, streams cut", rolled, share=0.25),
    Scene("rolling restart, drained, streams cut", rolled_after_drains, share=0.25),
    Scene("rolling restart, `abort`", rolled, ("--shutdown", "abort"), 0.25),
    Scene("rolling restart, streams hang", rolled, ("--shutdown", "hang"), 0.25),
)


class Round(Struct):
    """The streams of a fleet on which a scene happened `times` times."""

    scene: str
    mode: str
    turn: int
    times: int
    streams: int
    hit: int
    continued: int
    gaps_s: list[float]
    """The longest pause of each stream that was hit and did not fail, in seconds."""
    failed: list[str]


async def play(scene: Scene, mode: str, turn: int, times: int, seed: int) -> Round:
    """Starts a fleet, plays the scene `times` times, and returns the figures of its streams.

    `mode` is `retry.continue`.
    """
    settings = WITH_ADMIN | ({} if mode == "safe" else {"retry": {"continue": mode}})
    async with fleet([(*FLAGS, *scene.flags)] * REPLICAS, settings=settings) as running:
        run = Run(running, Clients(running, seed + turn))
        await asyncio.sleep(4.0)
        for number in range(times):
            await scene.happens(run, number % REPLICAS)
            await asyncio.sleep(GAP_S)
        await run.clients.ended()
        await asyncio.sleep(0.1)
        seen, log = run.clients.seen, {entry["request_id"]: entry for entry in running.exits()}
        failed = [explained(stream, log.get(stream.request_id), run.clients.faults) for stream in seen if stream.why]
    hit = [stream for stream in seen if stream.hit or stream.continued or stream.why]
    gaps_s = [stream.gap_s for stream in hit if not stream.why]
    continued = sum(stream.continued for stream in hit)
    return Round(scene.name, mode, turn, times, len(seen), len(hit), continued, gaps_s, failed)


def explained(stream: Stream, entry: dict[str, Any] | None, faults: list[tuple[float, str]]) -> str:
    """Returns how a stream failed, its line in the proxy's log, and the faults while it was open."""
    if entry is None:
        return f"{stream.why[:160]}; {stream.request_id or 'no head'}: no log line"
    begun_s = entry["arrived_s"]
    during = [f"{at_s - begun_s:.2f} s: {name}" for at_s, name in faults if 0 <= at_s - begun_s <= entry["duration_s"]]
    return (
        f"{stream.why[:160]}; {stream.request_id}: {entry.get('attempts', 0)} attempts, first {stream.backend}, last "
        f"{entry.get('backend')}, {entry['duration_s']:.2f} s; faults meanwhile {during}; "
        f"not continued: {entry.get('not_continued')}; log: {entry.get('error')}"
    )


def row(table: Table, name: str, mode: str, rounds: list[Round]) -> None:
    """Prints the figures of a scene."""
    failed = [why for one in rounds for why in one.failed]
    broken = sum(why.startswith("broken") for why in failed)
    gaps_s = [gap_s for one in rounds for gap_s in one.gaps_s]
    spread = [percentile(gaps_s, share) for share in (0.5, 0.9, 0.99)] + [max(gaps_s, default=float("nan"))]
    counts = [sum(getattr(one, each) for one in rounds) for each in ("times", "streams", "hit", "continued")]
    table.row(name, mode, *counts, broken, len(failed) - broken, *(f"{gap_s:.2f}" for gap_s in spread))


async def main() -> int:
    """Prints faults, and then a row for each scene and mode.

    Returns 1 if a stream failed although the proxy continues streams.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--times", type=int, default=20, help="faults in each scene and mode; fewer in rolling restarts"
    )
    parser.add_argument("--rounds", type=int, default=4, help="how often the modes alternate")
    parser.add_argument("--only", default="", help="parts of scenes' names, with commas")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--results", type=Path, help="file for the rounds; rounds in the file are not played again")
    parser.add_argument("--minutes", type=float, default=inf, help="begin no round after this time")
    options = parser.parse_args()
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    lines = options.results.read_bytes().splitlines() if options.results and options.results.exists() else []
    played, until_s = [json.decode(line, type=Round) for line in lines], time.monotonic() + 60.0 * options.minutes
    scenes = [scene for scene in SCENES if any(part in scene.name for part in options.only.split(","))]
    for scene in scenes:
        times = max(1, round(scene.share * options.times))
        rounds = min(options.rounds, times)
        for turn in range(rounds):
            for mode in MODES:
                known = any((one.scene, one.mode, one.turn) == (scene.name, mode, turn) for one in played)
                if known or time.monotonic() > until_s:
                    continue
                here = times // rounds + (turn < times % rounds)
                print(f"{scene.name}, {mode}, round {turn + 1} of {rounds}", flush=True)
                one = await play(scene, mode, turn, here, options.seed)
                print("\n".join(one.failed[: None if mode == "safe" else 1]), flush=True)
                played.append(one)
                if options.results:
                    with options.results.open("ab") as file:
                        file.write(json.encode(one) + b"\n")
    print()
    columns = ("times", "streams", "hit", "continued", "broken", "wrong", "gap s, p50", "p90", "p99", "longest")
    table = Table("scene", "`retry.continue`", *columns, texts=2)
    for scene in scenes:
        for mode in MODES:
            own = [one for one in played if (one.scene, one.mode) == (scene.name, mode)]
            if own:
                row(table, scene.name, mode, own)
    failed = [why for one in played if one.mode == "safe" for why in one.failed]
    print("\n" + "\n".join(failed))
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
