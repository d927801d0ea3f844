"""The same loop and the same timeout as in the other tests on real sockets."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import pytest_asyncio_loop_factories as pytest_asyncio_loop_factories

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(60, method="thread"))
