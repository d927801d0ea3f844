"""Kills the leader of a pool with its own lock, and measures the clients of this pool and of another pool."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median

from benchmarks.cluster.load import Load, now
from benchmarks.cluster.rig import REPLICA_FLAGS, Member, Rig, rig
from benchmarks.fleet import free_port, start

CLIENTS = 5
"""Of each member and model: three members have 15 of each, for 8 places."""
OWN, OTHER = "code", "chat"
AFTER_S = 6.0


@asynccontextmanager
async def replicas_of(*models: str) -> AsyncIterator[list[str]]:
    """The URL of one simulated replica for each model."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llmproxy-cluster-")))
        urls = []
        for model in models:
            port = free_port()
            flags = ["replica", "--port", str(port), *REPLICA_FLAGS, "--model", model]
            process = await start(flags, folder / f"{model}.log")
            stack.push_async_callback(process.stop, signal.SIGKILL)
            urls.append(f"http://127.0.0.1:{port}")
        yield urls


async def pools(times: int) -> None:
    """kill -9 of the leader of one of two pools."""
    print("| kill | pool of the leader: gap, s | not served | served | other pool: gap, s | not served | served |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    gaps: dict[str, list[float]] = {OWN: [], OTHER: []}
    async with replicas_of(OWN, OTHER) as urls, rig(3, "--cluster-pools", OWN, replicas=urls) as made:
        loads = {model: Load(made.session, model=model) for model in gaps}
        watching = asyncio.create_task(made.watch_replicas())
        clients = [asyncio.create_task(load.clients(made.members, CLIENTS)) for load in loads.values()]
        for number in range(times):
            leader = await _apart(made)
            others = [one.name for one in made.members if one is not leader]
            killed_s = now()
            leader.kill()
            await asyncio.sleep(AFTER_S)
            cells = []
            for model, load in loads.items():
                gaps[model].append(load.gap_s(others, killed_s - 1.0, now()))
                seen = load.outcomes(*others, since_s=killed_s)
                bad = Counter({name: number for name, number in seen.items() if name != "ok"})
                cells.append(f"{gaps[model][-1]:.2f} | {bad.total()} | {seen['ok']}")
            print(f"| {number + 1} | {' | '.join(cells)} |", flush=True)
            await leader.start_again()
        for load in loads.values():
            load.end()
        await asyncio.wait_for(asyncio.gather(*clients, return_exceptions=True), 60.0)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        print(f"\nLooks with more than a replica may have: {len(made.over)} of {made.looks}.")
    for model, seen_s in gaps.items():
        which = "The pool of the leader that was killed" if model == OWN else "The other pool"
        print(f"{which}: gap median {median(seen_s):.2f} s, at most {max(seen_s):.2f} s.")
    print()


async def _apart(made: Rig) -> Member:
    """The leader of the pool with a lock of its own, once all follow it and another one leads the rest."""
    async with asyncio.timeout(60.0):
        while True:
            pages = [await made.status(one) for one in made.members]
            whole = [page for page in pages if page is not None and _sees_all(page, made.members)]
            led = {(page["leader"], page["pools"][OWN]["leader"]) for page in whole}
            if len(whole) == len(made.members) and len(led) == 1:
                rest, own = led.pop()
                if None not in (rest, own) and rest != own:
                    return next(one for one in made.members if one.name == own)
            await asyncio.sleep(0.05)


def _sees_all(page: dict[str, object], members: Sequence[Member]) -> bool:
    own = page["pools"][OWN]  # type: ignore[index]
    return len(page["members"]) == len(own["members"]) == len(members)  # type: ignore[arg-type]
