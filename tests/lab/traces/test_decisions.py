"""Decision logs read as traces: their order, their starts, the lengths that nobody saw, and lines that were cut off."""

from __future__ import annotations

import gzip
import json
from heapq import heappush
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from llmproxy.core.domain import GrantReason, Outcome, Slo
from llmproxy.lab.traces import arrival as arrival_module
from llmproxy.lab.traces import open_trace, survey
from llmproxy.lab.traces.arrival import Arrival, TraceError
from llmproxy.observe.exit_fields import decision_fields
from tests.exits import exit_of
from tests.lab.traces.conftest import Saved, complaint, read

START = {"llmproxy_decisions": 1, "wall_time": "2026-11-21T10:00:00+00:00"}
NEXT_DAY = {"llmproxy_decisions": 1, "wall_time": "2026-11-22T10:00:00+00:00"}


def line(at_s: float, output_tokens: int | None = 5, **given: Any) -> dict[str, Any]:
    facts = {"at_s": at_s, "prompt_tokens": 10, "model": "m", "request_id": f"r{at_s}", "outcome": "completed"}
    facts |= {} if output_tokens is None else {"output_tokens": output_tokens}
    return facts | given


def times(path: Path) -> list[float]:
    return [arrival.at_s for arrival in read(path)]


def test_what_the_proxy_writes_can_be_read(saved: Saved) -> None:
    ended = exit_of(
        request_id="r1",
        method="POST",
        path="/v1/chat/completions",
        outcome=Outcome.COMPLETED,
        status=200,
        duration_s=3.0,
        model="chat",
        adapter="sql",
        stream=True,
        tenant="acme",
        band="urgent",
        level=50,
        flow="acme+chat",
        max_wait_s=9.0,
        slo=Slo(0.5, 0.01),
        why=GrantReason(((50, 1),), 1, (("counter", 0.0),), 0),
        terms=(("queue", 1.0),),
        arrived_s=100.0,
        expected_prompt_tokens=12,
        prompt_tokens=10,
        output_tokens=11,
    )
    (arrival,) = read(saved(START, decision_fields(ended, 90.0)))
    assert arrival == Arrival(
        0.0, 10, 11, tenant="acme", adapter="sql", band=50, max_wait_s=9.0, ttft_slo_s=0.5, tpot_slo_s=0.01
    )


def test_a_request_that_is_no_stream_gets_a_whole_answer(saved: Saved) -> None:
    path = saved(START, line(1.0, stream=True), line(2.0, stream=False), line(3.0))
    assert [arrival.whole for arrival in read(path)] == [False, True, False]


def test_no_more_is_held_than_arrived_within_the_longest_request(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(START, *[line(float(i - 3 * (i % 2))) for i in range(3, 503)])
    most = 0

    def push(heap: Any, item: Any) -> None:
        nonlocal most
        heappush(heap, item)
        most = max(most, len(heap))

    monkeypatch.setattr(arrival_module, "heappush", push)
    assert times(path) == sorted(times(path))
    assert most <= 6


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        # In the order of the ends, and sorted by arrival.
        ((START, *map(line, (5.0, 3.0, 4.0, 9.0, 7.0, 8.0, 20.0, 9.0))), [0.0, 1.0, 2.0, 4.0, 5.0, 6.0, 6.0, 17.0]),
        ((START, line(3601.5), line(3600.0)), [0.0, 1.5]),
        # A new start goes on at its wall time, and a clock that was set back does not turn the order.
        ((START, line(1.0), line(2.0), NEXT_DAY, line(0.5)), [0.0, 1.0, 86_399.5]),
        ((NEXT_DAY, line(1.0), line(2.0), START, line(0.5)), [0.0, 1.0, 1.5]),
        # A piece of a log has no header.
        ((line(7.0), line(6.0), START, line(1.0)), [0.0, 1.0, 2.0]),
        # A line that was cut off when the proxy was killed is skipped.
        ((START, line(1.0), '{"at_s": 1.5, "pro', NEXT_DAY, line(0.0), '{"at_s"'), [0.0, 86_399.0]),
    ],
)
def test_times_count_from_the_first_arrival(
    saved: Saved, lines: tuple[dict[str, Any] | str, ...], found: list[float]
) -> None:
    assert times(saved(*lines)) == found


