"""The bench of poller tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from llmproxy.upstream.client import HttpUpstream
from tests.backends.polling import Bench


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with HttpUpstream() as upstream:
        bench = Bench(upstream)
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", bench.vllm.serve)
        server = TestServer(app, handler_cancellation=True)
        await server.start_server()
        bench.url = str(server.make_url("")).rstrip("/")
        yield bench
        await server.close()
