"""Log lines about the state of backends are stored, at every level of the log."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from functools import partial
from threading import Thread
from typing import Any, cast

import pytest
import structlog

from llmproxy.core.domain import Outcome
from llmproxy.observe import logs
from llmproxy.observe.live.events import EVENTS_MAX, TEXT_CHARS_MAX, Events
from llmproxy.observe.live.recorder import Recorder
from llmproxy.observe.logs import heard_by, log_exit
from tests.exits import exit_of

log = structlog.get_logger()


@pytest.fixture
def output() -> Iterator[io.StringIO]:
    yield io.StringIO()
    structlog.reset_defaults()


def heard(level: str, output: io.StringIO) -> list[tuple[str, str, object]]:
    logs.configure("text", level, output)
    found: list[tuple[str, str, object]] = []
    with heard_by(lambda at, name, fields: found.append((at, name, fields.get("backend")))):
        log.debug("detail")
        log.info("backend_up", backend="gpu-0")
        log.warning("backend_down", backend="gpu-1")
        log.error("reload_failed")
    log.info("backend_up", backend="gpu-2")
    return found


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_a_listener_hears_from_info_on_whatever_is_written(level: str, output: io.StringIO) -> None:
    assert heard(level, output) == [
        ("info", "backend_up", "gpu-0"),
        ("warning", "backend_down", "gpu-1"),
        ("error", "reload_failed", None),
    ]
    written = [word for word in ("detail", "backend_up", "backend_down", "reload_failed") if word in output.getvalue()]
    assert len(written) == {"debug": 4, "info": 3, "warning": 2, "error": 1}[level]


def test_requests_are_no_events(output: io.StringIO) -> None:
    logs.configure("json", "info", output)
    found: list[str] = []
    with heard_by(lambda _, name, __: found.append(name)):
        log_exit(
            exit_of(request_id="r", method="POST", path="/", outcome=Outcome.COMPLETED, status=200, duration_s=1.0)
        )
        log.info("request", request_id="r")
    assert found == []


async def test_a_thread_has_lines_too(output: io.StringIO) -> None:
    logs.configure("text", "info", output)
    recorder = Recorder(cast(Any, None), lambda: (), dict)
    with heard_by(recorder.heard):
        await asyncio.to_thread(log.warning, "spans_lost", why="it is gone")
        await asyncio.sleep(0)
        log.info("backend_up", backend="gpu-0")
    assert [event.name for event in recorder.events.newest_first()] == ["backend_up", "spans_lost"]


def test_a_thread_outlives_the_loop(output: io.StringIO) -> None:
    logs.configure("text", "info", output)

    async def made() -> Recorder:
        return Recorder(cast(Any, None), lambda: (), dict)

    thread = Thread(target=partial(log.warning, "spans_lost"))
    with heard_by(asyncio.run(made()).heard):
        thread.start()
        thread.join()
    assert "spans_lost" in output.getvalue()


def test_an_event_has_the_fields_of_its_line_and_the_newest_comes_first() -> None:
    events = Events()
    events.note("warning", "backend_down", {"event": "x", "level": "y", "backend": "gpu-1", "why": "it hung"}, 5.0)
    events.note("info", "reloaded", {"changes": 2}, 6.0)
    last, first = events.newest_first()
    assert (last.name, last.text, last.backend, last.serial) == ("reloaded", "changes=2", None, 2)
    assert (first.text, first.backend, first.why, first.at_s) == (
        'backend=gpu-1 why="it hung"', "gpu-1", "it hung", 5.0,
    )  # fmt: skip
    assert events.last == 2


def test_they_are_bounded() -> None:
    events = Events()
    for i in range(EVENTS_MAX + 10):
        events.note("info", "n" * 500, {"why": "x" * 100_000, "i": i}, 0.0)
    kept = list(events.newest_first())
    assert len(kept) == EVENTS_MAX
    assert kept[0].serial == EVENTS_MAX + 10
    assert len(kept[0].text) <= TEXT_CHARS_MAX + 3
    assert len(kept[0].why) <= TEXT_CHARS_MAX
    assert len(kept[0].name) <= 100
