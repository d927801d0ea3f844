"""Many runs on all cores: every policy at every load with every seed."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_longlong
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from llmproxy.config import Config
from llmproxy.lab.fleet.spec import SimulatedFleet
from llmproxy.lab.policies.by_name import plan_named
from llmproxy.lab.results.objectives import NOTHING_WANTED, Wanted
from llmproxy.lab.results.result import Point, RunResult, Trail
from llmproxy.lab.run.replay import Setup, replay
from llmproxy.lab.traces import PREFIX, Survey, replicated, scaled, sliced, survey, trace_named
from llmproxy.lab.traces.arrival import Trace
from llmproxy.lab.traces.mix import AS_IT_IS, Mix, mixed

LOOK_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class Simulation:
    """The inputs of a simulation, which can be sent to another process."""

    trace: str  # A file or a generator, as for `trace_named`.
    fleet: SimulatedFleet
    config: Config
    skip: int = 0  # Requests that are left out at the start of the trace.
    requests: int | None = None  # Requests that are used after these; None: all.
    replicate: int = 1  # Copies of the requests that are sent at once.
    warmup: float = 0.0  # Share of the time, 0..1, whose requests are not counted.
    mix: Mix = AS_IT_IS
    objectives_named: bool = False  # Whether each request sends its objectives, as in a trusted header.
    wanted: Wanted = NOTHING_WANTED  # Replaces the objectives of the fleet and of the trace.


@dataclass(frozen=True, slots=True)
class Finished:
    """A run with the data of its plots."""

    run: RunResult
    trail: Trail


def points(
    policies: Sequence[str], seeds: Sequence[int], rate_scales: Sequence[float], prefill_scales: Sequence[float]
) -> list[Point]:
    return [Point(p, s, r, f) for r, f, p, s in product(rate_scales, prefill_scales, policies, seeds)]


def prepared(simulation: Simulation, seed: int, rate_scale: float) -> tuple[Trace, Survey]:
    """Returns the trace of one run, and its survey. Raises TraceError.

    A part of a trace has the duration of the whole, so that both have the same warm-up.
    """
    # A file without copies is the same for every seed, so a large file is read once.
    loud = simulation.mix.loud
    seeded = simulation.trace.startswith(PREFIX) or simulation.replicate > 1 or loud is not None
    whole = Mix(loud=loud, factor=simulation.mix.factor)
    trace, found = _prepared(
        simulation.trace, simulation.skip, simulation.requests, simulation.replicate, whole, seed if seeded else 0
    )
    if simulation.mix != whole:
        trace = mixed(trace, replace(simulation.mix, loud=None), seed)
    if rate_scale == 1.0:
        return trace, found
    return scaled(trace, rate_scale), replace(found, duration_s=found.duration_s / rate_scale)


@lru_cache(maxsize=64)
def _prepared(
    text: str, skip: int, requests: int | None, replicate: int, whole: Mix, seed: int
) -> tuple[Trace, Survey]:
    trace = trace_named(text, seed)
    if skip or requests is not None:
        trace = sliced(trace, skip, requests)
    if replicate > 1:
        trace = replicated(trace, replicate, seed)
    if whole.loud is not None:
        trace = mixed(trace, whole, seed)
    return trace, survey(trace)


def run_one(simulation: Simulation, point: Point, progress: Callable[[int], None] = lambda _: None) -> Finished:
    """Simulates one point. Raises TraceError, and ValueError for an unknown policy."""
    trace, found = prepared(simulation, point.seed, point.rate_scale)
    setup = Setup(
        trace=trace,
        fleet=simulation.fleet,
        plan=plan_named(point.policy, simulation.config),
        config=simulation.config,
        seed=point.seed,
        prefill_scale=point.prefill_scale,
        duration_s=found.duration_s,
        adapters=tuple(sorted(found.adapters)),
        warmup_s=simulation.warmup * found.duration_s,
        objectives_named=simulation.objectives_named,
        wanted=simulation.wanted,
    )
    recorder = replay(setup, progress)
    run = recorder.result(point.policy, point.seed, point.rate_scale, point.prefill_scale)
    return Finished(run, recorder.trail())


def run_all(
    tasks: Sequence[tuple[Simulation, Point]],
    workers: int | None = None,
    progress: Callable[[Sequence[int]], None] = lambda _: None,
) -> Iterator[tuple[int, Finished]]:
    """Simulates all tasks in parallel. Yields (index, result) of each when it is ready.

    `progress` is called repeatedly with the number of ended requests of each task.
    """
    workers = min(len(tasks), workers or os.cpu_count() or 1)
    if workers <= 1:
        yield from _one_by_one(tasks, progress)
        return
    context = multiprocessing.get_context("spawn")
    ended: Any = context.Array(c_longlong, len(tasks), lock=False)
    todo = iter(enumerate(tasks))
    # Each worker has its own pipe. A terminated worker could leave a shared lock locked.
    busy: dict[Connection, SpawnProcess] = {}
    try:
        for _ in range(workers):
            here, there = context.Pipe()
            busy[here] = context.Process(target=_work, args=(there, ended), daemon=True)
            busy[here].start()
            there.close()
            here.send(next(todo))
        while busy:
            for one in wait(list(busy), LOOK_EVERY_S):
                assert isinstance(one, Connection)
                try:
                    answer = one.recv()
                except EOFError:
                    raise RuntimeError(f"a worker died: {busy[one]}") from None
                if isinstance(answer, BaseException):
                    raise answer
                if (task := next(todo, None)) is None:
                    idle = busy.pop(one)
                    one.close()
                    idle.join()
                else:
                    one.send(task)
                yield answer
            progress(list(ended))
    finally:
        # If the caller stops, by Ctrl-C or by an error, the runs stop too.
        for process in busy.values():
            process.kill()
            process.join()


def _one_by_one(
    tasks: Sequence[tuple[Simulation, Point]], progress: Callable[[Sequence[int]], None]
) -> Iterator[tuple[int, Finished]]:
    ended = [0] * len(tasks)
    for index, (simulation, point) in enumerate(tasks):

        def count_ended(count: int, index: int = index) -> None:
            ended[index] = count
            progress(ended)

        yield index, run_one(simulation, point, count_ended)


def _work(pipe: Connection, ended: Any) -> None:
    """Runs one task after another until the other end of the pipe is closed."""
    while True:
        try:
            index, (simulation, point) = pipe.recv()
        except EOFError:
            return

        def count_ended(count: int, index: int = index) -> None:
            ended[index] = count

        try:
            pipe.send((index, run_one(simulation, point, count_ended)))
        except Exception as error:  # noqa: BLE001 - the caller raises it
            pipe.send(error)
