"""The parts of `benchmarks/live.py`, so that it still runs when somebody needs its figures."""

from __future__ import annotations

from random import Random

from benchmarks.live import exits, fleet, seconds_of


async def test_requests_of_the_benchmark_are_remembered() -> None:
    recorder = fleet(3)
    assert seconds_of(recorder, 1, [exits(Random(1), 5, backends=3, flows=2)]) == 2
    assert recorder.minute.total.kind("completed") == 5
    assert {flow for _, flow in recorder.minute.total.flows} <= {"flow-0", "flow-1"}
