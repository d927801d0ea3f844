"""Misbehaviours of replicas and clients, and events of backends, in random order, for as long as is asked for.

Run `make chaos`, or `python -m tests.faults.chaos --minutes 10 --seed 1`: one seed is one order of plays. Every play
starts a proxy, must end as its definition says, and must leave nothing behind, as in the tests; at the
end memory must be back within a band. It stops at the first play that fails, with its number and the seed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import secrets
import time
from collections.abc import Coroutine
from typing import Any, NoReturn

import structlog

from benchmarks.proxy import rss_bytes
from llmproxy.lifecycle.descriptors import connections_max
from tests.e2e.leftovers import CountingLoop
from tests.e2e.proxies import FAST, serving
from tests.faults.clients import CLIENT_FAULTS
from tests.faults.misbehaviours import MISBEHAVIOURS
from tests.faults.polls import POLL_FAULTS
from tests.faults.scenes import SCENES
from tests.faults.test_table import test_a_client_that, test_a_polled_replica_that, test_a_replica_that, test_when

WARM_UP = 50
"""Plays after which nothing new is loaded any more."""
RSS_BAND_BYTES = 40 << 20
IDLE = 10_000


def draw(rng: random.Random) -> tuple[str, Coroutine[Any, Any, None]]:
    """Returns a random play and its name. The play raises AssertionError if it ends in another way than it must."""
    kind = rng.random()
    if kind < 0.1:
        scene = rng.choice(SCENES)
        return scene.name, test_when(scene)
    if kind < 0.2:
        poll = rng.choice(POLL_FAULTS)
        return poll.name, test_a_polled_replica_that(poll)
    if kind < 0.4:
        client = rng.choice(CLIENT_FAULTS)
        return client.name, test_a_client_that(client)
    fault, ask, alone = rng.choice(MISBEHAVIOURS), rng.choice(("stream", "whole")), rng.random() < 0.5
    return f"{fault.name}: {ask}{', alone' if alone else ''}", test_a_replica_that(fault, ask, alone)


async def idle(count: int) -> None:
    """So many connections that say nothing, and one client that is served."""
    async with serving(FAST) as proxy:
        writers = []
        for _ in range(count):
            _, writer = await asyncio.open_connection(*proxy.address)
            writers.append(writer)
        assert (await proxy.chat()).status == 200
        for writer in writers:
            writer.transport.abort()


async def chaos(minutes: float, seed: int) -> bool:
    """Play until the time is over. True when memory is back within its band."""
    rng = random.Random(seed)
    end_s = time.monotonic() + minutes * 60
    plays, settled_bytes = 0, 0
    # The proxy's limit less one: each connection has both ends in this process.
    count = min(IDLE, connections_max() - 1)
    await idle(count)
    print(f"{count} idle connections: nothing left", flush=True)
    while time.monotonic() < end_s:
        name, play = draw(rng)
        try:
            await play
        except BaseException:
            print(f"play {plays} of seed {seed} failed: {name}", flush=True)
            raise
        plays += 1
        if plays == WARM_UP:
            settled_bytes = rss_bytes([os.getpid()])
        if plays % 100 == 0:
            print(f"{plays} plays, RSS {rss_bytes([os.getpid()]) / 1e6:.0f} MB, the last: {name}", flush=True)
    grown = rss_bytes([os.getpid()]) - settled_bytes if settled_bytes else 0
    print(f"{plays} plays of seed {seed}; memory grew by {grown / 1e6:.1f} MB after the first {WARM_UP}")
    return grown < RSS_BAND_BYTES


def unwritten(*_: object) -> NoReturn:
    """Nothing is written; plays that look at the log take it before."""
    raise structlog.DropEvent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    structlog.configure(processors=[unwritten])
    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        return 0 if runner.run(chaos(options.minutes, options.seed)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
