"""Exit records of tests, made from the names of their fields alone."""

from __future__ import annotations

from typing import Any

from llmproxy.observe.exit import RequestExit, RequestInput, RequestResult, RequestRouting
from llmproxy.scheduling.attempts import AttemptRecord


def exit_of(**fields: Any) -> RequestExit:
    """Returns a record with these fields, some of them of its only attempt. Raises TypeError for an unknown field."""
    parts = [
        {name: fields.pop(name) for name in part.__struct_fields__ if name in fields}
        for part in (RequestInput, RequestResult, RequestRouting, AttemptRecord)
    ]
    if fields:
        raise TypeError(f"no field {', '.join(fields)}")
    if parts[3]:
        parts[2]["tried"] = (AttemptRecord(**parts[3]),)
    return RequestExit(RequestInput(**parts[0]), RequestResult(**parts[1]), RequestRouting(**parts[2]))


def changed(ended: RequestExit, **fields: Any) -> RequestExit:
    """The record with other values in these fields."""
    was = {
        name: getattr(part, name)
        for part in (*ended.routing.tried[-1:], ended.input, ended.result, ended.routing)
        for name in part.__struct_fields__
        if name != "tried"
    }
    return exit_of(**was | fields)
