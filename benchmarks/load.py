"""Clients of a fleet, in closed loops or at random moments, and the figures of their requests.

In a closed loop, a client sends its next request when the previous one has ended.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.fleet import is_whole

PAUSE_S = 0.2  # The pause of a client after a failure, so that a refusal does not become a flood of requests.
TIMEOUT_S = 120.0
TAIL_BYTES = 400
ERROR = b'data: {"error"'
OBJECTIVE, FLOW = "x-llm-d-inference-objective", "x-llm-d-inference-fairness-id"


@dataclass(slots=True)
class Seen:
    """A request as its client saw it. Times are seconds of the event loop."""

    sent_s: float
    url: str = ""
    byte_s: float | None = None
    """When the first byte of the body of a 200 came; None without one."""
    first_s: float | None = None
    """When the first token of a 200 came; None without one."""
    ended_s: float | None = None
    status: int = 0
    """The HTTP status; 0 if no answer came."""
    backend: str = ""
    whole: bool = False
    errors: int = 0
    """The number of error events in a stream."""
    detail: str = ""

    @property
    def begun(self) -> bool:
        """Whether a token arrived."""
        return self.first_s is not None

    @property
    def outcome(self) -> str:
        """`ok`, `refused` (no connection), the status of an error, `cut` (a part of the answer came), or `lost`."""
        if self.whole:
            return "ok"
        if self.status not in (0, 200):
            return str(self.status)
        name = self.detail.partition(" ")[0]
        if name in ("ClientConnectorError", "ConnectionRefusedError"):
            return "refused"
        return "cut" if self.byte_s is not None else f"lost ({name})"


@dataclass(frozen=True, slots=True)
class Work:
    """The kind of requests that a client sends."""

    stream: bool = True
    tokens: Sequence[int] = range(32, 97)
    """The lengths of answers. Each request draws a length at random."""
    words: int = 60
    """The number of words in the prompt in addition to `prompt`."""
    prompt: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    model: str = "sim"
    pause_s: float = 0.0
    """The longest pause of a client between two requests. Pauses are random."""

    def body(self, rng: random.Random) -> dict[str, Any]:
        # A number in front, so that no two prompts share a prefix that is worth caching.
        text = f"{rng.randrange(10**9)} {self.prompt} " + "word " * self.words
        more: dict[str, Any] = {"stream": True} if self.stream else {}
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": rng.choice(self.tokens),
            "ignore_eos": True,
            **more,
        }


class Clients:
    """Clients of one kind. At the end of the block they are cancelled.

    `seen` has each request that ended. `running` counts the open requests of each URL. `pause_after` returns the
    seconds between a failure and the next request.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        work: Work,
        seed: int = 1,
        pause_after: Callable[[Seen], float] = lambda _: PAUSE_S,
    ) -> None:
        self._session = session
        self._work = work
        self._rng = random.Random(seed)
        self._pause_after = pause_after
        self._tasks: list[asyncio.Task[Any]] = []
        self._over = False
        self.seen: list[Seen] = []
        self.running: Counter[str] = Counter()
        self._open: dict[int, Seen] = {}

    def closed(self, count: int, url: Callable[[], str]) -> None:
        """Adds `count` clients that send their next request when the previous one has ended. `url` returns its URL."""
        self._tasks += [asyncio.create_task(self._one_after_another(url)) for _ in range(count)]

    def poisson(self, rate: float, url: Callable[[], str]) -> None:
        """Adds a Poisson process of `rate` requests per second, which do not wait for answers."""
        self._tasks.append(asyncio.create_task(self._arrivals(rate, url)))

    def ages_s(self) -> list[float]:
        """Returns for each open request without a token the seconds since it was sent, the longest first."""
        now = asyncio.get_running_loop().time()
        return sorted((now - one.sent_s for one in self._open.values() if not one.begun), reverse=True)

    async def ended(self) -> None:
        """Sends no more requests, and waits until all open requests have ended."""
        self._over = True
        while self._open:  # noqa: ASYNC110 - the requests have no common event
            await asyncio.sleep(0.02)

    async def __aenter__(self) -> Clients:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _one_after_another(self, url: Callable[[], str]) -> None:
        while not self._over:
            seen = await self.ask(url())
            if not seen.whole:
                await asyncio.sleep(self._pause_after(seen))
            elif self._work.pause_s:
                await asyncio.sleep(self._rng.uniform(0.0, self._work.pause_s))

    async def _arrivals(self, rate: float, url: Callable[[], str]) -> None:
        loop = asyncio.get_running_loop()
        at_s = loop.time()
        while not self._over:
            at_s += self._rng.expovariate(rate)
            await asyncio.sleep(at_s - loop.time())
            self._tasks.append(asyncio.create_task(self.ask(url())))

    async def ask(self, url: str) -> Seen:
        """Sends one request, and reads its answer to the end. Raises nothing for a failure, which is in the result."""
        loop = asyncio.get_running_loop()
        seen = Seen(loop.time(), url)
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
                    if answer.status == 200:
                        self._note(seen, piece, loop.time())
                    # An event may be cut by the border of two pieces.
                    seen.errors += (tail + piece).count(ERROR) - tail.count(ERROR)
                    tail = (tail + piece)[-TAIL_BYTES:]
                seen.whole = answer.status == 200 and is_whole(tail, stream=self._work.stream) and not seen.errors
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            seen.detail = f"{type(error).__name__} {error}"
        finally:
            del self._open[id(seen)]
            self.running[url] -= 1
        if not seen.whole and not seen.detail:
            seen.detail = tail.decode(errors="replace")[-200:]
        seen.ended_s = loop.time()
        self.seen.append(seen)
        return seen

    def _note(self, seen: Seen, piece: bytes, now: float) -> None:
        if seen.byte_s is None:
            seen.byte_s = now
        # The first event of a stream names the role and has no token in it.
        if seen.first_s is None and (b'"content":"' in piece or not self._work.stream):
            seen.first_s = now

    # --- figures ------------------------------------------------------------------------------------------------------

    async def rate(self, seconds: float) -> float:
        """Returns the complete answers per second over the next `seconds`."""
        loop = asyncio.get_running_loop()
        before, began_s = len(self.seen), loop.time()
        await asyncio.sleep(seconds)
        return sum(one.whole for one in self.seen[before:]) / (loop.time() - began_s)


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value with at least `share` (0..1) of `values` below it; NaN without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def failures(seen: Sequence[Seen]) -> list[Seen]:
    """Returns the requests that failed before a token of their answer came."""
    return [one for one in seen if not one.whole and not one.begun]


def first_s(seen: Sequence[Seen], share: float) -> float:
    """Returns the percentile `share` (0..1) of the seconds to the first token."""
    return percentile([one.first_s - one.sent_s for one in seen if one.first_s is not None], share)


def details(seen: Sequence[Seen]) -> str:
    """Returns the two most frequent failures as text."""
    found = Counter(f"{one.status} {one.detail[:90]}" for one in seen if not one.whole)
    return "; ".join(f"{count} x {text}" for text, count in found.most_common(2))
