"""Whether priority and fair shares of a cluster equal those in a single proxy."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Coroutine
from typing import Any

from benchmarks.cluster.load import Load
from benchmarks.cluster.rig import PLACES, REPLICA_FLAGS, Rig, rig
from llmproxy.config.value_types import hash_of

LASTS_S = 15.0
ROUNDS = 2
LENGTHS = range(20, 61)
IN_TIME_S = 0.5
TENANTS = f"""
tenants:
  - {{name: a, keys: ["{hash_of("a")}"]}}
  - {{name: b, keys: ["{hash_of("b")}"]}}
scheduling: {{flow: tenant}}
"""
SETTINGS = {"one": (1, False), "2, a cluster": (2, True), "4, a cluster": (4, True),
            "2, strangers": (2, False), "4, strangers": (4, False)}  # fmt: skip
COLUMNS = "critical, TTFT p50", "p99", f"within {IN_TIME_S:g} s", "inversions", "grants", "share of tenant a"


async def order() -> None:
    """Bands at different members, and tenants that use members of their own, in turns."""
    found = defaultdict[str, list[list[str]]](list)
    for number in range(ROUNDS):
        for kind in list(SETTINGS)[:: 1 if number % 2 == 0 else -1]:
            count, clustered = SETTINGS[kind]
            # Strangers would put more into an engine than a cluster may.
            flags = (*REPLICA_FLAGS, "--max-num-seqs", str(PLACES))
            async with rig(count, clustered=clustered, more=TENANTS, replica_flags=flags) as made:
                found[kind].append([*await _bands(made, clustered), await _tenants(made)])
    print(f"| proxies | {' | '.join(COLUMNS)} |\n| --- {'| --- ' * len(COLUMNS)}|")
    for kind in SETTINGS:
        print(f"| {kind} | {' | '.join(', '.join(cell) for cell in zip(*found[kind], strict=True))} |", flush=True)
    print()


async def _bands(made: Rig, clustered: bool) -> list[str]:
    """The leader has the clients that go last, and another member those that go first."""
    last = await made.leader() if clustered else made.members[0]
    first, *middle = [one for one in made.members if one is not last] or [last]
    load = Load(made.session, LENGTHS)
    await _for(
        load,
        load.clients([first], 4, "critical", key="a"),
        load.clients(middle[:1] or [first], 10, "default", key="a"),
        load.clients([last], 20, "sheddable", key="a"),
    )
    inversions = sum([await made.metric(one, "llmproxy_priority_inversions_total") for one in made.members])
    waits = [one.first_s - one.sent_s for one in load.asked if one.band == "critical" and one.first_s]
    in_time = sum(wait <= IN_TIME_S for wait in waits) / len(waits)
    p50, p99 = (load.ttft_s("critical", share) for share in (0.5, 0.99))
    return [f"{p50:.2f} s", f"{p99:.2f} s", f"{in_time:.3f}", f"{inversions:g}", str(len(load.asked))]


async def _tenants(made: Rig) -> str:
    """The share of tokens of one at one member, while the other one has three times as many clients elsewhere."""
    load = Load(made.session, LENGTHS)
    others = made.members[1:] or made.members
    await _for(
        load,
        load.clients(made.members[:1], 12, "default", key="a", label="a"),
        load.clients(others, 36 // len(others), "default", key="b", label="b"),
    )
    tokens = Counter[str]()
    for one in load.asked:
        # What ends afterwards was asked for by whoever had more clients.
        tokens[one.label] += one.tokens if one.ended_s <= load.over_s else 0
    return f"{tokens['a'] / tokens.total():.3f}"


async def _for(load: Load, *clients: Coroutine[Any, Any, None]) -> None:
    running = asyncio.gather(*clients)
    await asyncio.sleep(LASTS_S)
    load.end()
    await running
