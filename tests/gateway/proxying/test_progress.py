"""Open streams report their progress in one sweep, a few in each turn of the loop."""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter
from typing import Any

import pytest

from llmproxy.gateway.proxying import stream_relay
from llmproxy.gateway.proxying.stream_relay import PROGRESS_S, ProgressReports
from llmproxy.lifecycle.paced import CALLS
from tests.dispatching import virtual

STREAMS = 1_000


class Turns:
    """Counts the reports of each turn of the loop."""

    def __init__(self) -> None:
        self.turn = 0
        self.reports = Counter[int]()

    def count(self) -> None:
        if not self.reports[self.turn]:
            asyncio.get_running_loop().call_soon(self._end)
        self.reports[self.turn] += 1

    def _end(self) -> None:
        self.turn += 1


class Stream:
    """Counts its reports."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.reports = 0

    def report(self) -> None:
        self.reports += 1
        self._turns.count()


def opened(reports: ProgressReports, turns: Turns) -> list[Any]:
    streams: list[Any] = [Stream(turns) for _ in range(STREAMS)]
    for stream in streams:
        reports.add(stream)
    return streams


@virtual
async def test_all_open_streams_report_in_each_sweep() -> None:
    reports, turns = ProgressReports(), Turns()
    streams = opened(reports, turns)
    await asyncio.sleep(2.5 * PROGRESS_S)
    assert {stream.reports for stream in streams} == {2}
    assert max(turns.reports.values()) <= CALLS
    for stream in streams[1:]:
        reports.remove(stream)
    await asyncio.sleep(PROGRESS_S)
    assert (streams[0].reports, streams[1].reports) == (3, 2)


@virtual
async def test_a_stream_that_ends_in_a_sweep_reports_nothing_more() -> None:
    """Its lease may have been returned."""
    reports = ProgressReports()
    streams = opened(reports, Turns())
    asyncio.get_running_loop().call_at(PROGRESS_S, reports.remove, streams[-1])
    await asyncio.sleep(1.5 * PROGRESS_S)
    assert (streams[0].reports, streams[-2].reports, streams[-1].reports) == (1, 1, 0)


@virtual
async def test_a_loop_too_busy_for_a_sweep_in_time_keeps_no_stream_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_relay, "PROGRESS_S", 0.0)
    reports = ProgressReports()
    streams = opened(reports, Turns())
    for _ in range(50):
        await asyncio.sleep(0)
    ended = weakref.ref(streams[0])
    while streams:
        reports.remove(streams.pop())
    for _ in range(2 * STREAMS // CALLS):
        await asyncio.sleep(0)
    assert ended() is None
