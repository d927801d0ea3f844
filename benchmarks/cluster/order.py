"""Whether priority and shares are those of one proxy, and what the further hop costs."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.cluster.load import Load, now
from benchmarks.cluster.rig import PLACES, Member, rig
from llmproxy.config.value_types import hash_of

LASTS_S = 15.0
IDLE_S = 5.0
ROUNDS = 8
TENANTS = f"""
tenants:
  - {{name: a, keys: ["{hash_of("a")}"]}}
  - {{name: b, keys: ["{hash_of("b")}"]}}
scheduling: {{flow: tenant}}
"""


async def order() -> None:
    """Bands at different members, and tenants that use members of their own: one proxy, and clusters."""
    print("| proxies | critical, TTFT p50 | p99 | inversions | share of tenant a |")
    print("| --- | --- | --- | --- | --- |")
    for count, clustered in ((1, False), (2, True), (4, True)):
        async with rig(count, clustered=clustered) as made:
            load = Load(made.session)
            await _for(load, [
                load.clients(made.members[:1], 4, "critical"),
                load.clients(made.members[-1:], 20, "sheddable"),
                load.clients(made.members[count // 2 :][:1], 10, "default"),
            ])  # fmt: skip
            inversions = sum([await made.metric(one, "llmproxy_inversions_total") for one in made.members])
            critical = load.ttft_s("critical", 0.5), load.ttft_s("critical", 0.99)
        async with rig(count, clustered=clustered, more=TENANTS) as made:
            load = Load(made.session)
            # The clients of tenant a all use one member, and those of b the others.
            others = made.members[1:] or made.members
            await _for(load, [
                load.clients(made.members[:1], 32, "default", key="a", label="a"),
                load.clients(others, 24 // len(others), "default", key="b", label="b"),
            ])  # fmt: skip
            served = Counter(one.label for one in load.asked if one.outcome == "ok")
        kind = f"{count}, a cluster" if clustered else "one"
        share = served["a"] / max(1, served.total())
        print(f"| {kind} | {critical[0]:.3f} s | {critical[1]:.3f} s | {inversions:g} | {share:.2f} |", flush=True)
    print()


async def _for(load: Load, clients: Sequence[object]) -> None:
    running = asyncio.gather(*clients)  # type: ignore[call-overload]
    await asyncio.sleep(LASTS_S)
    load.over = True
    await running


def cpu_s(member: Member) -> float:
    """CPU time of a member so far."""
    fields = Path(f"/proc/{member.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mb(member: Member) -> float:
    return int(Path(f"/proc/{member.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


async def speed() -> None:
    """Time to the first byte and CPU time by the leader, by a member that follows, and by a proxy that is alone.

    What processes use without requests, for polls, is taken off.
    """
    async with rig(2, speed=20) as made, rig(1, clustered=False, speed=20) as alone:
        leader = await made.leader()
        (follower,) = [one for one in made.members if one is not leader]
        places = {"alone": (alone, alone.members[0]), "leader": (made, leader), "follower": (made, follower)}
        members = [member for _, member in places.values()]
        firsts: dict[str, list[float]] = {name: [] for name in places}
        used: dict[str, dict[str, float]] = {name: dict.fromkeys(places, 0.0) for name in places}
        asked = dict.fromkeys(places, 0)
        lasted = dict.fromkeys(places, 0.0)
        before = [cpu_s(one) for one in members]
        await asyncio.sleep(IDLE_S)
        idle = [(cpu_s(one) - was) / IDLE_S for one, was in zip(members, before, strict=True)]
        for _ in range(ROUNDS):
            for name, (of, member) in places.items():
                first = Load(of.session, max_tokens=1)
                await _asked(first, member, 1, 50)
                firsts[name] += [one.first_s - one.sent_s for one in first.asked if one.first_s]
                # Many at once, so that the polls of busy replicas cost each of them little.
                load = Load(of.session, max_tokens=1)
                before, began_s = [cpu_s(one) for one in members], now()
                await _asked(load, member, PLACES, 1_000)
                asked[name] += len(load.asked)
                lasted[name] += now() - began_s
                for place, one, was in zip(places, members, before, strict=True):
                    used[name][place] += cpu_s(one) - was
        print("| by | TTFT p50 | CPU of that process per request | CPU of the leader |\n| --- | --- | --- | --- |")
        for name, times in firsts.items():
            cost = {
                place: 1e6 * (used[name][place] - rate * lasted[name]) / asked[name]
                for place, rate in zip(places, idle, strict=True)
            }
            of_leader = f"{cost['leader']:.0f} us" if name == "follower" else ""
            print(f"| {name} | {1e3 * median(times):.2f} ms | {cost[name]:.0f} us | {of_leader} |")
        print(f"\nMemory: leader {rss_mb(leader):.0f} MB, follower {rss_mb(follower):.0f} MB.\n")


async def _asked(load: Load, member: Member, clients: int, count: int) -> None:
    running = asyncio.create_task(load.clients([member], clients))
    while len(load.asked) < count:  # noqa: ASYNC110 - clients tell of no event
        await asyncio.sleep(0.01)
    load.over = True
    await running
