"""The decision log: the content of a line, the sample of requests, and that no disk blocks or fails a request."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from datetime import datetime
from io import FileIO
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from structlog.testing import capture_logs

from llmproxy.core.domain import GrantReason, Outcome, Predicted, Slo
from llmproxy.observe import decisions, writer
from llmproxy.observe.decisions import DecisionLog, open_to_append
from llmproxy.observe.exit import RequestExit
from llmproxy.observe.exit_fields import decision_fields
from tests.exits import changed, exit_of

SERVED = exit_of(
    request_id="r1", method="POST", path="/v1/chat/completions", outcome=Outcome.COMPLETED, status=200, duration_s=3.0,
    model="chat", target="sql", adapter="sql", tenant="acme", band="critical", level=100, flow="acme+chat",
    max_wait_s=60.0,
    slo=Slo(ttft_s=0.5), met=False, stream=True, backend="gpu-0", attempts=2, preemptions=1,
    why=GrantReason(waiting=((100, 3), (0, 7)), flows=2, standing=(("counter", 12.00001),), passed_over=1,
                    guaranteed=True),
    candidates=2, terms=(("queue", 0.5), ("kv", 0.25)), arrived_s=1010.0, granted_s=1010.25, queued_ahead=9,
    queue_wait_s=0.25, ttft_s=1.0, expected_prompt_tokens=12, prompt_tokens=10, cached_tokens=4, output_tokens=11,
    expected_cached_tokens=5, predicted_ttft=Predicted(0.6, 0.9), predicted_tpot=Predicted(0.1500001, 0.25),
)  # fmt: skip
REFUSED = exit_of(
    request_id="r2", method="POST", path="/v1/chat/completions", outcome=Outcome.REJECTED_CAPACITY, status=429,
    duration_s=0.0, model="chat", level=0, band="default", flow="chat", max_wait_s=60.0, arrived_s=1000.5,
    expected_prompt_tokens=12,
)  # fmt: skip
UNREAD = exit_of(
    request_id="r3", method="POST", path="/v1/completions", outcome=Outcome.BAD_REQUEST, status=400, duration_s=0.0
)


class Log:
    """A decision log in a file; `lost` counts the lines that it lost."""

    def __init__(self, path: Path, sample: float = 1.0, file: FileIO | None = None) -> None:
        self.path = path
        self.lost = 0
        self.log = DecisionLog(file or open_to_append(path), sample, 1000.0, self._lose)

    def _lose(self, lines: int) -> None:
        self.lost += lines

    def after(self, *ended: RequestExit) -> list[dict[str, Any]]:
        """All lines of the file when these have ended and the log is closed."""
        for one in ended:
            self.log.record(one)
        self.log.close()
        return lines(self.path)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "decisions.jsonl"


def test_a_line_is_a_request_of_a_trace_and_the_decision_about_it(path: Path) -> None:
    header, line = Log(path).after(SERVED)
    assert header["llmproxy_decisions"] == 1
    assert datetime.fromisoformat(header["wall_time"]).utcoffset() is not None
    assert line == {
        "at_s": 10.0,
        "prompt_tokens": 10,
        "output_tokens": 11,
        "tenant": "acme",
        "model": "chat",
        "adapter": "sql",
        "criticality": 100,
        "max_wait_s": 60.0,
        "ttft_slo_s": 0.5,
        "request_id": "r1",
        "outcome": "completed",
        "status": 200,
        "backend": "gpu-0",
        "band": "critical",
        "flow": "acme+chat",
        "stream": True,
        "queue_wait_s": 0.25,
        "ttft_s": 1.0,
        "tpot_s": 0.2,
        "met": False,
        "attempts": 2,
        "preemptions": 1,
        "granted_at_s": 10.25,
        "ended_at_s": 13.0,
        "queued_ahead": 9,
        "why": {
            "waiting": {"100": 3, "0": 7},
            "flows": 2,
            "standing": {"counter": 12.0},
            "passed_over": 1,
            "guaranteed": True,
        },
        "candidates": 2,
        "placement": {"queue": 0.5, "kv": 0.25},
        "predicted": {"cached_tokens": 5, "ttft_s": 0.6, "ttft_p90_s": 0.9, "tpot_s": 0.15, "tpot_p90_s": 0.25},
        "cached_tokens": 4,
    }


def test_refused_request_is_logged_with_its_facts(path: Path) -> None:
    _, line = Log(path).after(REFUSED)
    assert line == {
        "at_s": 0.5, "prompt_tokens": 12, "model": "chat", "criticality": 0, "max_wait_s": 60.0, "request_id": "r2",
        "outcome": "rejected_capacity", "status": 429, "band": "default", "flow": "chat", "stream": False,
        "attempts": 0, "preemptions": 0, "ended_at_s": 0.5,
    }  # fmt: skip


def test_a_missing_prediction_is_left_out() -> None:
    several = decision_fields(changed(SERVED, predicted_tpot=None), 0.0)
    assert several["predicted"] == {"cached_tokens": 5, "ttft_s": 0.6, "ttft_p90_s": 0.9}
    nothing = changed(SERVED, expected_cached_tokens=None, predicted_ttft=None, predicted_tpot=None)
    assert "predicted" not in decision_fields(nothing, 0.0)


def test_request_outside_the_waiting_room_has_no_line(path: Path) -> None:
    assert len(Log(path).after(UNREAD)) == 1


def test_a_name_that_is_no_text_still_makes_a_line(path: Path) -> None:
    _, line = Log(path).after(changed(SERVED, flow="caf\udce9"))
    assert line["flow"] == "caf?"


def test_the_sample_is_the_same_in_every_log(tmp_path: Path) -> None:
    ended = [changed(SERVED, request_id=f"id-{i}") for i in range(2_000)]
    few, again, many = (
        {line["request_id"] for line in Log(tmp_path / name, sample).after(*ended)[1:]}
        for name, sample in (("few", 0.2), ("again", 0.2), ("many", 0.5))
    )
    assert few == again < many
    assert 300 < len(few) < 500
    assert 900 < len(many) < 1_100
    assert len(Log(tmp_path / "none", 0.0).after(*ended)) == 1
    assert len(Log(tmp_path / "all", 1.0).after(*ended)) == 2_001


def test_second_start_appends_after_a_cut_line(path: Path) -> None:
    path.write_bytes(b'{"at_s": 1.0, "prom')
    log = Log(path)
    log.log.record(SERVED)
    log.log.close()
    torn, *whole = [line for line in path.read_text().splitlines() if line]
    assert torn == '{"at_s": 1.0, "prom'
    assert [next(iter(json.loads(line))) for line in whole] == ["llmproxy_decisions", "outcome"]


def test_a_second_start_leaves_no_line_empty(path: Path) -> None:
    for _ in range(2):
        Log(path).after(SERVED)
    kinds = [next(iter(json.loads(line))) for line in path.read_text().splitlines()]
    assert kinds == ["llmproxy_decisions", "outcome"] * 2


# --- disks that fail --------------------------------------------------------------------------------------------------


class Disk(FileIO):
    """A file whose next writes are done by `plans`; each gets the bytes, and None means as usual."""

    def __init__(self, path: Path, *plans: Callable[[FileIO, Any], int] | None) -> None:
        super().__init__(path, "ab")
        self._plans = list(plans)

    def write(self, data: Any) -> int:
        plan = self._plans.pop(0) if self._plans else None
        return super().write(data) if plan is None else plan(self, data)


def full_disk(_: FileIO, __: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_slow_disk_costs_lines_and_no_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "LINES_MAX", 300)
    stuck, free = Event(), Event()

    def slow(file: FileIO, data: Any) -> int:
        stuck.set()
        free.wait(30.0)
        return FileIO.write(file, data)

    disk = Disk(path, None, slow)
    log = Log(path, file=disk)
    log.log.record(SERVED)
    assert stuck.wait(30.0), "the first line is written at once"
    for _ in range(350):
        log.log.record(SERVED)
    assert log.lost == 50
    free.set()
    assert len(log.after()) == 1 + 1 + 300


def test_a_full_disk_is_logged_once_and_loses_its_lines(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "WRITE_BYTES", 1)
    # The log takes a few bytes of the second line before the disk is full.
    disk = Disk(path, None, None, lambda file, data: FileIO.write(file, data[:9]), full_disk, full_disk, None)
    with capture_logs() as logged:
        log = Log(path, file=disk)
        for name in ("a", "b", "c", "d"):
            log.log.record(changed(SERVED, request_id=name))
        log.log.close()
    assert log.lost == 2
    assert [event["event"] for event in logged] == ["decision_log_failed", "decision_log_resumed"]
    assert logged[0]["error"] == "[Errno 28] No space left on device"
    assert logged[1]["lost"] == 2
    header, first, torn, last = path.read_text().splitlines()
    assert [json.loads(line)["request_id"] for line in (first, last)] == ["a", "d"]
    assert len(torn) == 9
    assert "llmproxy_decisions" in header


def test_a_disk_that_takes_little_at_a_time_gets_everything(path: Path) -> None:
    disk = Disk(path, None, *[lambda file, data: FileIO.write(file, data[:7])] * 20)
    assert [line.get("request_id") for line in Log(path, file=disk).after(SERVED, REFUSED)] == [None, "r1", "r2"]


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "log", Path("/dev/null")):
        with pytest.raises(OSError):  # noqa: PT011 - its kind is the system's
            open_to_append(path)
    with pytest.raises(OSError, match="No space"):
        Log(tmp_path / "log", file=Disk(tmp_path / "log", full_disk))


def test_no_line_has_a_key_of_a_trace_that_means_something_else() -> None:
    assert (
        decision_fields(changed(SERVED, slo=None, why=None, tenant="", terms=()), 0.0)
        .keys()
        .isdisjoint({"tenant", "ttft_slo_s", "tpot_slo_s", "why", "placement", "blocks", "deadline_s"})
    )
