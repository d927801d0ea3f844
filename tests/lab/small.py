"""Small traces and fleets for tests."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import Any

from llmproxy.config import Config
from llmproxy.lab.fleet.server import SimulatedServer
from llmproxy.lab.fleet.spec import Fault, ReplicaSpec, SimulatedFleet
from llmproxy.lab.policies.by_name import plan_named
from llmproxy.lab.results.record import Record
from llmproxy.lab.run.replay import Run, Setup
from llmproxy.lab.run.virtual_time import run
from llmproxy.lab.simulator.engine.profiles import profile_named
from llmproxy.lab.traces.arrival import Arrival, Trace
from tests import ROOT


def printed_with_hash_seeds(code: str) -> tuple[str, str]:
    """Returns the output of a script under two seeds of string hashes."""
    one, other = (
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "4242")
    )
    return one, other


def fleet(count: int = 3, faults: Iterable[Fault] = (), proxies: int = 1, **given: Any) -> SimulatedFleet:
    profile = profile_named("llama-8b-h100")
    facts: dict[str, Any] = {"kv_tokens": 40_000, "max_num_seqs": 16, "max_model_len": 8_000, **given}
    replicas = tuple(ReplicaSpec(f"gpu-{i}", "llama-8b-h100", profile, **facts) for i in range(count))
    return SimulatedFleet("small", replicas, tuple(faults), proxies)


def started(on: SimulatedFleet) -> dict[str, SimulatedServer]:
    """The servers of a fleet, on the loop that runs."""
    loop = asyncio.get_running_loop()
    replicas = {spec.name: SimulatedServer(spec, 1.0, 0, loop) for spec in on.replicas}
    for replica in replicas.values():
        replica.start()
    return replicas


def trace(arrivals: Iterable[Arrival]) -> Trace:
    fixed = tuple(arrivals)
    return Trace("small", lambda: iter(fixed), 64)


def traffic(count: int = 300, rate: float = 30.0, **given: Any) -> list[Arrival]:
    """Poisson arrivals of short prompts. A third of them share a prefix."""
    rng = Random(0)
    made, at_s = [], 0.0
    for number in range(count):
        at_s += rng.expovariate(rate)
        prompt = rng.randint(64, 900)
        shared = rng.random() < 0.33
        blocks = tuple((1 if shared and i < 6 else number + 10) * 1_000 + i for i in range(-(-prompt // 64)))
        one = Arrival(at_s, prompt, rng.randint(1, 150), blocks, tenant=f"t{rng.randint(0, 3)}")
        made.append(replace(one, **given))
    return made


def setup(
    arrivals: Iterable[Arrival],
    policy: str = "blend",
    on: SimulatedFleet | None = None,
    config: Config | None = None,
    seed: int = 1,
    prefill_scale: float = 1.0,
) -> Setup:
    arrivals = tuple(arrivals)
    adapters = sorted({one.adapter for one in arrivals if one.adapter is not None})
    return Setup(
        trace=trace(arrivals),
        fleet=on or fleet(),
        plan=plan_named(policy, config or Config()),
        config=config or Config(),
        seed=seed,
        prefill_scale=prefill_scale,
        duration_s=max((one.at_s for one in arrivals), default=0.0),
        adapters=tuple(adapters),
    )


def records_of(setup: Setup) -> list[Record]:
    """Returns every request of a replay in the order of the ends."""
    kept: list[Record] = []
    run(Run(setup, on_record=kept.append).go())
    return kept