def test_a_zipped_log(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl.gz"
    path.write_bytes(gzip.compress(f"{json.dumps(START)}\n{json.dumps(line(1.0))}\n".encode()))
    assert open_trace(path).name == "decisions"
    assert times(path) == [0.0]


def test_a_request_without_an_answer_takes_the_mean_of_its_model(saved: Saved) -> None:
    path = saved(
        START,
        line(0.0, 10),
        line(1.0, 21),
        line(2.0, 100, model="other"),
        line(3.0, None, outcome="expired"),
        line(4.0, None, model="other"),
        line(5.0, None, model="third"),
        line(6.0, 0, outcome="cancelled"),
    )
    answers = [(arrival.output_tokens, arrival.guessed) for arrival in read(path)]
    assert answers == [(10, False), (21, False), (100, False), (16, True), (100, True), (44, True), (16, True)]
    assert survey(open_trace(path)).guessed == 4


def test_what_is_complete_without_an_answer_is_given_the_least(saved: Saved) -> None:
    assert [(a.output_tokens, a.guessed) for a in read(saved(START, line(0.0, 0)))] == [(1, False)]


def test_the_tenant_is_the_flow_where_a_client_has_none(saved: Saved) -> None:
    path = saved(START, line(0.0, tenant="acme", flow="x"), line(1.0, flow="x"), line(2.0, flow=""), line(3.0))
    assert [arrival.tenant for arrival in read(path)] == ["acme", "x", "default", "default"]


def test_only_the_first_line_is_looked_at_before_it_is_read(saved: Saved) -> None:
    trace = open_trace(saved(START, "torn", line(1.0)))
    with pytest.raises(TraceError):
        list(islice(trace.arrivals(), 1))


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ((START,), "trace.data: no requests: there is nothing below the first line"),
        ((START, line(0.0, None)), "trace.data: no request got an answer, so that the length of one is unknown"),
        ((START, '{"at', line(1.0)), "trace.data:2: not valid JSON"),
        ((START, '{"at', "{", NEXT_DAY), "trace.data:2: not valid JSON"),
        ((START, line(-1.0)), "trace.data:2: at_s is -1.0; times count"),
        ((START, {"prompt_tokens": 1}), "trace.data:2: at_s is null; should be a number"),
        ((START, line(0.0, prompt_tokens=0)), "trace.data:2: prompt_tokens is 0; should be 1 to"),
        ((START, line(0.0) | {"output_tokens": "5"}), 'trace.data:2: output_tokens is "5"; should be an integer'),
        ((START, line(0.0, tenant=3)), "trace.data:2: tenant is 3; should be a text"),
        (({"llmproxy_decisions": 2},), "trace.data:1: llmproxy_decisions is not 1"),
        (({"llmproxy_decisions": 1},), "trace.data:1: wall_time should be like 2027"),
        (({**START, "wall_time": "2026-11-21T10:00:00"},), "trace.data:1: wall_time should be like 2027"),
        (({**START, "wall_time": 3},), "trace.data:1: wall_time should be like 2027"),
    ],
)
def test_what_cannot_be_replayed_is_reported_with_its_line(
    saved: Saved, lines: tuple[dict[str, Any] | str, ...], reason: str
) -> None:
    assert complaint(saved(*lines)).startswith(reason)


def test_a_record_with_blocks_shares_prefixes(saved: Saved) -> None:
    path = saved(START | {"block_tokens": 16}, line(0.0, blocks=[7, 8]), line(1.0, blocks=[7]))
    trace = open_trace(path)
    assert trace.block_tokens == 16
    assert [arrival.blocks for arrival in trace.arrivals()] == [(7, 8), (7,)]


def test_a_wrong_size_of_blocks_is_named(saved: Saved) -> None:
    path = saved(START | {"block_tokens": 0}, line(0.0))
    with pytest.raises(TraceError, match=r":1: block_tokens is 0"):
        open_trace(path)
