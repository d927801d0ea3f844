"""The trace context of a request (W3C Trace Context): its parent, whether it is sampled, and the headers for backends.

A running request has only this context. A thread makes the spans of the request later, from its exit record.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

from llmproxy.config import Config, ConfigError

TRACE_FIELDS = frozenset({"traceparent"})
"""Client headers that backends do not get if the proxy continues the client's trace."""
BEGUN_FIELDS = TRACE_FIELDS | {"tracestate"}
"""Client headers that backends do not get if the trace begins at this proxy.

`tracestate` belongs to the client's trace.
"""
RATIO = 0.1  # The default of OTEL_TRACES_SAMPLER_ARG, a share of sampled traces.
SAMPLERS: Mapping[str, tuple[bool, float | None]] = {
    "always_on": (False, 1.0),
    "always_off": (False, 0.0),
    "traceidratio": (False, None),
    "parentbased_always_on": (True, 1.0),
    "parentbased_always_off": (True, 0.0),
    "parentbased_traceidratio": (True, None),
}
"""OpenTelemetry's sampler -> whether the parent decides, and the ratio.

If the ratio is None, it is in OTEL_TRACES_SAMPLER_ARG.
"""

# Version 00 ends after the flags, later ones may go on. Version ff and ids of zeros are invalid.
_TRACEPARENT = re.compile(
    r"(?!ff|00.{53}.)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?"
)


class TraceContext(Struct, frozen=True):
    """The trace id and span ids of one request. Ids are hexadecimal."""

    trace_id: str
    span_id: str  # The span of the request at this proxy.
    parent_id: str  # The client's span, "" if the trace begins here.
    sampled: bool
    linked: tuple[str, str] | None = None  # (trace, span) of a client that is not trusted.

    def traceparent(self, span_id: str) -> str:
        """Returns the value of the header `traceparent`, in which `span_id` is the parent of the receiver's spans."""
        return f"00-{self.trace_id}-{span_id}-{'01' if self.sampled else '00'}"

    @property
    def replaced(self) -> frozenset[str]:
        """The client's header fields that backends do not get."""
        return TRACE_FIELDS if self.parent_id else BEGUN_FIELDS


class Sampler:
    """Decides which trace a request belongs to, and whether it is sampled.

    With `by_parent`, the client's sampling flag decides, and `ratio` applies only to traces that begin at this proxy.
    Otherwise `ratio` applies to all traces. The trace id decides, so that two processes agree about a trace.
    """

    def __init__(self, by_parent: bool, ratio: float) -> None:
        self._by_parent = by_parent
        self._below = round(ratio * 2**64)

    @classmethod
    def of(cls, config: Config, environ: Mapping[str, str] = os.environ) -> Sampler | None:
        """Returns the sampler that the environment variables describe; None without tracing.

        Raises ConfigError for an unknown sampler or a ratio that is no number from 0 to 1.
        """
        if not config.tracing or environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
            return None
        name = environ.get("OTEL_TRACES_SAMPLER", "").strip() or "parentbased_traceidratio"
        if name not in SAMPLERS:
            raise ConfigError([f"tracing: OTEL_TRACES_SAMPLER is {name!r}; known are {', '.join(SAMPLERS)}"])
        by_parent, ratio = SAMPLERS[name]
        return cls(by_parent, _ratio(environ.get("OTEL_TRACES_SAMPLER_ARG", "")) if ratio is None else ratio)

    def begin(self, traceparents: Sequence[str], believed: bool) -> TraceContext:
        """Returns the trace context of a request with the header values `traceparents`.

        Continues the client's trace only if the client is `believed`; otherwise begins a trace that links to the
        client's. An invalid value, or more than one value, counts as none.
        """
        parent = _TRACEPARENT.fullmatch(traceparents[0]) if len(traceparents) == 1 else None
        if parent is not None and believed:
            trace_id, parent_id, flags = parent.groups()
            sampled = bool(int(flags, 16) & 1) if self._by_parent else self._picks(trace_id)
            return TraceContext(trace_id, new_span_id(), parent_id, sampled)
        trace_id = os.urandom(16).hex()
        linked = None if parent is None else (parent[1], parent[2])
        return TraceContext(trace_id, new_span_id(), "", self._picks(trace_id), linked)

    def _picks(self, trace_id: str) -> bool:
        # By the specification, the lower half decides: it is random in every kind of id.
        return int(trace_id[16:], 16) < self._below


def new_span_id() -> str:
    return os.urandom(8).hex()


def _ratio(text: str) -> float:
    try:
        ratio = float(text) if text.strip() else RATIO
    except ValueError:
        ratio = -1.0
    if not 0.0 <= ratio <= 1.0:
        raise ConfigError([f"tracing: OTEL_TRACES_SAMPLER_ARG is {text!r}; it should be a number from 0 to 1"])
    return ratio
