"""A store in memory, on a virtual clock, and proxies that share limits in it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from llmproxy.core.domain import Request
from llmproxy.core.settings import UsageLimit
from llmproxy.scheduling.gcra import SCRIPT
from llmproxy.scheduling.shared_limits import SharedLimits
from tests.core.make import request
from tests.dispatching import now

ACME = "tenant:acme"
LIMITS = {ACME: UsageLimit(requests_per_min=6, tokens_per_min=600), "tenant:waits": UsageLimit(in_flight=1)}
REQUESTS, TOKENS = f"llmproxy:{{llmproxy}}:requests:{ACME}", f"llmproxy:{{llmproxy}}:tokens:{ACME}"


class MemoryStore:
    """The script, in memory. `answer_s` is the time of a call, `broken` its error."""

    def __init__(self) -> None:
        self.back: dict[str, float] = {}
        self.answer_s = 0.001
        self.broken: Exception | None = None
        self.breaks_once = False
        self.calls: list[Any] = []
        self.closed = False

    async def run(self, script: str, keys: Sequence[str | bytes], *given: str | bytes | float) -> object:
        asked, minute = json.loads(str(given[0], "utf-8") if isinstance(given[0], bytes) else ""), float(given[1])
        self.calls.append(asked)
        assert script == SCRIPT
        if self.broken is not None:
            broken, self.broken = self.broken, None if self.breaks_once else self.broken
            raise broken
        names = ["", *(str(key, "utf-8", "surrogatepass") if isinstance(key, bytes) else key for key in keys)]
        for i, seconds in asked["corrections"]:
            self.back[names[i]] = max(now(), self._back(names[i]) + seconds)
        said = []
        for ask in asked["asks"]:
            waits = [min(cost, minute) - minute + self._back(names[i]) - now() for i, cost in ask]
            longest = max(range(len(ask)), key=waits.__getitem__)
            refused = waits[longest] > 1e-6
            said += [round(1000 * waits[longest]), longest + 1] if refused else [0, 0]
            for i, cost in [] if refused else ask:
                self.back[names[i]] = self._back(names[i]) + cost
        await asyncio.sleep(self.answer_s)
        return said

    def _back(self, name: str) -> float:
        return max(now(), self.back.get(name, 0.0))

    def taken_s(self, name: str) -> float:
        """Seconds until all that was taken is back."""
        return self._back(name) - now()

    async def close(self) -> None:
        self.closed = True


@asynccontextmanager
async def sharing(
    store: MemoryStore, proxies: int | None = None, limits: dict[str, UsageLimit] = LIMITS
) -> AsyncIterator[SharedLimits]:
    shared = SharedLimits(store, "llmproxy", limits, proxies)
    await shared.connect()
    task = asyncio.create_task(shared.run())
    try:
        yield shared
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await shared.close()
        assert store.closed
        assert not shared._charges
        assert shared._alone is None or not shared._alone.accounts


def theirs(tokens: int = 10, name: str = ACME) -> Request:
    return request(limits=(name,), prompt_tokens=tokens, output_tokens=0)


async def admitted(shared: SharedLimits, one: Request) -> None:
    await shared.reserve(one)
    shared.admit(one, now())


async def served(shared: SharedLimits, one: Request, used: int | None = None) -> None:
    await admitted(shared, one)
    if used is not None:
        shared.used(one, used, now())
    shared.ended(one, now())
