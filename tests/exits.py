"""Exit records of tests, made from the names of their fields alone."""

from __future__ import annotations

from typing import Any

from llmproxy.observe.exit import RequestExit
from llmproxy.scheduling.attempt import Attempt


def exit_of(**fields: Any) -> RequestExit:
    """Returns a record with these fields, some of them of its only attempt. Raises TypeError for an unknown field."""
    parts = [
        {name: fields.pop(name) for name in part.__struct_fields__ if name in fields} for part in (RequestExit, Attempt)
    ]
    if fields:
        raise TypeError(f"no field {', '.join(fields)}")
    if parts[1]:
        parts[0]["tried"] = [Attempt(**parts[1])]
    return RequestExit(**parts[0])


def changed(ended: RequestExit, **fields: Any) -> RequestExit:
    """The record with other values in these fields."""
    was = {
        name: getattr(part, name)
        for part in (*ended.tried[-1:], ended)
        for name in part.__struct_fields__
        if name != "tried"
    }
    return exit_of(**was | fields)
