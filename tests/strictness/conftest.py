"""The loop on which the proxy runs in production."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import uvloop


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], Any]]:
    return {"uvloop": uvloop.new_event_loop}
