"""A receiver of OTLP traces on loopback, and the spans that it got as a tree."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

SHOWN = (
    "http.response.status_code", "llmproxy.outcome", "llmproxy.band", "llmproxy.queued_ahead", "llmproxy.backend",
    "llmproxy.verdict", "http.request.resend_count", "gen_ai.usage.output_tokens", "error.type",
)  # fmt: skip


@dataclass
class Receiver:
    """Records spans. Each message is answered with `status` after `delay_s`."""

    url: str = ""
    status: int = 200
    delay_s: float = 0.0
    messages: int = 0
    largest: int = 0
    spans: list[Span] = field(default_factory=list)
    resources: list[Mapping[str, Any]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)

    async def take(self, request: web.Request) -> web.Response:
        data = await request.read()
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        self.messages += 1
        if self.status == 200:
            # The library unpacks a body with a Content-Encoding, so that it has no gzip mark.
            message = ExportTraceServiceRequest.FromString(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
            new = [span for of in message.resource_spans for scope in of.scope_spans for span in scope.spans]
            self.spans += new
            self.largest = max(self.largest, len(new))
            self.resources += [values(of.resource.attributes) for of in message.resource_spans]
            self.headers.append(request.headers)
        return web.Response(status=self.status)

    def of(self, trace_id: str) -> list[Span]:
        """Returns the spans of a trace by start time, then in the order in which they were sent."""
        found = [span for span in self.spans if span.trace_id.hex() == trace_id]
        return sorted(found, key=lambda span: span.start_time_unix_nano)

    def request(self, request_id: str) -> list[Span]:
        """The spans of the request of this id."""
        [trace_id] = [s.trace_id.hex() for s in self.spans if attributes(s).get("llmproxy.request_id") == request_id]
        return self.of(trace_id)


@asynccontextmanager
async def receiving(**settings: Any) -> AsyncIterator[Receiver]:
    """A receiver that listens for the length of the block."""
    receiver = Receiver(**settings)
    app = web.Application()
    app.router.add_post("/v1/traces", receiver.take)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield receiver
    finally:
        await runner.cleanup()


def attributes(span: Span) -> dict[str, Any]:
    return values(span.attributes)


def values(pairs: Any) -> dict[str, Any]:
    """Attributes as they were before they were encoded."""
    return {pair.key: _plain(pair.value) for pair in pairs}


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    assert kind is not None
    return getattr(value, kind)


def tree(spans: Sequence[Span], shown: Sequence[str] = SHOWN) -> str:
    """The spans as an indented tree: times in ms since the first began, kind, some attributes, events."""
    began = min(span.start_time_unix_nano for span in spans)
    known = {span.span_id for span in spans}

    def lines(parent: bytes | None, indent: str) -> Iterator[str]:
        for span in spans:
            if span.parent_span_id == parent or (parent is None and span.parent_span_id not in known):
                times = [(at - began) / 1e6 for at in (span.start_time_unix_nano, span.end_time_unix_nano)]
                found = attributes(span)
                words = [f"{key.rpartition('.')[2]}={found[key]}" for key in shown if key in found]
                kind = Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_")
                yield f"{indent}{span.name}  {kind}  {times[0]:.0f}..{times[1]:.0f} ms  {' '.join(words)}".rstrip()
                for event in span.events:
                    yield f"{indent}  * {event.name} {(event.time_unix_nano - began) / 1e6:.0f} ms"
                yield from lines(span.span_id, indent + "  ")

    return "\n".join(lines(None, ""))
