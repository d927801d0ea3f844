"""The same loop and the same timeout as in the other tests on real sockets."""

from __future__ import annotations

from tests.e2e.conftest import pytest_asyncio_loop_factories as pytest_asyncio_loop_factories
