"""Elections in virtual time: a store that is slow or does not answer, and candidates that remember their turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from itertools import pairwise
from types import coroutine
from typing import Any

from llmproxy.lab.run.virtual_time import VirtualTimeLoop
from llmproxy.remote.cluster.election import Election, Leadership, StoreError

LOCK_S = 4.0
FENCE_S = 3.0
"""How long a leader decides after it asked: 0.75 of HELD_S."""
RENEW_S = 1.0
SEEK_S = 0.1


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class Store:
    """A lock that expires by the clock of the store, which runs `rate` times as fast as the clock of the members.

    A call is carried out `before_s` after it was made, also where who made it does not wait so long, and is answered
    `after_s` later. `away` makes calls fail: all, or those of these members.
    """

    name: str = "lock"
    before_s: float = 0.0
    after_s: float = 0.0
    rate: float = 1.0
    away: set[str] | bool = False
    answers_cost_s: float = 0.0
    """How long the loop of the caller is paused when it reads an answer."""
    held: Leadership | None = None
    ends_s: float = 0.0
    epoch: int = 0
    asked: list[float] = field(default_factory=list)
    """When it was asked for the lock."""
    broken: Exception | None = None
    _under_way: set[asyncio.Task[Any]] = field(default_factory=set)

    async def take(self, wanted: Leadership, lock_s: float) -> Leadership:
        self.asked.append(now())
        found: Leadership = await self._carried_out(lambda: self._take(wanted, lock_s), wanted.holder)
        if self.answers_cost_s:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualTimeLoop)
            loop._now_s += self.answers_cost_s
        return found

    async def holder(self) -> Leadership | None:
        found: Leadership | None = await self._carried_out(self._holder)
        return found

    async def release(self, holder: str) -> None:
        def free() -> None:
            if self.held is not None and self.held.holder == holder:
                self.held = None

        await self._carried_out(free, holder)

    async def close(self) -> None: ...

    def forget(self) -> None:
        """It was restarted without its data."""
        self.held, self.epoch = None, 0

    def _take(self, wanted: Leadership, lock_s: float) -> Leadership:
        held = self._holder()
        if held is None or (held.holder == wanted.holder and held.epoch < wanted.epoch):
            self.epoch = max(self.epoch, wanted.epoch) + 1
            held = self.held = Leadership(wanted.holder, wanted.address, self.epoch)
        if held.holder == wanted.holder:
            self.ends_s = now() + lock_s / self.rate
        return held

    def _holder(self) -> Leadership | None:
        if now() >= self.ends_s:
            self.held = None
        return self.held

    async def _carried_out(self, call: Callable[[], Any], holder: str = "") -> Any:
        async def at_the_store() -> Any:
            await asyncio.sleep(before_s)
            if self.away if isinstance(self.away, bool) else holder.partition("/")[0] in self.away:
                raise StoreError("away")
            if self.broken is not None:
                raise self.broken
            return call()

        before_s, after_s = self.before_s, self.after_s
        task = asyncio.create_task(at_the_store())
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        found = await asyncio.shield(task)
        await asyncio.sleep(after_s)
        return found

    def _ended(self, call: asyncio.Task[Any]) -> None:
        self._under_way.discard(call)
        if not call.cancelled():
            # Nobody may be there any more to hear of it.
            call.exception()


@dataclass
class Turn:
    """From `from_s` to `until_s`, this member decided."""

    name: str
    epoch: int
    from_s: float
    until_s: float


class Member:
    """A candidate and its election. `turns` has its own terms, `followed` the other leaders with the time."""

    def __init__(self, store: Store, name: str, lock_s: float = LOCK_S) -> None:
        self.name = name
        self.turns: list[Turn] = []
        self.followed: list[tuple[float, Leadership | None]] = []
        self.away: list[str | None] = []
        self.reachable = True
        self.fails: Exception | None = None
        self.stands_still_until_s = 0.0
        self.election = Election(store, name, f"{name}:1", lock_s, self, self.away.append)
        self.task = asyncio.create_task(self._stoppable(self.election.run()))

    def lead(self, epoch: int, until_s: float) -> None:
        if self.fails is not None:
            raise self.fails
        turn = self.turn
        if turn is not None and turn.epoch == epoch:
            turn.until_s = until_s
            return
        self._end()
        self.turns.append(Turn(self.name, epoch, now(), until_s))

    def follow(self, leadership: Leadership | None) -> None:
        self._end()
        self.followed.append((now(), leadership))

    def _end(self) -> None:
        if self.turns:
            self.turns[-1].until_s = min(self.turns[-1].until_s, now())

    @property
    def turn(self) -> Turn | None:
        """The turn in which it decides now."""
        return self.turns[-1] if self.turns and now() < self.turns[-1].until_s else None

    @property
    def is_leader(self) -> bool:
        return self.turn is not None

    @property
    def leader(self) -> str | None:
        """Whom it follows now."""
        last = self.followed[-1][1] if self.followed else None
        return None if self.is_leader or last is None else last.holder

    @property
    def has_leader(self) -> bool:
        return self.is_leader or (self.leader is not None and self.reachable)

    def stop(self, for_s: float) -> None:
        """The process gets no turn for so long, as by SIGSTOP: what happens meanwhile it learns afterwards."""
        self.stands_still_until_s = max(self.stands_still_until_s, now() + for_s)

    @coroutine
    def _stoppable(self, work: Coroutine[Any, Any, None]) -> Generator[Any, Any, None]:
        step: Callable[[Any], Any] = work.send
        given: Any = None
        while True:
            try:
                waits_for = step(given)
            except StopIteration:
                return
            try:
                step, given = work.send, (yield waits_for)
            except BaseException as thrown:  # noqa: BLE001 - it is handed on
                step, given = work.throw, thrown
            while (left_s := self.stands_still_until_s - now()) > 0:
                try:
                    yield from asyncio.sleep(left_s).__await__()
                except asyncio.CancelledError as cancelled:
                    step, given = work.throw, cancelled

    async def end(self) -> None:
        """The process is killed."""
        self._end()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def check(*members: Member) -> list[Turn]:
    """All turns in their order: no two at once, and with epochs that rise."""
    turns = sorted((turn for one in members for turn in one.turns), key=lambda turn: turn.from_s)
    turns = [turn for turn in turns if turn.until_s > turn.from_s]
    for one, then in pairwise(turns):
        assert one.until_s <= then.from_s, f"two decide at once: {one} and {then}"
        assert one.epoch < then.epoch or (one.name, one.epoch) == (then.name, then.epoch), f"{one} and then {then}"
    return turns
