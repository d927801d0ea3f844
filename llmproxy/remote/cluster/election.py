"""Which member schedules: the one that holds a lock in a store, for as long as it can renew that in time.

Neither consensus nor replication is ours: the store, Kubernetes or Valkey, has one holder at a time. A leader trusts
its own monotonic clock alone. It stops deciding before its lock can have ended in the store (self-fencing), as engines
cannot refuse what a former leader grants.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Protocol

import structlog

from llmproxy.scheduling.valkey import StoreError

RENEW_SHARE = 0.25
"""A leader renews its lock, and the others look at it, so often: as a share of the time for which it is held."""
FENCE_SHARE = 0.75
"""A leader decides so long after it last asked for a renewal that it got."""
SEEK_S = 0.1
"""How often a member looks at the lock that has no leader it can reach."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Leadership:
    """Who holds the lock: its name and address, and the number of its turn, which only rises."""

    holder: str
    address: str
    epoch: int


class LockStore(Protocol):
    """Keeps one lock, which has this name there."""

    @property
    def name(self) -> str: ...

    async def take(self, wanted: Leadership, held_s: float) -> Leadership:
        """Take the lock for `held_s`, or renew it, where it is free or `wanted.holder` has it; who has it then.

        A new holder gets a higher epoch than any before, and than that of `wanted`; so does one whose own is lower than
        that, because the store has forgotten what was before. Raises StoreError.
        """

    async def holder(self) -> Leadership | None:
        """Who has the lock. Raises StoreError."""

    async def release(self, holder: str) -> None:
        """Free the lock where `holder` has it. Raises StoreError."""

    async def close(self) -> None: ...


EPOCH_MAX = (1 << 31) - 1
"""The highest epoch of a turn: the most transitions that a Lease of Kubernetes counts."""


class Candidate(Protocol):
    """What the election is about. Each method is called on the loop, and does not wait."""

    def lead(self, epoch: int, until_s: float) -> None:
        """Decide from now on, or go on to, until `until_s` on the clock of the loop."""

    def follow(self, leadership: Leadership | None) -> None:
        """Somebody else leads, or nobody is known to."""

    @property
    def seeking(self) -> bool:
        """Whether there is no leader that can be reached."""

    @property
    def patience_s(self) -> float:
        """For how long a free lock is left to others."""


class Election:
    """Takes part in one election until `close`."""

    def __init__(
        self, store: LockStore, name: str, address: str, held_s: float, candidate: Candidate,
        away: Callable[[str | None], None], *, stands: bool = True,
    ) -> None:  # fmt: skip
        """Until `stand` is called, it only follows, unless it `stands`."""
        self._store = store
        self._name = name
        self._address = address
        self._held_s = held_s
        self._candidate = candidate
        self._away = away
        self._epoch = 0
        self._leads = False
        self._until_s = 0.0
        self.stands = stands
        """Whether it takes the lock where that is free."""
        self._may_hold = False
        self._free_s: float | None = None
        self._asking = asyncio.Lock()
        self._soon = asyncio.Event()
        self._look_s = -inf
        self._bug: str | None = None

    async def run(self) -> None:
        """Stand for election, and follow who is elected, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._soon.clear()
            asked_s = loop.time()
            try:
                # A renewal that is answered later comes too late to be of use.
                async with asyncio.timeout(FENCE_SHARE * self._held_s), self._asking:
                    found = await self._ask()
                self._away(None)
                self._found(found, asked_s)
            except (StoreError, TimeoutError) as error:
                self._failed(str(error) or "it does not answer")
            except Exception as bug:  # noqa: BLE001 - without this loop, nobody would lead or follow any more
                self._failed(f"{type(bug).__name__}: {bug}", bug)
            pause_s = SEEK_S if self._candidate.seeking else RENEW_SHARE * self._held_s
            try:
                async with asyncio.timeout_at(max(asked_s + pause_s, loop.time())):
                    await self._soon.wait()
            except TimeoutError:
                pass

    def stand(self) -> None:
        """Stand for election from now on."""
        self.stands = True
        self._soon.set()

    def look(self) -> None:
        """Look at the lock: the leader was lost. Now, or where that is so again and again, every SEEK_S."""
        loop = asyncio.get_running_loop()
        self._look_s = max(loop.time(), self._look_s + SEEK_S)
        loop.call_at(self._look_s, self._soon.set)

    def outbid(self, epoch: int) -> None:
        """Somebody knows of a later turn: the store has forgotten it, and the next one has to be beyond."""
        self._epoch = max(self._epoch, epoch)
        self._soon.set()

    async def _ask(self) -> Leadership | None:
        if not self.stands:
            return await self._store.holder()
        if not self._leads and (patience_s := self._candidate.patience_s) > 0.0:
            found = await self._store.holder()
            if found is not None and found.holder != self._name:
                self._free_s = None
                return found
            now = asyncio.get_running_loop().time()
            self._free_s = now if self._free_s is None else self._free_s
            if now < self._free_s + patience_s:
                return None
        self._free_s = None
        self._may_hold = True
        found = await self._store.take(Leadership(self._name, self._address, self._epoch), self._held_s)
        self._may_hold = found.holder == self._name
        return found

    def _found(self, found: Leadership | None, asked_s: float) -> None:
        if found is not None:
            self._epoch = max(self._epoch, found.epoch)
        if found is None or found.holder != self._name or not self.stands:
            self._leads = False
            self._candidate.follow(found)
            return
        until_s = asked_s + FENCE_SHARE * self._held_s
        if asyncio.get_running_loop().time() < until_s:
            self._leads, self._until_s = True, until_s
            self._candidate.lead(found.epoch, until_s)
        else:
            # This process stood still meanwhile.
            self._fence()

    def _failed(self, why: str, bug: Exception | None = None) -> None:
        if bug is not None and why != self._bug:
            self._bug = why
            message = {"message": "the election failed, and goes on", "exception": bug}
            asyncio.get_running_loop().call_exception_handler(message)
        self._away(why)
        self._fence()

    def _fence(self) -> None:
        """Without an answer, a leader goes on while its lock is sure, and followers follow whom they know."""
        if self._leads and asyncio.get_running_loop().time() >= self._until_s:
            self._leads = False
            self._candidate.follow(None)

    async def resign(self) -> None:
        """Stand for election no more, and free the lock. Others are still followed."""
        self.stands = False
        if self._leads:
            # Before the lock is free: who takes it decides at once.
            self._leads = False
            self._candidate.follow(None)
        try:
            # What was asked before would take the lock again.
            async with asyncio.timeout(FENCE_SHARE * self._held_s), self._asking:
                if self._may_hold:
                    await self._store.release(self._name)
                    self._may_hold = False
        except (StoreError, TimeoutError) as error:
            self._away(str(error) or "it does not answer")
        except Exception as bug:  # noqa: BLE001 - who hands a shard over goes on with the next one
            self._failed(f"{type(bug).__name__}: {bug}", bug)
        self._soon.set()
