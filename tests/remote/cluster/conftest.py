"""The loop on which members run in production."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.e2e.leftovers import CountingLoop


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], Any]]:
    return {"uvloop": CountingLoop}
