"""What tests of every area may need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# How long an example takes says something of the machine, and nothing of the code.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")


@pytest.fixture(autouse=True)
def no_state_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that a test starts keep nothing for those of another test, which may have the same ports."""
    monkeypatch.setenv("LLMPROXY_STATE_FILE", "none")


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def to_file(text: str | bytes) -> Path:
        path = tmp_path / "c.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return to_file
