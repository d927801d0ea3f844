"""Exit records of tests, made from the names of their fields alone."""

from __future__ import annotations

from typing import Any

from llmproxy.telemetry.exit import RequestExit, RequestInput, RequestResult, RequestRouting


def exit_of(**fields: Any) -> RequestExit:
    """The record with these fields. Raises TypeError for a field that no part of it has."""
    parts = [
        {name: fields.pop(name) for name in part.__struct_fields__ if name in fields}
        for part in (RequestInput, RequestResult, RequestRouting)
    ]
    if fields:
        raise TypeError(f"no field {', '.join(fields)}")
    return RequestExit(RequestInput(**parts[0]), RequestResult(**parts[1]), RequestRouting(**parts[2]))


def changed(ended: RequestExit, **fields: Any) -> RequestExit:
    """The record with other values in these fields."""
    was = {
        name: getattr(part, name)
        for part in (ended.input, ended.result, ended.routing)
        for name in part.__struct_fields__
    }
    return exit_of(**was | fields)
