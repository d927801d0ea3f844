"""One replica of a small fleet breaks under load: what clients notice, how soon it is found, and what people read."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from benchmarks.small_fleets.load import Clients, Work, details, failures
from benchmarks.small_fleets.stage import Check, Stage, staged, true

SIZES = (8, 8)
CLIENTS = 32
WARM_S, BASE_S = 7.0, 4.0
NAMED_S = 5.0
BACK_S = 30.0


async def slow(stream: bool, tree: Path | None, factor: float = 8.0, speed: float = 0.4) -> list[Check]:
    """A replica becomes 8 times as slow for 20 s: ejected and named within 5 s, and not let back before it is well."""
    async with staged(SIZES, speed=speed, tree=tree) as stage, stage.clients(Work(stream)) as clients:
        base = await _warm(stage, clients)
        await stage.fault(1, "slow", factor=factor)
        found_s, text = await stage.soon([stage.fleet.name(1), "slow"], 2 * NAMED_S)
        during = await clients.rate(20.0 - min(found_s, 2 * NAMED_S))
        ejected, back = stage.named("backend_ejected", 1), stage.named("backend_back", 1)
        await stage.fault(1, None)
        recovered_s = await _recovered(clients, base)
    return [
        Check("named after, s", found_s, most=NAMED_S, note=text),
        Check("times ejected", ejected, 1, 2),
        Check("times let back while slow", back, most=ejected - 1),
        Check("answers meanwhile / before", during / base, least=0.4),
        Check("full again after, s", recovered_s, most=BACK_S),
    ]


async def silent(stream: bool, tree: Path | None) -> list[Check]:
    """A replica takes requests and never answers one, while its health and its metrics are well."""
    async with staged(SIZES, tree=tree) as stage, stage.clients(Work(stream)) as clients:
        base = await _warm(stage, clients)
        before = len(clients.seen)
        await stage.fault(1, "silent")
        found_s, text = await stage.soon([stage.fleet.name(1), "ejected"], 20.0)
        during = await clients.rate(15.0)
        oldest_s = max(clients.ages_s(), default=0.0)
        failed = failures(clients.seen[before:])
        await stage.fault(1, None)
        recovered_s = await _recovered(clients, base)
    return [
        Check("found and named after, s", found_s, most=10.0, note=text),
        Check("answers meanwhile / before", during / base, least=0.4),
        Check("oldest request without a byte, s", oldest_s, most=12.0),
        Check("failed requests", len(failed), most=0, note=details(failed)),
        Check("full again after, s", recovered_s, most=BACK_S),
    ]


async def busy(stream: bool, tree: Path | None) -> list[Check]:
    """A replica refuses everything as busy for 12 s: its batch limit is back soon after."""
    async with staged(SIZES, tree=tree) as stage, stage.clients(Work(stream)) as clients:
        base = await _warm(stage, clients)
        before = len(clients.seen)
        await stage.fault(1, "busy_503")
        during = await clients.rate(12.0)
        await stage.fault(1, None)
        recovered_s = await _recovered(clients, base)
        failed = failures(clients.seen[before:])
        limits = await stage.limits()
    return [
        Check("answers meanwhile / before", during / base, least=0.4),
        Check("full again after, s", recovered_s, most=10.0, note=f"limits {limits}"),
        Check("failed requests", len(failed), most=0, note=details(failed)),
    ]


async def refuses(kind: str, words: list[str], tree: Path | None, **more: float) -> list[Check]:
    """A replica answers at once with an error that is its own: clients see none, and the headline names it."""
    async with staged(SIZES, tree=tree) as stage, stage.clients(Work(stream=False)) as clients:
        base = await _warm(stage, clients)
        before = len(clients.seen)
        await stage.fault(1, kind, **more)
        found_s, text = await stage.soon([stage.fleet.name(1), *words], 15.0)
        during = await clients.rate(8.0)
        failed = failures(clients.seen[before:])
        await stage.fault(1, None)
        recovered_s = await _recovered(clients, base)
    return [
        Check("named after, s", found_s, most=10.0, note=text),
        Check("answers meanwhile / before", during / base, least=0.4),
        Check("failed requests", len(failed), most=0, note=details(failed)),
        Check("full again after, s", recovered_s, most=BACK_S),
    ]


async def killed(stream: bool, tree: Path | None) -> list[Check]:
    """SIGKILL of a replica, and a new one 6 s later: only streams that had begun there break."""
    async with staged(SIZES, tree=tree) as stage, stage.clients(Work(stream)) as clients:
        base = await _warm(stage, clients)
        before = len(clients.seen)
        await stage.fleet.replicas[1].stop(signal.SIGKILL)
        found_s, text = await stage.soon([stage.fleet.name(1), "down"], NAMED_S)
        await asyncio.sleep(max(0.0, 6.0 - found_s))
        await stage.fleet.restart_replica(1)
        recovered_s = await _recovered(clients, base, until_s=60.0)
        failed = failures(clients.seen[before:])
        broken = [one for one in clients.seen[before:] if one.begun and not one.whole]
    return [
        Check("named after, s", found_s, most=NAMED_S, note=text),
        Check("failed requests", len(failed), most=0, note=details(failed)),
        Check("broken streams", len(broken), most=SIZES[1] if stream else 0, note=details(broken)),
        Check("full again after, s", recovered_s, most=45.0),
    ]


async def stopped(stream: bool, tree: Path | None) -> list[Check]:
    """SIGSTOP of a replica for 10 s: it is found, and after SIGCONT it is not taken for a slow one."""
    async with staged(SIZES, tree=tree) as stage, stage.clients(Work(stream)) as clients:
        base = await _warm(stage, clients)
        before = len(clients.seen)
        stage.fleet.replicas[1].child.send_signal(signal.SIGSTOP)
        found_s, text = await stage.soon([stage.fleet.name(1)], NAMED_S)
        during = await clients.rate(10.0 - min(found_s, NAMED_S))
        stage.fleet.replicas[1].child.send_signal(signal.SIGCONT)
        ejected = stage.named("backend_ejected", 1)
        recovered_s = await _recovered(clients, base)
        await asyncio.sleep(5.0)
        again = stage.named("backend_ejected", 1) - ejected
        failed = failures(clients.seen[before:])
    return [
        Check("named after, s", found_s, most=NAMED_S, note=text),
        Check("answers meanwhile / before", during / base, least=0.4),
        Check("failed requests", len(failed), most=0, note=details(failed)),
        Check("full again after, s", recovered_s, most=BACK_S),
        Check("ejected again when it goes on", again, most=0),
    ]


async def deadly(tree: Path | None) -> list[Check]:
    """A request that ends every engine that computes it: two of four are lost at most, and no other request is."""
    async with staged((8, 8, 8, 8), tree=tree) as stage, stage.clients(Work(stream=False)) as clients:
        clients.closed(16, stage.proxy)
        await clients.rate(WARM_S)
        for index in range(4):
            await stage.fault(index, "dies_of", word="poison")
        async with stage.clients(Work(stream=False, prompt="poison")) as others:
            seen = await others.ask(stage.proxy())
        await asyncio.sleep(4.0)
        failed = failures(clients.seen)
        died = sum(replica.child.returncode is not None for replica in stage.fleet.replicas)
    return [
        Check("replicas that died", died, most=2),
        Check("failed requests of others", len(failed), most=0, note=details(failed)),
        true("its client got an error", seen.status >= 500, seen.detail),
    ]


async def _warm(stage: Stage, clients: Clients) -> float:
    """Answers per second of the healthy fleet, once its limits are known."""
    clients.closed(CLIENTS, stage.proxy)
    await clients.rate(WARM_S)
    return await clients.rate(BASE_S)


async def _recovered(clients: Clients, base: float, until_s: float = 60.0) -> float:
    """Seconds until nine tenths of the answers per second are back, over windows of 3 s; `until_s` if never."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while loop.time() < began_s + until_s:
        if await clients.rate(3.0) > 0.9 * base:
            return loop.time() - began_s - 3.0
    return until_s
