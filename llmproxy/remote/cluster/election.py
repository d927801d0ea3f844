"""Leader election: the member that holds a lock in a store leads, as long as it renews the lock in time.

The store, Kubernetes or Valkey, guarantees a single holder; llmproxy implements no consensus. A leader trusts only its
own monotonic clock, and stops deciding before its lock can expire in the store (self-fencing), because engines cannot
refuse a request that a former leader placed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Protocol

import structlog

RENEW_SHARE = 0.25  # Interval of renewing and reading the lock, as a share of the lock time.
FENCE_SHARE = 0.75  # Time for which a leader may decide after sending a renewal, as a share of the lock time.
SEEK_S = 0.1  # Interval of reading the lock, for a member that cannot reach a leader.

_log = structlog.get_logger()


class StoreError(Exception):
    """The lock store is unreachable, or returned an error. The text is for people."""


@dataclass(frozen=True, slots=True)
class Leadership:
    """The member that holds the lock, and so leads the cluster."""

    holder: str  # The id of the process that holds the lock; see `Cluster.id`.
    address: str
    epoch: int  # The number of this term of leadership. Each term has a higher epoch than all terms before.


class LockStore(Protocol):
    """The lock of a cluster in a store, Kubernetes or Valkey. Its holder is the leader."""

    @property
    def name(self) -> str: ...

    async def take(self, wanted: Leadership, lock_s: float) -> Leadership:
        """Takes the lock for `lock_s` if it is free, or renews it if `wanted.holder` has it. Returns its holder.

        A new holder gets a higher epoch than all epochs in the store and than `wanted.epoch`. So does a holder whose
        epoch in the store is below `wanted.epoch`, because the store has lost data. Raises StoreError.
        """

    async def holder(self) -> Leadership | None:
        """Returns the holder of the lock; None if the lock is free. Raises StoreError if the store cannot be read."""

    async def release(self, holder: str) -> None:
        """Frees the lock if `holder` has it. Raises StoreError if the store cannot be reached."""

    async def close(self) -> None: ...


EPOCH_MAX = (1 << 31) - 1  # The highest epoch: a Kubernetes Lease counts its transitions in 32 bits.


class ElectionMember(Protocol):
    """The member that takes part in an election. Its methods do not block."""

    def lead(self, epoch: int, until_s: float) -> None:
        """Leads, or continues to lead, until `until_s` on the event loop's clock."""

    def follow(self, leadership: Leadership | None) -> None:
        """Stops leading, and follows this leader; None if no leader is known."""

    @property
    def has_leader(self) -> bool:
        """Whether this member leads or can reach the leader."""


class Election:
    """Takes part in an election for one member."""

    def __init__(
        self, store: LockStore, name: str, address: str, lock_s: float, candidate: ElectionMember,
        on_store_error: Callable[[str | None], None], *, campaign: bool = True,
    ) -> None:  # fmt: skip
        self._store = store
        self._name = name
        self._address = address
        self._lock_s = lock_s
        self._candidate = candidate
        self._on_store_error = on_store_error  # Gets the error of each failed access, and None after each success.
        self._epoch = 0
        self._is_leader = False
        self._until_s = 0.0
        self.campaigning = campaign  # Whether this member takes the lock when it is free.
        self._may_hold_lock = False
        self._store_access = asyncio.Lock()
        self._wake = asyncio.Event()
        self._next_check_s = -inf
        self._last_bug: str | None = None

    async def run(self) -> None:
        """Takes, renews and reads the lock, and calls `lead` or `follow` of the member, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            asked_s = loop.time()
            try:
                # A renewal that is answered later cannot extend the leadership.
                async with asyncio.timeout(FENCE_SHARE * self._lock_s), self._store_access:
                    leadership = await self._access_lock()
                self._on_store_error(None)
                self._apply(leadership, asked_s)
            except (StoreError, TimeoutError) as error:
                self._failed(str(error) or "it does not answer")
            except Exception as bug:  # noqa: BLE001 - if this loop ended, the member could neither lead nor follow
                self._failed(f"{type(bug).__name__}: {bug}", bug)
            pause_s = RENEW_SHARE * self._lock_s if self._candidate.has_leader else SEEK_S
            try:
                async with asyncio.timeout_at(max(asked_s + pause_s, loop.time())):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def campaign(self) -> None:
        """Tries to become leader from now on."""
        self.campaigning = True
        self._wake.set()

    def check_soon(self) -> None:
        """Reads or takes the lock now, because the leader was lost. Repeated calls do so at most every SEEK_S."""
        loop = asyncio.get_running_loop()
        self._next_check_s = max(loop.time(), self._next_check_s + SEEK_S)
        loop.call_at(self._next_check_s, self._wake.set)

    def raise_epoch(self, epoch: int) -> None:
        """Takes the lock with an epoch above `epoch`. Some member knows this epoch, although the store has lost it."""
        self._epoch = max(self._epoch, epoch)
        self._wake.set()

    async def _access_lock(self) -> Leadership | None:
        if not self.campaigning:
            return await self._store.holder()
        self._may_hold_lock = True
        taken = await self._store.take(Leadership(self._name, self._address, self._epoch), self._lock_s)
        self._may_hold_lock = taken.holder == self._name
        return taken

    def _apply(self, leadership: Leadership | None, asked_s: float) -> None:
        if leadership is not None:
            self._epoch = max(self._epoch, leadership.epoch)
        if leadership is None or leadership.holder != self._name or not self.campaigning:
            self._is_leader = False
            self._candidate.follow(leadership)
            return
        until_s = asked_s + FENCE_SHARE * self._lock_s
        if asyncio.get_running_loop().time() < until_s:
            self._is_leader, self._until_s = True, until_s
            self._candidate.lead(leadership.epoch, until_s)
        else:
            # This process was paused meanwhile.
            self._fence()

    def _failed(self, why: str, bug: Exception | None = None) -> None:
        if bug is not None and why != self._last_bug:
            self._last_bug = why
            message = {"message": "an election step failed and is repeated", "exception": bug}
            asyncio.get_running_loop().call_exception_handler(message)
        self._on_store_error(why)
        self._fence()

    def _fence(self) -> None:
        """Stops leading once the lock may have expired. A follower keeps its leader while the store does not answer."""
        if self._is_leader and asyncio.get_running_loop().time() >= self._until_s:
            self._is_leader = False
            self._candidate.follow(None)

    async def resign(self) -> None:
        """Stops campaigning for good, and frees the lock. The member still follows other leaders."""
        self.campaigning = False
        if self._is_leader:
            # Stop before the lock is free, because its next holder decides at once.
            self._is_leader = False
            self._candidate.follow(None)
        try:
            # A call that is under way could take the lock again: wait for it.
            async with asyncio.timeout(FENCE_SHARE * self._lock_s), self._store_access:
                if self._may_hold_lock:
                    await self._store.release(self._name)
                    self._may_hold_lock = False
        except (StoreError, TimeoutError) as error:
            self._on_store_error(str(error) or "it does not answer")
        except Exception as bug:  # noqa: BLE001 - the member goes on closing
            self._failed(f"{type(bug).__name__}: {bug}", bug)
        self._wake.set()
