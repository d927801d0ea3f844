"""Traces: read from files in published formats, generated from definitions, and transformed."""

from __future__ import annotations

from pathlib import Path

from llmproxy.lab.traces.arrival import Trace
from llmproxy.lab.traces.files import open_trace
from llmproxy.lab.traces.spec import GENERATORS, PREFIX, generate
from llmproxy.lab.traces.survey import Survey, survey
from llmproxy.lab.traces.transform import replicated, scaled, sliced

__all__ = [
    "GENERATORS",
    "PREFIX",
    "Survey",
    "generate",
    "open_trace",
    "replicated",
    "scaled",
    "sliced",
    "survey",
    "trace_named",
]


def trace_named(text: str, seed: int = 0) -> Trace:
    """Returns the trace of a file or of `gen:NAME,key=value,...`. Raises TraceError.

    `seed` is a generator's default seed. A file ignores it.
    """
    return generate(text, seed) if text.startswith(PREFIX) else open_trace(Path(text))
