"""A replica of a small fleet breaks under load: failed requests, seconds to detection, and the summary of the page."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults import Fault
from benchmarks.load import Clients, Seen, Work, details, failures
from benchmarks.small_fleets.stage import SPEED, Check, Stage, staged, true

SIZES = (8, 8)
CLIENTS = 32
BROKEN = 1
"""The index of the replica that breaks."""
WARM_S, BASE_S = 7.0, 4.0
NAMED_S = 5.0
BACK_S = 30.0
RESET_SHARE, RESETS = 0.05, 10
RESET_AFTER_BYTES = 4_000  # About a third of an answer.


@dataclass(slots=True)
class Episode:
    """A fleet under load whose replica BROKEN breaks and recovers, and the checks of its scene."""

    stage: Stage
    clients: Clients
    base: float
    """The answers per second of the healthy fleet."""
    before: int
    """The number of requests that had ended before the fault."""
    checks: list[Check] = field(default_factory=list)

    @property
    def seen(self) -> list[Seen]:
        """The requests that ended since the fleet was warm."""
        return self.clients.seen[self.before :]

    async def fault(self, kind: str | None, **more: Any) -> None:
        """Switches a fault of the replica on; a `kind` of None switches it off."""
        await self.stage.fleet.fault(BROKEN, kind, **more)

    async def named(self, *words: str, within_s: float = NAMED_S) -> float:
        """Checks that the summary of the page names the replica and has all `words`. Returns the seconds until then."""
        found_s, text = await self.stage.soon([self.stage.fleet.name(BROKEN), *words], 2 * within_s)
        self.checks.append(Check("named after, s", found_s, most=within_s, note=text))
        return min(found_s, 2 * within_s)

    async def answers_on(self, seconds: float) -> None:
        """Checks the rate of answers during the next `seconds`: the other replica has half of the slots."""
        during = await self.clients.rate(seconds)
        self.checks.append(Check("answers meanwhile / before", during / self.base, least=0.4))

    async def recovers(self, most_s: float = BACK_S) -> None:
        """Checks the seconds until the rate reaches nine tenths of `base`, measured over windows of 3 s."""
        loop = asyncio.get_running_loop()
        began_s, back_s = loop.time(), 2 * most_s
        while loop.time() < began_s + 2 * most_s:
            if await self.clients.rate(3.0) > 0.9 * self.base:
                back_s = loop.time() - began_s - 3.0
                break
        self.checks.append(Check("full again after, s", back_s, most=most_s))

    def none_failed(self) -> None:
        """Checks that no request failed before a token of its answer came."""
        failed = failures(self.seen)
        self.checks.append(Check("failed requests", len(failed), most=0, note=details(failed)))

    async def streams_end(self, breaks: int = 1) -> None:
        """Checks that no request failed, that each broken stream has one error event, and the attempts of a request.

        Each of the `breaks` may cost a twentieth of an attempt.
        """
        self.none_failed()
        broken = [one for one in self.seen if one.begun and not one.whole]
        wrong = [one for one in broken if one.errors != 1]
        retries = await self.stage.fleet.metric("llmproxy_retries_total") or 0.0
        self.checks += [
            Check("broken streams", len(broken), note=details(broken)),
            Check("of these without one error event", len(wrong), most=0, note=details(wrong)),
            Check("attempts for each request", 1.0 + retries / len(self.clients.seen), most=1.0 + 0.05 * breaks),
        ]


@asynccontextmanager
async def episode(stream: bool, tree: Path | None, speed: float = SPEED) -> AsyncIterator[Episode]:
    """Runs a warm fleet with twice as many clients as slots during the block."""
    async with staged(SIZES, speed=speed, tree=tree) as stage, stage.clients(Work(stream)) as clients:
        clients.closed(CLIENTS, stage.proxy)
        await clients.rate(WARM_S)
        base = await clients.rate(BASE_S)
        yield Episode(stage, clients, base, len(clients.seen))


async def slow(stream: bool, tree: Path | None, factor: float = 8.0, speed: float = SPEED) -> list[Check]:
    """Checks a replica that becomes 8 times as slow for 20 s.

    The proxy must eject and name it within 5 s, and must not use it before it recovers.
    """
    async with episode(stream, tree, speed) as scene:
        await scene.fault("slow", factor=factor)
        await scene.answers_on(20.0 - await scene.named("slow"))
        ejected, back = (scene.stage.named(event, BROKEN) for event in ("backend_ejected", "backend_back"))
        await scene.fault(None)
        await scene.recovers()
    return [
        *scene.checks,
        Check("times ejected, by each slow probe", ejected, least=1),
        Check("times back while slow", back, most=0),
    ]


async def silent(stream: bool, tree: Path | None) -> list[Check]:
    """Checks a replica that takes requests and answers none, while `/health` and `/metrics` answer."""
    async with episode(stream, tree) as scene:
        await scene.fault("silent")
        await scene.named("ejected", within_s=10.0)
        await scene.answers_on(15.0)
        oldest_s = max(scene.clients.ages_s(), default=0.0)
        await scene.fault(None)
        await scene.recovers()
        scene.none_failed()
    return [*scene.checks, Check("oldest request without a byte, s", oldest_s, most=12.0)]


async def frozen(stream: bool, tree: Path | None) -> list[Check]:
    """Checks a replica whose engine freezes in the middle of its answers. `/health` and `/metrics` still answer."""
    async with episode(stream, tree) as scene:
        await scene.fault("frozen")
        await scene.named("ejected")
        await scene.answers_on(15.0)
        oldest_s = max(scene.clients.ages_s(), default=0.0)
        await scene.fault(None)
        await scene.recovers()
        if not stream:
            scene.none_failed()
    return [*scene.checks, Check("oldest request without a byte, s", oldest_s, most=12.0)]


async def busy(stream: bool, tree: Path | None) -> list[Check]:
    """Checks a replica that refuses all requests as busy for 12 s: its batch limit must grow again soon after."""
    async with episode(stream, tree) as scene:
        await scene.fault("busy_503")
        await scene.answers_on(12.0)
        await scene.fault(None)
        await scene.recovers(most_s=10.0)
        scene.none_failed()
        limits = await scene.stage.limits()
    return [*scene.checks, Check("least limit afterwards", min(limits), note=f"limits {limits}")]


async def refuses(kind: str, words: Sequence[str], tree: Path | None, **more: float) -> list[Check]:
    """Checks a replica that answers at once with an error.

    Clients must see no error, and the summary of the page must name the replica.
    """
    async with episode(False, tree) as scene:
        await scene.fault(kind, **more)
        await scene.named(*words, within_s=10.0)
        await scene.answers_on(8.0)
        await scene.fault(None)
        await scene.recovers()
        scene.none_failed()
    return scene.checks


async def killed(stream: bool, tree: Path | None) -> list[Check]:
    """Checks a replica that is killed, with a new process 6 s later: only streams that had begun there may break."""
    async with episode(stream, tree) as scene:
        await scene.stage.fleet.replicas[BROKEN].stop(signal.SIGKILL)
        await asyncio.sleep(max(0.0, 6.0 - await scene.named("down")))
        await scene.stage.fleet.start_replica(BROKEN)
        await scene.recovers(most_s=45.0)
        scene.none_failed()
        broken = [one for one in scene.seen if one.begun and not one.whole]
    most = SIZES[BROKEN] if stream else 0
    return [*scene.checks, Check("broken streams", len(broken), most=most, note=details(broken))]


async def stopped(stream: bool, tree: Path | None) -> list[Check]:
    """Checks a SIGSTOP of a replica for 10 s.

    The proxy must detect it, and must not eject the replica as slow after SIGCONT.
    """
    async with episode(stream, tree) as scene:
        process = scene.stage.fleet.replicas[BROKEN].child
        process.send_signal(signal.SIGSTOP)
        await scene.answers_on(10.0 - await scene.named())
        process.send_signal(signal.SIGCONT)
        ejected = scene.stage.named("backend_ejected", BROKEN)
        await scene.recovers()
        await asyncio.sleep(5.0)
        again = scene.stage.named("backend_ejected", BROKEN) - ejected
        scene.none_failed()
    return [*scene.checks, Check("ejected again when it goes on", again, most=0)]


async def breaks(fault: Fault, lasts_s: float, tree: Path | None, *, times: int = 1) -> list[Check]:
    """Checks the streams of a fleet whose replica breaks `times` times, for at least `lasts_s` each."""
    async with episode(True, tree) as scene:
        for _ in range(times):
            async with fault(scene.stage.fleet, BROKEN):
                if lasts_s:
                    await asyncio.sleep(max(0.0, lasts_s - await scene.named()))
            available = f'llmproxy_backend_available{{backend="{scene.stage.fleet.name(BROKEN)}"}}'
            await scene.stage.fleet.becomes(available, 1.0)
        await scene.recovers(most_s=45.0)
        await scene.streams_end(times)
    return scene.checks


async def resets(tree: Path | None) -> list[Check]:
    """Checks resets of streams in mid-answer, at any replica."""
    async with episode(True, tree) as scene:
        rng = random.Random(7)
        for _ in range(RESETS):
            await asyncio.sleep(rng.expovariate(RESET_SHARE * scene.base))
            await scene.stage.fleet.fault(rng.randrange(len(SIZES)), "reset", after_bytes=RESET_AFTER_BYTES, times=1)
        await scene.recovers()
        await scene.streams_end()
    return scene.checks


async def deadly(tree: Path | None) -> list[Check]:
    """Checks a request that kills every engine: at most two of four replicas may die, and no other request may fail."""
    async with staged((8, 8, 8, 8), tree=tree) as stage, stage.clients(Work(stream=False)) as clients:
        clients.closed(16, stage.proxy)
        await clients.rate(WARM_S)
        for index in range(4):
            await stage.fleet.fault(index, "dies_of", word="poison")
        async with stage.clients(Work(stream=False, prompt="poison")) as others:
            seen = await others.ask(stage.proxy())
        await asyncio.sleep(4.0)
        failed = failures(clients.seen)
        died = sum([await stage.refuses(index) for index in range(4)])
    return [
        Check("replicas that died", died, most=2),
        Check("failed requests of others", len(failed), most=0, note=details(failed)),
        true("its client got an error", seen.status >= 500, seen.detail),
    ]
