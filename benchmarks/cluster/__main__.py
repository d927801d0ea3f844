"""Failures of a cluster under load, and their effect on requests.

    python -m benchmarks.cluster [EXPERIMENT ...] [--times N]

Valkey or Redis, two simulated replicas with eight slots each, and the members of the cluster run in separate processes.
Clients send one stream after the other. There are more clients than slots.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

from benchmarks.cluster.load import Load, bad, now
from benchmarks.cluster.rig import Member, Rig, rig
from benchmarks.table import Table

CLIENTS = 10  # The number of clients of each member: three members have 30, for 16 slots.
AFTER_S = 3.0
BOUND_S = 900.0
Judged = dict[str, list[Member]]
Act = Callable[[Rig], Awaitable[tuple[Judged, float]]]
"""Breaks something and repairs it. Returns the members whose clients count, and the time from which they count."""
LOOKS = ("looks with more than 8", "at most")


@asynccontextmanager
async def under_load(
    *flags: str, members: int = 3, roaming: bool = False, balanced: bool = False, tree: Path | None = None
) -> AsyncIterator[tuple[Rig, Load]]:
    """Runs a cluster with clients at every member during the block.

    With `roaming`, a client uses the next member after a refused connection. With `balanced`, roaming clients use only
    members that are ready.
    """
    async with rig(members, *flags, tree=tree) as made:
        load = Load(made.session)
        tasks = [
            asyncio.create_task(made.watch_replicas()),
            asyncio.create_task(load.balance(made.members if balanced else [])),
        ]
        load.add(made.members, CLIENTS, roaming=roaming)
        try:
            await asyncio.sleep(3.0)
            yield made, load
        finally:
            await asyncio.wait_for(load.ended(), 60.0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class Looks:
    """The observations of replicas since this object was made."""

    def __init__(self, made: Rig) -> None:
        self._made = made
        self._before = made.looks
        made.over.clear()

    def cells(self, since_s: float = 0.0) -> tuple[str, str]:
        over = [more for at_s, more in self._made.over if at_s >= since_s]
        return f"{len(over)} of {self._made.looks - self._before}", f"{max(over, default=0):g}"


async def kill_leader(times: int) -> None:
    """Kills the leader `times` times, and prints a row for each kill.

    The clients of the leader itself are not counted.
    """
    table = Table("kill", "gap, s", "others: waited", "not served", "served", *LOOKS)
    gaps: list[float] = []
    async with under_load() as (made, load):
        for number in range(times):
            leader = await made.leader()
            others = [one for one in made.members if one is not leader]
            waited = await made.waiting(others)
            killed_s = now()
            leader.kill()
            await made.leader(others)
            looks = Looks(made)
            await asyncio.sleep(AFTER_S)
            gaps.append(load.gap_s(others, killed_s - 1.0, now()))
            outcomes = load.outcomes(others, killed_s)
            table.row(number + 1, f"{gaps[-1]:.2f}", waited, bad(outcomes), outcomes["ok"], *looks.cells())
            await leader.start_again()
            await made.together()
            await asyncio.sleep(1.0)
    print(f"\nGap: median {median(gaps):.2f} s, at most {max(gaps):.2f} s.\n")


async def broken(names: Sequence[str], *, balanced: bool) -> None:
    """Causes each of these failures under the same load, and prints rows with their effect."""
    table = Table("failure", "whose clients", "not served", "served", "longest gap, s", *LOOKS, texts=2)
    async with under_load(roaming=balanced, balanced=balanced) as (made, load):
        for name in names:
            what, act = BROKEN[name]
            looks = Looks(made)
            judged, at_s = await act(made)
            await made.together()
            await asyncio.sleep(AFTER_S)
            for whose, members in judged.items():
                outcomes, gap_s = load.outcomes(members, at_s), load.gap_s(members, at_s - 1.0, now())
                table.row(what, whose, bad(outcomes), outcomes["ok"], f"{gap_s:.2f}", *looks.cells(at_s))


async def kill_follower(made: Rig) -> tuple[Judged, float]:
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
    """Returns an act: the port of the leader passes nothing in these directions for `lasts_s`.

    This holds for one follower, or for all with `all_of_them`. All members reach the store.
    """

    async def cut(made: Rig) -> tuple[Judged, float]:
        leader = await made.leader()
        follower, *others = [one for one in made.members if one is not leader]
        at_s = now()
        await leader.forwarder.cut(*ways, of=None if all_of_them else follower.name)
        await asyncio.sleep(lasts_s)
        await leader.forwarder.cut()
        if all_of_them:
            return {"the leader's": [leader], "others": [follower, *others]}, at_s
        return {"its own": [follower], "others": [leader, *others]}, at_s

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
    "cut-1": ("a follower and the leader do not reach each other for 1 s", partition(1.0, "in", "out")),
    "cut-5": ("the same for 5 s", partition(5.0, "in", "out")),
    "cut-30": ("the same for 30 s", partition(30.0, "in", "out")),
    "cut-in-5": ("nothing of a follower reaches the leader for 5 s", partition(5.0, "in")),
    "cut-in-30": ("the same for 30 s", partition(30.0, "in")),
    "cut-out-5": ("nothing of the leader reaches a follower for 5 s", partition(5.0, "out")),
    "cut-out-30": ("the same for 30 s", partition(30.0, "out")),
    "cut-all-5": ("no follower reaches the leader for 5 s", partition(5.0, "in", "out", all_of_them=True)),
    "cut-all-30": ("the same for 30 s", partition(30.0, "in", "out", all_of_them=True)),
    "store-slow": ("the store answers nothing for 2 s", store_away(2.0)),
    "store-away": ("the store answers nothing for 10 s", store_away(10.0)),
    "store-empty": ("the store is killed, and started empty after 1 s", store_restarted),
    "kill-follower": ("`kill -9` of a follower", kill_follower),
}
UPGRADES = {
    "members that are ready": ("--drain-queued", "finish", "--drain-delay-s", "1"),
    "the next member where one refuses the connection": ("--drain-queued", "finish"),
}


async def restarted(made: Rig, load: Load, table: Table, title: str) -> None:
    """Restarts each member in turn by SIGTERM, and prints a row."""
    looks, at_s = Looks(made), now()
    for member in made.members:
        member.kill(signal.SIGTERM)
        await member.start_again()
        await made.together()
    await asyncio.sleep(AFTER_S)
    outcomes, gap_s = load.outcomes(made.members, at_s), load.gap_s(made.members, at_s - 1.0, now())
    table.row(title, outcomes["ok"], bad(outcomes), f"{gap_s:.2f}", *looks.cells())


async def upgrade() -> None:
    """Restarts the members, once with clients that ask for readiness and once with clients that try the next member."""
    table = Table("clients use", "served", "not served", "longest gap, s", *LOOKS)
    for who, flags in UPGRADES.items():
        async with under_load(*flags, roaming=True, balanced="--drain-delay-s" in flags) as (made, load):
            await restarted(made, load, table, who)


async def two_builds(other: Path) -> None:
    """Restarts members of the checkout `other` one by one with this checkout, and then with `other` again."""
    table = Table("members become", "served", "not served", "longest gap, s", *LOOKS)
    flags = UPGRADES["members that are ready"]
    async with under_load(*flags, roaming=True, balanced=True, tree=other) as (made, load):
        for title, tree in {"this build": None, "the other build": other}.items():
            for member in made.members:
                member.tree = tree
            await restarted(made, load, table, title)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["kill-leader", "upgrade", *BROKEN]
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=", ".join(names))
    parser.add_argument("--times", type=int, default=20, help="kills of the leader")
    parser.add_argument("--ready", action="store_true", help="in failures, clients use members that are ready")
    parser.add_argument("--other", type=Path, metavar="TREE", help="upgrade: from this checkout, and back")
    given = parser.parse_args()
    chosen = given.experiments or names
    if unknown := set(chosen) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    runs: dict[str, Callable[[], Awaitable[None]]] = {
        "kill-leader": lambda: kill_leader(given.times),
        "upgrade": upgrade if given.other is None else lambda: two_builds(given.other),
    }
    for name in chosen:
        if name in runs:
            await asyncio.wait_for(runs[name](), BOUND_S)
    if rows := [name for name in chosen if name in BROKEN]:
        await asyncio.wait_for(broken(rows, balanced=given.ready), BOUND_S)


if __name__ == "__main__":
    asyncio.run(main())
