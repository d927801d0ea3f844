"""Failures of a cluster under load, and their effect on requests.

    .venv/bin/python -m benchmarks.cluster [EXPERIMENT ...] [--times N]

Real processes: Valkey or Redis, two simulated replicas with eight places each, and members that share them. Streams
come in a closed loop, more than there are places. Prints rows of Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

from benchmarks.cluster.load import Load, now
from benchmarks.cluster.order import order
from benchmarks.cluster.rig import Member, Rig, rig
from benchmarks.cluster.speed import speed

CLIENTS = 10
"""Of each member: three members have 30, for 16 places."""
AFTER_S = 3.0
BOUND_S = 900.0
Judged = dict[str, list[Member]]
Act = Callable[[Rig], Awaitable[tuple[Judged, float]]]
"""Breaks something and heals it; whose clients are judged, and since when."""


@asynccontextmanager
async def under_load(
    *flags: str, members: int = 3, roaming: bool = False, balanced: bool = False,
    tree: Path | None = None,
) -> AsyncIterator[tuple[Rig, Load]]:  # fmt: skip
    """A cluster with clients at every member. Those that roam use members that are ready alone if `balanced`."""
    async with rig(members, *flags, tree=tree) as made:
        load = Load(made.session)
        watching = asyncio.create_task(made.watch_replicas())
        balancing = asyncio.create_task(load.balance(made.members if balanced else []))
        clients = asyncio.create_task(load.clients(made.members, CLIENTS, roaming=roaming))
        try:
            await asyncio.sleep(3.0)
            yield made, load
        finally:
            load.end()
            await asyncio.wait_for(asyncio.gather(clients, return_exceptions=True), 60.0)
            for task in (watching, balancing):
                task.cancel()
            await asyncio.gather(watching, balancing, return_exceptions=True)


def bad(outcomes: Counter[str]) -> str:
    """What did not end well, with its number."""
    found = {name: number for name, number in outcomes.items() if name != "ok"}
    return ", ".join(f"{number} {name}" for name, number in sorted(found.items())) or "0"


async def kill_leader(times: int) -> None:
    """kill -9 of the leader; its clients are not counted."""
    print("| kill | gap, s | others: waited | not served | served | looks with more than 8 | at most |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    gaps: list[float] = []
    async with under_load() as (made, load):
        for number in range(times):
            leader = await made.leader()
            others = [one for one in made.members if one is not leader]
            waited = await made.waiting(others)
            killed_s = now()
            leader.kill()
            await made.leader(others)
            made.over.clear()
            looks = made.looks
            await asyncio.sleep(AFTER_S)
            names = [one.name for one in others]
            gaps.append(load.gap_s(names, killed_s - 1.0, now()))
            outcomes = load.outcomes(*names, since_s=killed_s)
            over = [more for _, more in made.over]
            print(
                f"| {number + 1} | {gaps[-1]:.2f} | {waited} | {bad(outcomes)} | {outcomes['ok']} "
                f"| {len(over)} of {made.looks - looks} | {max(over, default=0):g} |", flush=True,
            )  # fmt: skip
            await leader.start_again()
            await made.together()
            await asyncio.sleep(1.0)
    print(f"\nGap: median {median(gaps):.2f} s, at most {max(gaps):.2f} s.\n")


async def broken(names: Sequence[str], *, balanced: bool) -> None:
    """A row each: something is broken and healed, under the same load."""
    print("| what | whose clients | not served | served | longest gap, s | looks with more than 8 | at most |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    async with under_load(roaming=balanced, balanced=balanced) as (made, load):
        for name in names:
            what, act = BROKEN[name]
            made.over.clear()
            looks = made.looks
            judged, at_s = await act(made)
            await made.together()
            await asyncio.sleep(AFTER_S)
            until_s = now()
            over = [more for over_s, more in made.over if over_s >= at_s]
            for whose, members in judged.items():
                of = [one.name for one in members]
                outcomes, gap_s = load.outcomes(*of, since_s=at_s), load.gap_s(of, at_s - 1.0, until_s)
                print(
                    f"| {what} | {whose} | {bad(outcomes)} | {outcomes['ok']} | {gap_s:.2f} "
                    f"| {len(over)} of {made.looks - looks} | {max(over, default=0):g} |", flush=True,
                )  # fmt: skip


async def kill_relay(made: Rig) -> tuple[Judged, float]:
    leader = await made.leader()
    victim = next(one for one in made.members if one is not leader)
    at_s = now()
    victim.kill()
    # Its leases are free after 10 s.
    await asyncio.sleep(12.0)
    judged = {"others": [one for one in made.members if one is not victim], "its own": [victim]}
    await victim.start_again()
    return judged, at_s


async def pause_leader(made: Rig) -> tuple[Judged, float]:
    leader = await made.leader()
    at_s = now()
    leader.kill(signal.SIGSTOP)
    await asyncio.sleep(10.0)
    leader.kill(signal.SIGCONT)
    return {"others": [one for one in made.members if one is not leader], "its own": [leader]}, at_s


def partition(lasts_s: float, *ways: str, all_of_them: bool = False) -> Act:
    """One relay, or all, and the leader's port pass nothing in these directions. All live, and reach the store."""

    async def cut(made: Rig) -> tuple[Judged, float]:
        leader = await made.leader()
        relay, *others = [one for one in made.members if one is not leader]
        at_s = now()
        await leader.forwarder.cut(*ways, of=None if all_of_them else relay.name)
        await asyncio.sleep(lasts_s)
        await leader.forwarder.cut()
        if all_of_them:
            return {"the leader's": [leader], "others": [relay, *others]}, at_s
        return {"its own": [relay], "others": [leader, *others]}, at_s

    return cut


