"""The loop on which members run in production."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.leftovers import CountingLoop

HERE = Path(__file__).parent


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], Any]]:
    return {"uvloop": CountingLoop}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that hangs on this loop is out of reach of the alarm that ends others; a thread still ends it."""
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(60, method="thread"))
