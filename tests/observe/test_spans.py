"""The thread that sends spans: batches, lost spans, and its end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from structlog.testing import capture_logs

from llmproxy.config import Config, ConfigError
from llmproxy.core.domain import Outcome
from llmproxy.observe import spans
from llmproxy.observe.exit import RequestExit
from llmproxy.observe.spans import SpanExport, check, exporter_class
from llmproxy.observe.trace_context import TraceContext
from tests.exits import exit_of


def ended(*, sampled: bool = True) -> RequestExit:
    """A request that was refused before it waited, and so has one span."""
    one = exit_of(request_id="r", method="POST", path="/", outcome=Outcome.BAD_REQUEST, status=400, duration_s=0.1)
    one.trace = TraceContext("a" * 32, "b" * 16, "", sampled)
    return one


class Exporter(SpanExporter):
    """Takes batches when `open` is set, with the `results` that were given, SUCCESS where they are used up."""

    def __init__(self, *results: SpanExportResult) -> None:
        self.open = threading.Event()
        self.open.set()
        self.results = list(results)
        self.batches: list[int] = []
        self.shut_down = False

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        self.open.wait(10)
        if self.shut_down:
            return SpanExportResult.FAILURE
        self.batches.append(len(spans))
        return self.results.pop(0) if self.results else SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.shut_down = True
        self.open.set()


def exporting(
    exporter: Exporter, each: Callable[[RequestExit], list[Any]] = lambda one: [one]
) -> tuple[SpanExport, list[int]]:
    lost: list[int] = []
    return SpanExport(exporter, each, lost.append), lost


def eventually(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.002)


def test_only_sampled_spans_are_sent_and_closing_sends_the_rest() -> None:
    exporter = Exporter()
    export, lost = exporting(exporter)
    untraced = ended()
    untraced.trace = None
    for one in (ended(), ended(sampled=False), untraced, ended()):
        export.record(one)
    export.close()
    assert (sum(exporter.batches), lost) == (2, [])


def test_no_batch_is_larger_than_the_bound() -> None:
    exporter = Exporter()
    export, lost = exporting(exporter, lambda one: [one] * 50)
    for _ in range(3):
        export.record(ended())
    export.close()
    assert sum(exporter.batches) == 150
    assert max(exporter.batches) == spans.BATCH_SPANS
    assert lost == []


def test_a_batch_that_is_not_full_is_sent_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "LINGER_S", 0.01)
    exporter = Exporter()
    export, _ = exporting(exporter)
    export.record(ended())
    eventually(lambda: exporter.batches == [1])
    export.close()


def test_waiting_spans_are_bounded_and_lost_ones_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "REQUESTS_MAX", 10)
    monkeypatch.setattr(spans, "LINGER_S", 0.01)
    exporter = Exporter()
    exporter.open.clear()
    export, lost = exporting(exporter)
    export.record(ended())
    eventually(lambda: export._ended.qsize() == 0)
    time.sleep(0.05)
    for _ in range(1_000):
        export.record(ended())
    assert export._ended.qsize() == 10
    assert sum(lost) == 990
    exporter.open.set()
    export.close()
    assert (sum(exporter.batches), sum(lost)) == (11, 990)


def test_closing_does_not_wait_for_a_receiver_that_hangs() -> None:
    exporter = Exporter()
    exporter.open.clear()
    export, lost = exporting(exporter)
    for _ in range(100):
        export.record(ended())
    began_s = time.monotonic()
    export.close(0.1)
    assert time.monotonic() - began_s < 2
    export._thread.join(5)
    assert not export._thread.is_alive()
    assert sum(lost) + sum(exporter.batches) == 100
    assert sum(lost) > 0


def test_a_failure_is_logged_once_and_so_is_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "BATCH_SPANS", 1)
    exporter = Exporter(SpanExportResult.FAILURE, SpanExportResult.FAILURE)

    def made(one: RequestExit) -> list[Any]:
        if one.request_id == "bug":
            raise RuntimeError("no tree")
        return [one]

    bug = ended()
    bug.request_id = "bug"
    with capture_logs() as events:
        export, lost = exporting(exporter, made)
        for one in (ended(), ended(), bug, ended(), ended()):
            export.record(one)
        export.close()
    assert sum(lost) == 3
    assert [(event["event"], event.get("lost")) for event in events] == [("spans_lost", None), ("spans_resumed", 3)]


def test_a_protocol_that_is_not_there_is_an_error_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    grpc = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConfigError, match="pip install opentelemetry-exporter-otlp-proto-grpc"):
        exporter_class(grpc)
    assert exporter_class(grpc | {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}).__name__ == "OTLPSpanExporter"
    with pytest.raises(ConfigError, match="'smoke' is unknown; known are http/protobuf, grpc"):
        exporter_class({"OTEL_EXPORTER_OTLP_PROTOCOL": "smoke"})


def test_without_the_extra_an_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    check(Config())
    with pytest.raises(ConfigError, match=r"tracing: needs OpenTelemetry .* pip install 'llmproxy-lb\[otel\]'"):
        check(Config(tracing=True))
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    check(Config(tracing=True))