def store_away(lasts_s: float) -> Act:
    async def pause(made: Rig) -> tuple[Judged, float]:
        assert made.store is not None
        at_s = now()
        made.store.child.send_signal(signal.SIGSTOP)
        await asyncio.sleep(lasts_s)
        made.store.child.send_signal(signal.SIGCONT)
        return {"all": made.members}, at_s

    return pause


async def store_restarted(made: Rig) -> tuple[Judged, float]:
    assert made.store is not None
    at_s = now()
    await made.store.stop(signal.SIGKILL)
    await asyncio.sleep(1.0)
    await made.start_store()
    await asyncio.sleep(5.0)
    return {"all": made.members}, at_s


BROKEN: dict[str, tuple[str, Act]] = {
    "pause-leader": ("`SIGSTOP` of the leader for 10 s", pause_leader),
    "cut-1": ("one relay and the leader do not reach each other for 1 s", partition(1.0, "in", "out")),
    "cut-5": ("the same for 5 s", partition(5.0, "in", "out")),
    "cut-30": ("the same for 30 s", partition(30.0, "in", "out")),
    "cut-in-5": ("nothing of one relay reaches the leader for 5 s", partition(5.0, "in")),
    "cut-in-30": ("the same for 30 s", partition(30.0, "in")),
    "cut-out-5": ("nothing of the leader reaches one relay for 5 s", partition(5.0, "out")),
    "cut-out-30": ("the same for 30 s", partition(30.0, "out")),
    "cut-all-5": ("nobody reaches the leader for 5 s", partition(5.0, "in", "out", all_of_them=True)),
    "cut-all-30": ("the same for 30 s", partition(30.0, "in", "out", all_of_them=True)),
    "store-slow": ("the store answers nothing for 2 s", store_away(2.0)),
    "store-away": ("the store answers nothing for 10 s", store_away(10.0)),
    "store-empty": ("the store is killed, and started empty after 1 s", store_restarted),
    "kill-relay": ("`kill -9` of a member that relays", kill_relay),
}
UPGRADES = {
    "members that are ready": ("--drain-queued", "finish", "--drain-delay-s", "1"),
    "the next member where one refuses the connection": ("--drain-queued", "finish"),
}


async def upgrade() -> None:
    """SIGTERM and a start of each member in turn."""
    print("| clients use | served | not served | longest gap, s |\n| --- | --- | --- | --- |")
    for who, flags in UPGRADES.items():
        async with under_load(*flags, roaming=True, balanced="--drain-delay-s" in flags) as (made, load):
            _, at_s = await restart_members(made)
            await asyncio.sleep(AFTER_S)
            names = [one.name for one in made.members]
            outcomes, gap_s = load.outcomes(*names, since_s=at_s), load.gap_s(names, at_s, now())
        print(f"| {who} | {outcomes['ok']} | {bad(outcomes)} | {gap_s:.2f} |", flush=True)


async def two_builds(other: Path) -> None:
    """The members are of another checkout, become those of this one, and go back: each is ended and started in turn."""
    print("| members become | served | not served | longest gap, s | looks with more than 8 |")
    print("| --- | --- | --- | --- | --- |")
    flags = UPGRADES["members that are ready"]
    async with under_load(*flags, roaming=True, balanced=True, tree=other) as (made, load):
        for what, tree in {"those of this build": None, "those of the other one": other}.items():
            for member in made.members:
                member.tree = tree
            made.over.clear()
            looks = made.looks
            _, at_s = await restart_members(made)
            await asyncio.sleep(AFTER_S)
            names = [one.name for one in made.members]
            outcomes, gap_s = load.outcomes(*names, since_s=at_s), load.gap_s(names, at_s - 1.0, now())
            print(
                f"| {what} | {outcomes['ok']} | {bad(outcomes)} | {gap_s:.2f} "
                f"| {len(made.over)} of {made.looks - looks} |", flush=True,
            )  # fmt: skip


async def restart_members(made: Rig) -> tuple[Judged, float]:
    at_s = now()
    for member in made.members:
        member.kill(signal.SIGTERM)
        await member.start_again()
        await made.together()
    return {"all": made.members}, at_s


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    known = ["kill-leader", "order", "upgrade", *BROKEN, "speed"]
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=", ".join(known))
    parser.add_argument("--times", type=int, default=20, help="kills of the leader")
    parser.add_argument(
        "--ready", action="store_true", help="where something breaks, clients use members that are ready"
    )
    parser.add_argument(
        "--other", type=Path, metavar="TREE", help="upgrade: from the program in this checkout to this one, and back"
    )
    given = parser.parse_args()
    chosen = given.experiments or known
    if unknown := set(chosen) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    runs = {
        "kill-leader": lambda: kill_leader(given.times),
        "order": order,
        "upgrade": upgrade if given.other is None else lambda: two_builds(given.other),
        "speed": speed,
    }
    for name in chosen:
        if name in runs:
            await asyncio.wait_for(runs[name](), BOUND_S)
    if rows := [name for name in chosen if name in BROKEN]:
        await asyncio.wait_for(broken(rows, balanced=given.ready), BOUND_S)


if __name__ == "__main__":
    asyncio.run(main())
