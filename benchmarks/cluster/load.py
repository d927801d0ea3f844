"""The load on a cluster: each client uses one member, or moves to the next member after a refused connection."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import aiohttp

from benchmarks.cluster.rig import Member
from benchmarks.load import Clients, Seen, Work

LENGTHS = (20,) * 19 + (600,)
"""The tokens of an answer, drawn at random. For 5 % of the answers this takes longer than the lock is valid."""
REFUSED_S, FAILED_S = 0.05, 1.0
"""The pause of a client after a refused connection, and after a failed request (as its Retry-After of 1 s says)."""


class Load:
    """Clients that send one stream after the other, and the figures of all requests. Call `ended` at the end."""

    def __init__(self, session: aiohttp.ClientSession, lengths: Sequence[int] = LENGTHS, model: str = "sim") -> None:
        self._session = session
        self._work = Work(tokens=lengths, words=40, model=model)
        self._clients: list[Clients] = []
        self._unready: set[str] = set()

    def add(self, members: Sequence[Member], number: int, *, roaming: bool = False) -> None:
        """Adds `number` clients to each of `members`. A `roaming` client leaves a member that refuses connections."""
        for place in [place for place in range(len(members)) for _ in range(number)]:
            url, failed = self._route([one.url for one in members], place, roaming)
            clients = Clients(self._session, self._work, len(self._clients), failed)
            clients.closed(1, url)
            self._clients.append(clients)

    def _route(
        self, urls: Sequence[str], place: int, roaming: bool
    ) -> tuple[Callable[[], str], Callable[[Seen], float]]:
        """Returns two functions: the URL of a client's next request, and its pause after a failure."""

        def url() -> str:
            nonlocal place
            if roaming:
                order = [at % len(urls) for at in range(place, place + len(urls))]
                place = next((at for at in order if urls[at] not in self._unready), place)
            return urls[place]

        def failed(seen: Seen) -> float:
            nonlocal place
            if seen.outcome != "refused":
                return FAILED_S
            if roaming:
                place = (place + 1) % len(urls)
            return REFUSED_S

        return url, failed

    async def balance(self, members: Sequence[Member]) -> None:
        """Restricts roaming clients to members that are ready, as a load balancer does, until the task is cancelled."""
        while True:
            for member in members:
                try:
                    async with self._session.get(f"{member.url}/ready") as answer:
                        ready = answer.status == 200
                except aiohttp.ClientError:
                    ready = False
                (self._unready.discard if ready else self._unready.add)(member.url)
            await asyncio.sleep(0.1)

    async def ended(self) -> None:
        """Sends no more requests, and waits until all open requests have ended."""
        await asyncio.gather(*(clients.ended() for clients in self._clients))

    # --- figures ------------------------------------------------------------------------------------------------------

    @property
    def seen(self) -> list[Seen]:
        return [one for clients in self._clients for one in clients.seen]

    def outcomes(self, members: Sequence[Member], since_s: float) -> Counter[str]:
        """Returns the outcomes of requests to these members that ended after `since_s`, without refused connections."""
        urls = {one.url for one in members}
        ended = [one for one in self.seen if one.url in urls and (one.ended_s or 0.0) >= since_s]
        return Counter(one.outcome for one in ended if one.outcome != "refused")

    def gap_s(self, members: Sequence[Member], from_s: float, to_s: float) -> float:
        """Returns the longest time between two first tokens at these members."""
        urls = {one.url for one in members}
        times = [one.first_s for one in self.seen if one.url in urls and one.first_s]
        firsts = sorted(at_s for at_s in times if from_s <= at_s <= to_s)
        return max(later - earlier for earlier, later in pairwise([from_s, *firsts, to_s]))


def bad(outcomes: Counter[str]) -> str:
    """Returns the outcomes other than `ok` and their numbers as text."""
    return ", ".join(f"{number} {name}" for name, number in sorted(outcomes.items()) if name != "ok") or "0"


def now() -> float:
    """Returns the time of the event loop."""
    return asyncio.get_running_loop().time()
