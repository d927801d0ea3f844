"""Batch files and servers for tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def line(name: object, **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": f"hello {name}"}]}
    return {"custom_id": str(name), "method": "POST", "url": "/v1/chat/completions", "body": body} | fields


def write(path: Path, lines: Iterable[object]) -> Path:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the results in a file. Fails if a line is not whole."""
    return [json.loads(one) for one in path.read_bytes().splitlines()]
