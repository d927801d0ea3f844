"""Many runs: their order, the reads of their traces, and equal bytes from one process and from several."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from llmproxy.config import Config
from llmproxy.lab.results.result import Point, SimulationResult, to_bytes
from llmproxy.lab.run import runs
from llmproxy.lab.run.runs import Finished, Simulation, points, prepared, run_all, run_one
from llmproxy.lab.traces import trace_named
from llmproxy.lab.traces.arrival import Trace, TraceError
from tests.lab.small import fleet

GENERATOR = "gen:step_bursts,rate=10,duration_s=8,period_s=4,step_s=1"


@pytest.fixture(autouse=True)
def _nothing_read_yet() -> Iterator[None]:
    runs._prepared.cache_clear()
    yield
    runs._prepared.cache_clear()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A request every 0.1 s for 4 s."""
    path = tmp_path / "trace.jsonl"
    lines = ({"at_s": i / 10, "prompt_tokens": 100 + i, "output_tokens": 20, "tenant": f"t{i % 3}"} for i in range(41))
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Every trace that was looked up, with its seed."""
    prepared_traces: list[tuple[str, int]] = []

    def named(text: str, seed: int) -> Trace:
        prepared_traces.append((text, seed))
        return trace_named(text, seed)

    monkeypatch.setattr(runs, "trace_named", named)
    return prepared_traces


def simulation(trace: str | Path, replicate: int = 1, warmup: float = 0.0) -> Simulation:
    return Simulation(str(trace), fleet(2), Config(), replicate=replicate, warmup=warmup)


def test_points_are_ordered_by_load_policy_and_seed() -> None:
    assert points(("a", "b"), (1, 2), (0.5, 2.0), (1.0, 1.9)) == [
        Point(policy, seed, rate, prefill)
        for rate in (0.5, 2.0)
        for prefill in (1.0, 1.9)
        for policy in ("a", "b")
        for seed in (1, 2)
    ]


def test_a_file_is_read_once_for_all_seeds_and_rates(file: Path, read: list[tuple[str, int]]) -> None:
    found = {rate: prepared(simulation(file), seed, rate) for seed in (1, 2, 3) for rate in (1.0, 2.0)}
    assert len(read) == 1
    assert found[1.0][1].duration_s == 4.0
    assert found[2.0][1].duration_s == 2.0
    assert [one.at_s for one in found[2.0][0].arrivals()] == [one.at_s / 2.0 for one in found[1.0][0].arrivals()]
    assert found[1.0][1].count == found[2.0][1].count == 41


@pytest.mark.parametrize("copies", [1, 3])
def test_what_is_drawn_is_drawn_anew_for_every_seed(file: Path, read: list[tuple[str, int]], copies: int) -> None:
    what = simulation(file if copies > 1 else GENERATOR, copies)
    for rate in (1.0, 2.0):
        drawn = [[one.at_s for one in prepared(what, seed, rate)[0].arrivals()] for seed in (1, 2, 3)]
        assert drawn[0] != drawn[1] != drawn[2] != drawn[0]
    assert [seed for _, seed in read] == [1, 2, 3]


def test_a_part_of_a_trace_begins_at_its_first_request(file: Path) -> None:
    trace, found = prepared(Simulation(str(file), fleet(2), Config(), skip=10, requests=21), 1, 1.0)
    assert [one.prompt_tokens for one in trace.arrivals()] == list(range(110, 131))
    assert found.count == 21
    assert found.duration_s == pytest.approx(2.0)


def test_a_run_is_reported_under_its_point_and_without_its_warm_up(file: Path) -> None:
    point = Point("least_request", 7, 2.0, 1.9)
    run = run_one(simulation(file, warmup=0.48), point).run
    assert (run.policy, run.seed, run.rate_scale, run.prefill_scale) == ("least_request", 7, 2.0, 1.9)
    # The requests of the last 2.0 of 4 seconds.
    assert (run.offered, run.completed) == (21, 21)
    assert run_one(simulation(file), point).run.offered == 41


def test_a_policy_that_nobody_knows_stops_the_runs(file: Path) -> None:
    with pytest.raises(ValueError, match="unknown policy 'best'"):
        list(run_all([(simulation(file), Point("best", 1))]))


def as_bytes(finished: dict[int, Finished]) -> bytes:
    ordered = [finished[index] for index in sorted(finished)]
    trails = b"".join(one.trail.model_dump_json().encode() for one in ordered)
    return to_bytes(SimulationResult(runs=[one.run for one in ordered])) + trails


@pytest.mark.slow
def test_two_processes_give_the_bytes_of_one(file: Path) -> None:
    tasks = [
        (simulation(file), Point("blend", 1)),
        (simulation(GENERATOR), Point("random", 2, 2.0)),
        (simulation(file, copies := 2), Point("epp_sticky", 3, 1.0, 1.9)),
    ]
    ended: list[Sequence[int]] = []
    alone = dict(run_all(tasks, 1, lambda counts: ended.append(list(counts))))
    shared = dict(run_all(tasks, 2, lambda counts: ended.append(list(counts))))
    assert sorted(alone) == sorted(shared) == [0, 1, 2]
    assert [shared[i].run.point for i in range(3)] == [point for _, point in tasks]
    assert as_bytes(shared) == as_bytes(alone)
    counts = [alone[i].run.offered for i in range(3)]
    assert counts[0] * copies == counts[2]
    assert ended[-1] == counts
    assert counts in ended[: len(ended) - 1]


@pytest.mark.slow
def test_what_goes_wrong_in_another_process_reaches_the_caller(file: Path) -> None:
    what = simulation(file)
    prepared(what, 1, 1.0)
    file.unlink()
    # The other run would take long, and is not waited for.
    endless = simulation("gen:step_bursts,rate=50,duration_s=3000")
    with pytest.raises(TraceError, match=r"trace\.jsonl: cannot be read: No such file"):
        list(run_all([(what, Point("blend", 1)), (endless, Point("blend", 1))], 2))
