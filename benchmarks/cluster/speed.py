"""The cost of the additional hop from a follower to the leader: TTFT and CPU time."""

from __future__ import annotations

import asyncio
import json
import tempfile
from asyncio.subprocess import PIPE
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cluster.load import Load
from benchmarks.cluster.rig import Member, Rig, rig
from benchmarks.load import first_s
from benchmarks.peers.cases import CASES
from benchmarks.peers.measure import built
from benchmarks.proxy import Child, cpu_s
from benchmarks.table import Table

ROUNDS = 7
ONE_BY_ONE = 150
WINDOW_S = 3.0
IDLE_S = 5.0
PLACES = 4096
CLIENTS = 32
JSON = next(case for case in CASES if case.name == "json64")


@asynccontextmanager
async def cheap_replicas(folder: Path) -> AsyncIterator[list[str]]:
    """Runs two replicas that take nearly no CPU time, during the block."""
    mock = Child([str(built("mockd")), "2"], range(64), folder / "mock.log", piped=True)
    try:
        yield [f"http://127.0.0.1:{port}" for port in mock.line().split()]
    finally:
        mock.stop()


async def speed() -> None:
    """Measures in turns a proxy without a cluster, a leader and a follower, and prints the figures."""
    with tempfile.TemporaryDirectory(prefix="llmproxy-cluster-") as folder:
        files = JSON.requests(Path(folder))
        async with (
            cheap_replicas(Path(folder)) as replicas,
            rig(2, replicas=replicas, places=PLACES, forwarded=False) as made,
            rig(1, clustered=False, replicas=replicas, places=PLACES) as alone,
        ):
            leader = await made.leader()
            (follower,) = [one for one in made.members if one is not leader]
            places = {"alone": alone.members[0], "leader": leader, "follower": follower}
            await _first_byte(made, places)
            await _cpu(places, files)


async def _first_byte(made: Rig, places: Mapping[str, Member]) -> None:
    firsts = defaultdict[str, list[float]](list)
    for number in range(ROUNDS + 1):
        for name in list(places)[:: 1 if number % 2 else -1]:
            load = Load(made.session, (1,), "mock")
            load.add([places[name]], 1)
            while len(load.seen) < ONE_BY_ONE:  # noqa: ASYNC110 - requests have no common event
                await asyncio.sleep(0.01)
            await load.ended()
            if number:  # The first round warms up.
                firsts[name].append(1e3 * first_s(load.seen, 0.5))
    table = Table("by", "TTFT p50, ms", "more than alone", "more than by the leader")
    for name, times in firsts.items():
        more = [_range([a - b for a, b in zip(times, firsts[base], strict=True)]) for base in ("alone", "leader")]
        table.row(name, _range(times), *more)
    print()


async def _cpu(places: Mapping[str, Member], files: Sequence[Path]) -> None:
    """Prints the CPU time of a request, with CLIENTS requests at once, without the CPU time of polls."""
    before = {name: cpu_s([one.pid]) for name, one in places.items()}
    await asyncio.sleep(IDLE_S)
    idle = {name: (cpu_s([one.pid]) - before[name]) / IDLE_S for name, one in places.items()}
    found = {by: defaultdict[str, list[float]](list) for by in places}
    rates = defaultdict[str, list[float]](list)
    for number in range(ROUNDS):
        for by in list(places)[:: 1 if number % 2 else -1]:
            window, used = await _loaded(places[by], files, places)
            rates[by].append(window["requests"] / window["window_s"])
            for name, spent_s in used.items():
                spent_s -= idle[name] * window["window_s"]
                found[by][name].append(1e6 * spent_s / window["requests"])
    hop = [sum(found["follower"][name][at] for name in ("follower", "leader")) - found["alone"]["alone"][at]
           for at in range(ROUNDS)]  # fmt: skip
    table = Table("by", "requests/s", "CPU of that process per request, µs", "of the leader")
    for by in places:
        table.row(by, _range(rates[by], 0), _range(found[by][by], 0), _range(found[by]["leader"], 0))
    print(f"\nLeader and follower together, beyond a proxy without a cluster: {_range(hop, 0)} µs.\n", flush=True)


async def _loaded(
    to: Member, files: Sequence[Path], members: Mapping[str, Member]
) -> tuple[dict[str, Any], dict[str, float]]:
    """Returns the figures of the load generator, and the CPU seconds of `members` during the load."""
    flags = {"p": to.port, "c": CLIENTS, "r": 0, "a": JSON.ramp_s, "w": JSON.warmup_s, "s": WINDOW_S}
    words = [word for name, value in flags.items() for word in (f"-{name}", str(value))]
    load = await asyncio.create_subprocess_exec(built("loadgen"), *words, *files, stdout=PIPE)
    assert load.stdout is not None
    try:
        used = []
        for moment in (b"begin", b"end"):
            assert (await load.stdout.readline()).strip() == moment
            used.append({name: cpu_s([one.pid]) for name, one in members.items()})
        window: dict[str, Any] = json.loads(await load.stdout.readline())
    finally:
        if load.returncode is None:
            load.kill()
        await load.wait()
    if window["failures"]:
        raise RuntimeError(f"failed: {window['failures']}")
    return window, {name: used[1][name] - used[0][name] for name in members}


def _range(values: Sequence[float], digits: int = 2) -> str:
    """Returns the median, the smallest and the largest value as text."""
    return f"{median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"
