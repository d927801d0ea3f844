"""The log: one line per request, readable by people or machines, and nothing that a client can bend."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import structlog

from llmproxy.core.domain import GrantReason, Outcome
from llmproxy.observe.exit_fields import why_fields
from llmproxy.observe.logs import configure, log_exit, log_internal
from tests.exits import changed, exit_of

SERVED = exit_of(
    request_id="r1", method="POST", path="/v1/chat/completions", outcome=Outcome.COMPLETED, status=200,
    duration_s=3.00001, model="chat", target="base", band="default", flow="chat", stream=True, backend="gpu-0",
    attempts=1, candidates=2, terms=(("queue", 0.5), ("kv", 0.123456)), queue_wait_s=0.25, ttft_s=1.0, prompt_tokens=10,
    output_tokens=11, chunks=5,
)  # fmt: skip


def json_lines(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def configured(log_format: str, level: str = "info") -> io.StringIO:
    """Where lines go from now on."""
    out = io.StringIO()
    configure(log_format, level, out)
    return out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_is_a_list_in_either_form(kind: Callable[[list[str]], Sequence[str]]) -> None:
    fields = {"addresses": kind(["[::]:80", "0.0.0.0:81"]), "problems": kind(["a, b", 'c "d"\n']), "none": kind([])}
    out = configured("text")
    structlog.get_logger().info("event", **fields)
    words = 'addresses=[[::]:80,0.0.0.0:81] problems=["a, b","c \\"d\\"\\n"] none=[]\n'
    assert out.getvalue().partition(" event ")[2] == words
    out = configured("json")
    structlog.get_logger().info("event", **fields)
    (line,) = json_lines(out)
    assert [line[key] for key in fields] == [["[::]:80", "0.0.0.0:81"], ["a, b", 'c "d"\n'], []]


def test_a_set_is_a_list_too() -> None:
    for form, words in (("text", "names=[a,b]"), ("json", '"names":["a","b"]')):
        out = configured(form)
        structlog.get_logger().info("event", names=frozenset({"b", "a"}))
        assert words in out.getvalue()


def test_json_has_the_decision_in_one_line() -> None:
    out = configured("json")
    log_exit(SERVED)
    (line,) = json_lines(out)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "level": "info", "event": "request", "outcome": "completed", "status": 200, "model": "chat", "target": "base",
        "band": "default", "flow": "chat", "backend": "gpu-0", "attempts": 1, "queue_wait_s": 0.25, "ttft_s": 1.0,
        "duration_s": 3.0, "prompt_tokens": 10, "output_tokens": 11, "stream": True, "chunks": 5, "body_bytes": 0,
        "response_bytes": 0, "candidates": 2, "terms": {"queue": 0.5, "kv": 0.1235}, "method": "POST",
        "path": "/v1/chat/completions", "request_id": "r1",
    }  # fmt: skip


WHY = GrantReason(
    waiting=((100, 1), (0, 2)), flows=2, standing=(("counter", 3.00001),), passed_over=4, guaranteed=False
)


def test_the_reason_of_a_turn_is_logged_at_debug_only() -> None:
    for level in ("debug", "info"):
        out = configured("json", level)
        log_exit(changed(SERVED, why=WHY))
        (line,) = json_lines(out)
        assert line["level"] == "info"
        assert ("why" in line) == (level == "debug")
        if level == "debug":
            assert line["why"] == why_fields(WHY)


def test_line_names_the_tenant_and_its_objective() -> None:
    out = configured("json")
    log_exit(changed(SERVED, tenant="acme", preemptions=2, met=False, unknown_objective="gold"))
    (line,) = json_lines(out)
    fields = {key: line[key] for key in ("tenant", "preemptions", "met", "unknown_objective")}
    assert fields == {"tenant": "acme", "preemptions": 2, "met": False, "unknown_objective": "gold"}


def test_text_is_one_line_without_colours_where_there_is_no_terminal() -> None:
    out = configured("text")
    log_exit(changed(SERVED, error="two words"))
    (line,) = out.getvalue().splitlines()
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} info ", line)
    assert " info    request outcome=completed status=200 model=chat " in line
    assert " terms={queue:0.5,kv:0.1235} " in line
    assert line.endswith('request_id=r1 error="two words"')
    assert "\x1b" not in line


def test_text_is_coloured_on_a_terminal() -> None:
    out = Terminal()
    configure("text", "info", out)
    log_exit(SERVED)
    assert "\x1b[32minfo" in out.getvalue()


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_client_can_neither_forge_a_line_nor_speak_to_the_terminal(log_format: str) -> None:
    out = configured(log_format)
    log_exit(changed(SERVED, flow="x\nforged\x1b[2J", path="/\udcff", model='a "b"', error=""))
    structlog.get_logger().error("bad\nname\x1b[2J")
    text = out.getvalue()
    assert len(text.splitlines()) == 2
    assert "\x1b" not in text
    assert text.isascii()


@pytest.mark.parametrize(
    ("outcome", "level"),
    [(Outcome.INTERNAL, "error"), (Outcome.BROKEN_STREAM, "warning"), (Outcome.UPSTREAM_STATUS, "info")],
)
def test_own_faults_have_a_higher_level(outcome: Outcome, level: str) -> None:
    out = configured("json")
    log_exit(changed(SERVED, outcome=outcome))
    assert json_lines(out)[0]["level"] == level


def test_the_level_filters_and_the_last_configuration_counts() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure("json", "info", first)
    configure("json", "warning", second)
    log_exit(SERVED)
    structlog.get_logger().warning("draining", backend="gpu-0")
    assert first.getvalue() == ""
    assert [line["event"] for line in json_lines(second)] == ["draining"]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_an_exception_is_logged_with_its_traceback(log_format: str) -> None:
    out = configured(log_format)
    try:
        raise ValueError("broken\x1b[2J")
    except ValueError as error:
        log_internal("r1", error)
    assert "error" in out.getvalue()
    assert "r1" in out.getvalue()
    assert "in test_an_exception_is_logged_with_its_traceback" in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_library_logs_have_the_same_form_and_come_once() -> None:
    out = io.StringIO()
    configure("json", "info", io.StringIO())
    configure("json", "info", out)
    logging.getLogger("some.library").warning("odd %s", "thing")
    logging.getLogger("some.library").info("chatter")
    (line,) = json_lines(out)
    assert (line["event"], line["logger"], line["level"]) == ("odd thing", "some.library", "warning")


def test_a_lost_stream_does_not_fail_the_request() -> None:
    out = configured("text")
    log_exit(SERVED)
    out.close()
    log_exit(SERVED)


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="known: text, json"):
        configure("xml", "info", io.StringIO())
    with pytest.raises(KeyError):
        configure("text", "loud", io.StringIO())
