"""Load on a cluster: each client uses one member, and records the outcomes of its requests."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from math import inf
from typing import Any

import aiohttp

from benchmarks.cluster.rig import Member
from benchmarks.fleet import is_whole
from benchmarks.overload import percentile

OBJECTIVE = "x-llm-d-inference-objective"
LENGTHS = (20,) * 19 + (600,)
"""Tokens of an answer, drawn at random: one that outlives the time of a lock among many that are short."""
REFUSED_S = 0.05
"""How long a client waits that could not connect."""
FAILED_S = 1.0
"""And one whose request failed: what Retry-After says."""


@dataclass(slots=True)
class Asked:
    """One request: to which member, when, and what came of it. Times are those of the loop."""

    member: str
    band: str
    label: str
    sent_s: float
    first_s: float | None = None
    ended_s: float = 0.0
    outcome: str = ""
    tokens: int = 0


@dataclass(slots=True)
class Load:
    """Streams in a closed loop. `roaming` clients go to the next member where one refuses the connection.

    Without `model`, they name none.
    """

    session: aiohttp.ClientSession
    lengths: Sequence[int] = LENGTHS
    model: str | None = None
    asked: list[Asked] = field(default_factory=list)
    over_s: float = inf
    unready: set[str] = field(default_factory=set)
    _serial: Iterator[int] = field(default_factory=count)

    def end(self) -> None:
        """Ask for nothing more."""
        self.over_s = now()

    async def clients(
        self, members: Sequence[Member], number: int, band: str = "default", *, key: str | None = None,
        label: str = "", roaming: bool = False,
    ) -> None:  # fmt: skip
        """`number` clients of each of these members, until `end`."""
        await asyncio.gather(
            *(
                self._client(members, place, band, key, label, roaming)
                for place in range(len(members))
                for _ in range(number)
            )
        )

    async def _client(
        self, members: Sequence[Member], place: int, band: str, key: str | None, label: str, roaming: bool
    ) -> None:
        headers = {OBJECTIVE: band} | ({"authorization": f"Bearer {key}"} if key else {})
        number = 0
        rng = random.Random(next(self._serial))
        while now() < self.over_s:
            number += 1
            while roaming and members[place].name in self.unready:
                place = (place + 1) % len(members)
                await asyncio.sleep(0.0)
            body = {
                "stream": True, "max_tokens": rng.choice(self.lengths), "ignore_eos": True,
                "messages": [{"role": "user", "content": "Tell me a story. " * (10 + number % 7)}],
            } | ({} if self.model is None else {"model": self.model})  # fmt: skip
            asked = await self._ask(Asked(members[place].name, band, label, now()), members[place], body, headers)
            if asked.outcome == "refused":
                place = (place + 1) % len(members) if roaming else place
                await asyncio.sleep(REFUSED_S)
                continue
            self.asked.append(asked)
            if asked.outcome != "ok":
                await asyncio.sleep(FAILED_S)

    async def balance(self, members: Sequence[Member]) -> None:
        """Let clients that roam use members that are ready alone, as behind a load balancer, until cancelled."""
        while True:
            for member in members:
                try:
                    async with self.session.get(f"{member.url}/ready") as answer:
                        ready = answer.status == 200
                except aiohttp.ClientError:
                    ready = False
                (self.unready.discard if ready else self.unready.add)(member.name)
            await asyncio.sleep(0.1)

    async def _ask(self, asked: Asked, member: Member, body: Any, headers: dict[str, str]) -> Asked:
        received = bytearray()
        try:
            url = f"{member.url}/v1/chat/completions"
            async with self.session.post(url, json=body, headers=headers) as answer:
                async for piece in answer.content.iter_any():
                    if asked.first_s is None:
                        asked.first_s = now()
                    received += piece
                asked.tokens = received.count(b'"content":')
                asked.outcome = "ok" if is_whole(bytes(received), stream=True) else f"{answer.status} not whole"
                if answer.status != 200:
                    asked.outcome = str(answer.status)
        except aiohttp.ClientConnectorError:
            asked.outcome = "refused"
        except (aiohttp.ClientError, OSError) as error:
            asked.outcome = "cut" if received else f"lost ({type(error).__name__})"
        asked.ended_s = now()
        return asked

    # --- what was seen ------------------------------------------------------------------------------------------------

    def outcomes(self, *members: str, since_s: float = 0.0) -> Counter[str]:
        """How requests of these members ended, all that ended after `since_s`."""
        return Counter(one.outcome for one in self.asked if one.member in members and one.ended_s >= since_s)

    def ttft_s(self, band: str, share: float, since_s: float = 0.0) -> float:
        times = [
            one.first_s - one.sent_s for one in self.asked if one.band == band and one.first_s and one.sent_s >= since_s
        ]
        return percentile(times, share) if times else 0.0

    def gap_s(self, members: Sequence[str], from_s: float, to_s: float) -> float:
        """The longest time between two first bytes at these members."""
        firsts = sorted(
            one.first_s for one in self.asked if one.member in members and one.first_s and from_s <= one.first_s <= to_s
        )
        return max(b - a for a, b in pairwise([from_s, *firsts, to_s]))


def now() -> float:
    """On the clock of the loop."""
    return asyncio.get_running_loop().time()
