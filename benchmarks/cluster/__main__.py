"""What breaks in a cluster under load, and what does not.

    .venv/bin/python -m benchmarks.cluster [EXPERIMENT ...] [--times N]

Real processes: Valkey or Redis, two simulated replicas with eight places each, and members that share them. Streams
come in a closed loop, more than there are places. Prints rows of Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from statistics import median

from benchmarks.cluster.load import Load, now
from benchmarks.cluster.order import order, speed
from benchmarks.cluster.rig import Member, Rig, rig

CLIENTS = 10
"""Of each member: three members have 30, for 16 places."""
Act = Callable[[Rig], Awaitable[tuple[list[Member], float]]]
"""Breaks something and heals it; whose clients are judged, and since when."""
SETTLED_S = 1.0
"""Over-commitment is counted from so long after a change of the leader: the lock's time is not waited for."""


@asynccontextmanager
async def under_load(*flags: str, members: int = 3, roaming: bool = False) -> AsyncIterator[tuple[Rig, Load]]:
    """A cluster with clients at every member."""
    async with rig(members, *flags) as made:
        load = Load(made.session)
        watching = asyncio.gather(made.watch_replicas(), load.balance(made.members))
        clients = asyncio.create_task(load.clients(made.members, CLIENTS, roaming=roaming))
        try:
            await asyncio.sleep(3.0)
            yield made, load
        finally:
            load.over = True
            await asyncio.wait_for(asyncio.gather(clients, return_exceptions=True), 60.0)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


def bad(outcomes: Counter[str]) -> str:
    """What did not end well, with its number."""
    found = {name: number for name, number in outcomes.items() if name != "ok"}
    return ", ".join(f"{number} {name}" for name, number in sorted(found.items())) or "0"


async def kill_leader(times: int) -> None:
    """kill -9 of the leader; its clients are not counted."""
    print("| kill | gap, s | others: cut or lost | others: served | looks with more than 8 in a replica | at most |")
    print("| --- | --- | --- | --- | --- | --- |")
    loop = asyncio.get_running_loop()
    gaps: list[float] = []
    async with under_load() as (made, load):
        for number in range(times):
            leader = await made.leader()
            others = [one for one in made.members if one is not leader]
            killed_s = loop.time()
            leader.kill()
            made.over.clear()
            looks = made.looks
            await made.leader(others)
            led_s = loop.time()
            await asyncio.sleep(3.0)
            names = [one.name for one in others]
            gaps.append(load.gap_s(names, killed_s - 1.0, loop.time()))
            over = [more for at_s, more in made.over if at_s >= led_s - SETTLED_S]
            outcomes = load.outcomes(*names, since_s=killed_s)
            print(
                f"| {number + 1} | {gaps[-1]:.2f} | {bad(outcomes)} | {outcomes['ok']} "
                f"| {len(over)} of {made.looks - looks} | {max(over, default=0):g} |", flush=True,
            )  # fmt: skip
            assert leader.process is not None
            await leader.process.child.wait()
            await leader.start()
            await made.leader()
            await asyncio.sleep(1.0)
    print(f"\nGap: median {median(gaps):.2f} s, at most {max(gaps):.2f} s.\n")


async def broken(what: str, act: Act) -> None:
    """One row: `act` breaks something, heals it, and says whose clients are judged, and when it broke."""
    async with under_load() as (made, load):
        judged, at_s = await act(made)
        await asyncio.sleep(3.0)
        now = asyncio.get_running_loop().time()
        names = [one.name for one in judged]
        outcomes = load.outcomes(*names, since_s=at_s)
        gap_s = load.gap_s(names, at_s - 1.0, now)
        over = [more for over_s, more in made.over if over_s >= at_s]
        print(
            f"| {what} | {bad(outcomes)} | {outcomes['ok']} | {gap_s:.2f} | {len(over)} of {made.looks} "
            f"| {max(over, default=0):g} |", flush=True,
        )  # fmt: skip


async def kill_relay(made: Rig) -> tuple[list[Member], float]:
    leader = await made.leader()
    victim, *_ = [one for one in made.members if one is not leader]
    at_s = now()
    victim.kill()
    await asyncio.sleep(12.0)
    return [one for one in made.members if one is not victim], at_s


