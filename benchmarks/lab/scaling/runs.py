"""One workload under one signal. Runs are kept by the code and the numbers that they depend on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import orjson

from benchmarks.lab.scaling.workloads import TPOT_S, WORKLOADS, Workload
from benchmarks.lab.scenarios.store import PACKAGE, code_files
from llmproxy.config import Config
from llmproxy.core.scaling.need import KV_MARGIN
from llmproxy.lab.fleet.fleet_file import fleet_named
from llmproxy.lab.fleet.spec import Autoscale, ReplicaSpec
from llmproxy.lab.policies.by_name import plan_named
from llmproxy.lab.results.record import Record
from llmproxy.lab.results.result import RunResult, Trail
from llmproxy.lab.run.replay import Run, Setup
from llmproxy.lab.run.runs import Finished
from llmproxy.lab.run.virtual_time import run
from llmproxy.lab.scaling.signals import START_AHEAD_S, Future
from llmproxy.lab.traces.arrival import BASE_MODEL, Arrival, Trace

FLEET = "12xqwen-32b-h100-tp2"
MOST, START_S = 12, 110.0
AHEAD_S = {"oracle": START_S + START_AHEAD_S, "instant": 0.0}
WINDOW_S = 60.0
FROM_ZERO = frozenset({"ours"})
"""Signals that ask for the first replica; all others keep one."""


def work_of(arrival: Arrival, spec: ReplicaSpec) -> float:
    """Seconds of a replica that a request costs in a full batch of its like, as the profile of the engine has them."""
    profile, tokens = spec.profile, arrival.output_tokens
    held_tokens = arrival.prompt_tokens + tokens / 2.0
    seats = max(1, min(spec.max_num_seqs, int(KV_MARGIN * spec.kv_tokens / held_tokens)))
    step_s = profile.step_s(seats, round(seats * held_tokens), [])
    beside_s = profile.step_s(seats, round(seats * held_tokens), [(0, arrival.prompt_tokens)]) - step_s
    return beside_s + tokens * step_s / seats


def simulated(
    name: str, signal: str, seed: int, on_record: Callable[[Record], None] = lambda _: None, utilisation: float = 0.8
) -> tuple[Run, Finished]:
    """One run, and its result."""
    workload = WORKLOADS[name]
    came, least = workload.arrivals(seed), _least(workload, signal)
    scaling = {
        "target_tpot_s": TPOT_S, "start_s": START_S, "min": least, "max": MOST, "pools": [BASE_MODEL],
        "utilisation": utilisation,
    }  # fmt: skip
    config = Config.model_validate({"backends": [{"url": "http://a:1"}], "scaling": scaling, **workload.settings})
    fleet = replace(fleet_named(FLEET), autoscale=Autoscale(signal, least, START_S))
    setup = Setup(
        Trace(name, lambda: iter(came)), fleet, plan_named("cost", config), config, seed, 1.0, workload.lasts_s, ()
    )
    one = Run(setup, on_record=on_record)
    if signal in AHEAD_S:
        works = [(arrival.at_s, work_of(arrival, fleet.replicas[0])) for arrival in came if arrival.band == "default"]
        one.future = Future(works, AHEAD_S[signal], WINDOW_S)
    recorder = run(one.go())
    return one, Finished(recorder.result(signal, seed, 1.0, 1.0), recorder.trail())


def _least(workload: Workload, signal: str) -> int:
    return workload.least if signal in FROM_ZERO else max(1, workload.least)


def kept(folder: Path, name: str, signal: str, seed: int) -> Finished:
    """The run, from the folder if the very same was made before."""
    workload = WORKLOADS[name]
    numbers = repr((workload.arrivals(seed), workload.lasts_s, workload.least, workload.settings))
    parts = (_digest(signal == "ours"), numbers, signal, str(seed))
    path = folder / f"{name}-{signal}-{seed}-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:16]}.json"
    if path.exists():
        found = orjson.loads(path.read_bytes())
        return Finished(RunResult.model_validate(found["run"]), Trail.model_validate(found["trail"]))
    finished = simulated(name, signal, seed)[1]
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{signal}.part")
    part.write_bytes(orjson.dumps({"run": finished.run.model_dump(), "trail": finished.trail.model_dump()}))
    part.rename(path)
    return finished


@cache
def _digest(ours: bool) -> str:
    """Of the code that a run passes through. Only our number is found in `core/scaling`."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in code_files():
        if ours or path.parent != PACKAGE / "core" / "scaling":
            digest.update(path.read_bytes())
    return digest.hexdigest()
