"""Files of traces: written, read, and complained of."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmproxy.lab.traces import open_trace
from llmproxy.lab.traces.arrival import Arrival, TraceError

Saved = Callable[..., Path]


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """Writes a file of these lines, text or bytes. Its name does not show its format."""

    def save(*lines: dict[str, Any] | str | bytes) -> Path:
        path = tmp_path / "trace.data"
        encoded = [json.dumps(line) if isinstance(line, dict) else line for line in lines]
        path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in encoded))
        return path

    return save


def read(path: Path) -> list[Arrival]:
    return list(open_trace(path).arrivals())


def complaint(path: Path) -> str:
    """Returns the error message of a file without its folder."""
    with pytest.raises(TraceError) as caught:
        read(path)
    return str(caught.value).removeprefix(f"{path.parent}/")
