"""The loop on which the proxy runs in production, and the proxy that most tests use."""

from __future__ import annotations

import io
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import structlog

from llmproxy.observe import logs
from tests.e2e.leftovers import CountingLoop
from tests.e2e.proxies import FAST, ProxyUnderTest, serving


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], Any]]:
    return {"uvloop": CountingLoop}


@pytest.fixture
async def proxy() -> AsyncIterator[ProxyUnderTest]:
    """Two fast replicas with two adapters each."""
    async with serving(FAST, FAST) as proxy:
        yield proxy


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Everything that is logged, at the most talkative level, in the form that production has."""
    output = io.StringIO()
    logs.configure("text", "debug", output)
    yield output
    structlog.reset_defaults()


@pytest.fixture
def port() -> Iterator[int]:
    """A port that refuses connections until a replica listens there; bound, so that no other process takes it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
