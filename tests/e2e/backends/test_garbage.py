"""A request that was served is gone with its last reference: the collector, which comes late, finds nothing of it.

The serving process looks for cycles only when 10,000 objects more have come than went (`GC_THRESHOLDS`), and
until then each request caught in one would keep its whole body.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.e2e.proxies import CHAT, ENDLESS, FAST, HELLO, all_of, serving

pytestmark = pytest.mark.slow

ASKS: dict[str, dict[str, Any]] = {
    CHAT: HELLO,
    "/v1/completions": {"model": "base", "prompt": "Hello there", "max_tokens": 4},
    "/v1/responses": {"model": "base", "input": "Hello there", "max_output_tokens": 4},
    "/v1/messages": HELLO,
}


OURS = ("llmproxy.gateway", "llmproxy.backends", "llmproxy.scheduling", "llmproxy.upstream", "llmproxy.core")


@contextmanager
def garbage() -> Iterator[Counter[str]]:
    """Counts the proxy's objects that the block leaves to the garbage collector, by class, when the block ends."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.garbage.clear()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        classes = (type(thing) for thing in gc.garbage)
        found.update(each.__qualname__ for each in classes if each.__module__.startswith(OURS))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", list(ASKS))
async def test_served_request_leaves_nothing_to_the_collector(path: str, stream: bool) -> None:
    async with serving(FAST) as proxy:
        with garbage() as found:
            for _ in range(3):
                assert (await proxy.post(path, ASKS[path] | {"stream": stream})).status == 200
            await proxy.settled()
        assert not found


async def test_a_stream_that_broke_leaves_nothing_to_the_collector() -> None:
    async with serving(FAST) as proxy:
        with garbage() as found:
            for _ in range(3):
                proxy.replicas[0].faults.set("reset", after_bytes=300, times=1)
                async with proxy.stream(ENDLESS) as response:
                    await all_of(response)
            await proxy.settled()
            assert proxy.outcomes() == {"broken_stream": 3}
        assert not found