async def pause_leader(made: Rig) -> tuple[list[Member], float]:
    leader = await made.leader()
    at_s = now()
    leader.kill(signal.SIGSTOP)
    await asyncio.sleep(10.0)
    leader.kill(signal.SIGCONT)
    await made.leader()
    return [one for one in made.members if one is not leader], at_s


def partition(lasts_s: float, *ways: str) -> Act:
    """The leader's port passes nothing in these directions; both sides live, and reach the store."""

    async def cut(made: Rig) -> tuple[list[Member], float]:
        leader = await made.leader()
        at_s = now()
        leader.forwarder.cut(*ways)
        await asyncio.sleep(lasts_s)
        leader.forwarder.heal()
        await made.leader()
        return made.members, at_s

    return cut


def store_away(lasts_s: float) -> Act:
    async def pause(made: Rig) -> tuple[list[Member], float]:
        assert made.store is not None
        at_s = now()
        made.store.child.send_signal(signal.SIGSTOP)
        await asyncio.sleep(lasts_s)
        made.store.child.send_signal(signal.SIGCONT)
        await made.leader()
        return made.members, at_s

    return pause


async def store_restarted(made: Rig) -> tuple[list[Member], float]:
    assert made.store is not None
    at_s = now()
    await made.store.stop(signal.SIGKILL)
    await asyncio.sleep(1.0)
    await made.start_store()
    await asyncio.sleep(5.0)
    await made.leader()
    return made.members, at_s


async def upgrade(made: Rig) -> tuple[list[Member], float]:
    """SIGTERM and a start of each member in turn."""
    at_s = now()
    for member in made.members:
        assert member.process is not None
        member.kill(signal.SIGTERM)
        await member.process.child.wait()
        await member.start()
        await made.leader()
    return made.members, at_s


BROKEN: dict[str, tuple[str, Act]] = {
    "kill-relay": ("kill -9 of a member that relays", kill_relay),
    "pause-leader": ("SIGSTOP of the leader for 10 s", pause_leader),
    "store-slow": ("the store answers nothing for 2 s", store_away(2.0)),
    "store-away": ("the store answers nothing for 10 s", store_away(10.0)),
    "store-empty": ("the store is killed, and started empty after 1 s", store_restarted),
    "cut-1": ("the leader is cut off for 1 s", partition(1.0, "in", "out")),
    "cut-5": ("the leader is cut off for 5 s", partition(5.0, "in", "out")),
    "cut-30": ("the leader is cut off for 30 s", partition(30.0, "in", "out")),
    "cut-in-5": ("nothing reaches the leader for 5 s", partition(5.0, "in")),
    "cut-out-5": ("nothing comes from the leader for 5 s", partition(5.0, "out")),
}


async def rolling() -> None:
    """As a load balancer would have it: members that are not ready get nothing new, and what waits is finished."""
    async with under_load("--drain-delay-s", "1", "--drain-queued", "finish", roaming=True) as (made, load):
        judged, at_s = await upgrade(made)
        await asyncio.sleep(2.0)
        outcomes = load.outcomes(*(one.name for one in judged), since_s=at_s)
        print(f"Each of three members ended by SIGTERM and started: {outcomes['ok']} served, {bad(outcomes)} not.\n")


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    known = ["order", "kill-leader", "upgrade", *BROKEN, "speed"]
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=", ".join(known))
    parser.add_argument("--times", type=int, default=20, help="kills of the leader")
    given = parser.parse_args()
    chosen = given.experiments or known
    if "order" in chosen:
        await order()
    if "kill-leader" in chosen:
        await kill_leader(given.times)
    if "upgrade" in chosen:
        await rolling()
    rows = [name for name in chosen if name in BROKEN]
    if rows:
        print("| what | not served | served | longest gap, s | looks with more than 8 in a replica | at most |")
        print("| --- | --- | --- | --- | --- | --- |")
    for name in rows:
        await broken(*BROKEN[name])
    if "speed" in chosen:
        await speed()


if __name__ == "__main__":
    asyncio.run(main())
