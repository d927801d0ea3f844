"""Exports the spans of finished requests by OTLP, on a thread, so that no request waits."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

import structlog

from llmproxy.config import Config, ConfigError
from llmproxy.observe.exit import RequestExit
from llmproxy.observe.trace_context import Sampler

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

BATCH_SPANS = 32
"""The maximum number of spans in a message.

Encoding more at once would block the event loop, which shares the interpreter lock with the thread.
"""
REQUESTS_MAX = 2_048
"""The maximum number of requests that wait for the thread. Spans of further requests are dropped and counted."""
LINGER_S = 0.5  # How long a batch that is not full waits for another request.
CLOSE_S = 5.0  # How long closing may wait for the receiver.
_EXPORTERS = {"http/protobuf": "http", "grpc": "grpc"}
_LIBRARY = "opentelemetry.exporter.otlp"

_log = structlog.get_logger()


def exporter_class(environ: Mapping[str, str] = os.environ) -> Any:
    """Returns the exporter class for the OTLP protocol that `environ` names; by default `http/protobuf`.

    Raises ConfigError if the protocol is unknown or its library is not installed.
    """
    variables = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next((environ[name].strip() for name in variables if environ.get(name, "").strip()), "http/protobuf")
    if protocol not in _EXPORTERS:
        raise ConfigError([f"tracing: the OTLP protocol {protocol!r} is unknown; known are {', '.join(_EXPORTERS)}"])
    kind = _EXPORTERS[protocol]
    try:
        return import_module(f"{_LIBRARY}.proto.{kind}.trace_exporter").OTLPSpanExporter
    except ImportError:
        package = "'llmproxy-lb[otel]'" if kind == "http" else "opentelemetry-exporter-otlp-proto-grpc"
        raise ConfigError(
            [f"tracing: needs OpenTelemetry for {protocol}, which is not installed: pip install {package}"]
        ) from None


def check(config: Config) -> None:
    """Raises ConfigError if tracing is configured and cannot work.

    Its library may be missing, or its environment variables may be invalid.
    """
    if Sampler.of(config) is not None:
        exporter_class()


def started(scheme: str, on_lost: Callable[[int], None]) -> SpanExport:
    """Starts the export of spans. Raises ConfigError as `check` does.

    `scheme` (http or https) is the protocol of the port for clients. Loading the libraries takes a moment.
    """
    from llmproxy.observe.span_tree import SpanTree

    return SpanExport(exporter_class()(), SpanTree(scheme).spans, on_lost)


class _Reasons(logging.Handler):
    """Stores the last message of the export library. The proxy logs it once per outage."""

    def __init__(self) -> None:
        super().__init__()
        self.last = "the receiver did not take them"

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()


class SpanExport:
    """Sends the spans of sampled requests through `exporter`, on a thread.

    `spans` makes the spans of a request. `on_lost` is called with the number of lost spans, on any thread.
    """

    def __init__(
        self, exporter: SpanExporter, spans: Callable[[RequestExit], list[ReadableSpan]], on_lost: Callable[[int], None]
    ) -> None:
        self._exporter = exporter
        self._spans = spans
        self._on_lost = on_lost
        self._failing = 0
        self._reasons = _Reasons()
        library = logging.getLogger(_LIBRARY)
        library.handlers, library.propagate = [self._reasons], False
        self._ended: SimpleQueue[RequestExit | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def record(self, ended: RequestExit) -> None:
        """Queues a finished request if it is sampled. Never waits."""
        if ended.trace is None or not ended.trace.sampled:
            return
        if self._ended.qsize() < REQUESTS_MAX:
            self._ended.put(ended)
        else:
            self._on_lost(_count(ended))

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Sends the queued spans within `timeout_s`. Spans that are not sent by then are lost."""
        self._ended.put(None)
        self._thread.join(timeout_s)
        # Ends the pause between two attempts to send, and refuses every further batch.
        self._exporter.shutdown()

    # --- on the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        batch: list[ReadableSpan] = []
        closing = False
        while not closing:
            with suppress(Empty):
                ended = self._ended.get(timeout=LINGER_S if batch else None)
                closing = ended is None
                if ended is not None:
                    batch += self._made(ended)
                    if len(batch) < BATCH_SPANS:
                        continue
            while batch:
                self._send(batch[:BATCH_SPANS])
                del batch[:BATCH_SPANS]

    def _made(self, ended: RequestExit) -> Sequence[ReadableSpan]:
        try:
            return self._spans(ended)
        except Exception as bug:  # noqa: BLE001 - the spans of other requests do not depend on it
            self._lose(_count(ended), bug)
            return ()

    def _send(self, batch: Sequence[ReadableSpan]) -> None:
        try:
            sent = self._exporter.export(batch).name == "SUCCESS"
            why: object = self._reasons.last
        except Exception as error:  # noqa: BLE001 - a library's failure loses spans and nothing else
            sent, why = False, error
        if not sent:
            self._lose(len(batch), why)
        elif self._failing:
            _log.info("spans_resumed", lost=self._failing)
            self._failing = 0

    def _lose(self, spans: int, why: object) -> None:
        self._on_lost(spans)
        if not self._failing:
            _log.warning("spans_lost", why=str(why))
        self._failing += spans


def _count(ended: RequestExit) -> int:
    """Returns the number of spans of a request: 1, 2 for each attempt, and 1 for a wait without a grant."""
    return 1 + 2 * len(ended.tried) + (ended.queued_s is not None)
