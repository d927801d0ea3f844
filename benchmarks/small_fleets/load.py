"""Clients in a closed loop, and the figures of their requests."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.fleet import is_whole
from benchmarks.overload import percentile

PAUSE_S = 0.2
"""Pause of a client after a failure, so that a refusal does not become a flood."""
TIMEOUT_S = 120.0
TAIL_BYTES = 400


@dataclass(slots=True)
class Seen:
    """One request as its client saw it. Times are seconds of the event loop; `status` is 0 where none came."""

    sent_s: float
    first_s: float | None = None
    ended_s: float | None = None
    status: int = 0
    backend: str = ""
    whole: bool = False
    detail: str = ""

    @property
    def begun(self) -> bool:
        """Whether a byte of the answer arrived."""
        return self.first_s is not None


@dataclass(frozen=True, slots=True)
class Work:
    """The requests of one kind of client: answer tokens (least, most), words of the prompt beside `prompt`, and
    whether the answer is a stream.
    """

    stream: bool = True
    tokens: tuple[int, int] = (32, 96)
    words: int = 60
    prompt: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self, rng: random.Random) -> dict[str, Any]:
        # A number in front, so that no two prompts share a prefix that is worth caching.
        text = f"{rng.randrange(10**9)} {self.prompt} " + "word " * self.words
        more: dict[str, Any] = {"stream": True} if self.stream else {}
        return {
            "model": "sim",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": rng.randint(*self.tokens),
            "ignore_eos": True,
            **more,
        }


class Clients:
    """Clients of one kind. Leaving the block ends them; `seen` has each request that ended.

    `running` counts the open requests of each URL.
    """

    def __init__(self, session: aiohttp.ClientSession, work: Work, seed: int = 1) -> None:
        self._session = session
        self._work = work
        self._rng = random.Random(seed)
        self._tasks: list[asyncio.Task[None]] = []
        self.seen: list[Seen] = []
        self.running: Counter[str] = Counter()
        self._open: dict[int, Seen] = {}

    def closed(self, count: int, url: Callable[[], str]) -> None:
        """Add `count` clients that send their next request as soon as the last one ended, each to the next `url`."""
        self._tasks += [asyncio.create_task(self._one_after_another(url)) for _ in range(count)]

    def poisson(self, rate: float, url: Callable[[], str]) -> None:
        """Add arrivals of `rate` requests per second that wait for nobody."""
        self._tasks.append(asyncio.create_task(self._arrivals(rate, url)))

    def ages_s(self) -> list[float]:
        """How long the requests that have no byte yet have waited, the longest first."""
        now = asyncio.get_running_loop().time()
        return sorted((now - one.sent_s for one in self._open.values() if not one.begun), reverse=True)

    async def __aenter__(self) -> Clients:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _one_after_another(self, url: Callable[[], str]) -> None:
        while True:
            seen = await self.ask(url())
            if not seen.whole:
                await asyncio.sleep(PAUSE_S)

    async def _arrivals(self, rate: float, url: Callable[[], str]) -> None:
        loop = asyncio.get_running_loop()
        at_s = loop.time()
        while True:
            at_s += self._rng.expovariate(rate)
            await asyncio.sleep(at_s - loop.time())
            self._tasks.append(asyncio.create_task(self._asked(url())))

    async def _asked(self, url: str) -> None:
        await self.ask(url)

    async def ask(self, url: str) -> Seen:
        """Send one request and read its answer to the end."""
        loop = asyncio.get_running_loop()
        seen = Seen(loop.time())
        self._open[id(seen)] = seen
        self.running[url] += 1
        tail = b""
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                self._session.post(
                    url + "/v1/chat/completions", json=self._work.body(self._rng), headers=self._work.headers
                ) as answer,
            ):
                seen.status, seen.backend = answer.status, answer.headers.get("x-llmproxy-backend", "")
                async for piece in answer.content.iter_any():
                    # The first event of a stream names the role and has no token in it.
                    if (
                        seen.first_s is None
                        and answer.status == 200
                        and (b'"content":"' in piece or not self._work.stream)
                    ):
                        seen.first_s = loop.time()
                    tail = (tail + piece)[-TAIL_BYTES:]
                seen.whole = answer.status == 200 and is_whole(tail, stream=self._work.stream)
        except (TimeoutError, aiohttp.ClientError) as error:
            seen.detail = f"{type(error).__name__} {error}"
        finally:
            del self._open[id(seen)]
            self.running[url] -= 1
        if not seen.whole and not seen.detail:
            seen.detail = tail.decode(errors="replace")[-200:]
        seen.ended_s = loop.time()
        self.seen.append(seen)
        return seen

    # --- figures ------------------------------------------------------------------------------------------------------

    async def rate(self, seconds: float) -> float:
        """Whole answers per second over the next `seconds`."""
        loop = asyncio.get_running_loop()
        before, began_s = len(self.seen), loop.time()
        await asyncio.sleep(seconds)
        return sum(one.whole for one in self.seen[before:]) / (loop.time() - began_s)


def failures(seen: Sequence[Seen]) -> list[Seen]:
    """Requests that failed before a byte of their answer came."""
    return [one for one in seen if not one.whole and not one.begun]


def first_s(seen: Sequence[Seen], share: float) -> float:
    """The percentile `share` (0..1) of the seconds to the first token."""
    return percentile([one.first_s - one.sent_s for one in seen if one.first_s is not None], share)


def details(seen: Sequence[Seen]) -> str:
    """The two most frequent failures, in a few words."""
    found = Counter(f"{one.status} {one.detail[:90]}" for one in seen if not one.whole)
    return "; ".join(f"{count} x {text}" for text, count in found.most_common(2))
