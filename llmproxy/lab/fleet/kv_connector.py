"""KV transfers between simulated servers in virtual time: leases of pinned blocks, and durations of reads.

The decode server reads the blocks of the prefill server, by the rules of `simulator.server.nixl` but without HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from llmproxy.lab.simulator.engine.engine import Engine
from llmproxy.lab.simulator.engine.kv_transfer import KvTransfer


@dataclass(slots=True, eq=False)
class KeptKv:
    """The pinned blocks of a prompt that another server will read. `cached_tokens` counts its prefix cache hits."""

    connector: KvConnector
    engine: Engine
    request_id: str
    cached_tokens: int

    @property
    def reachable(self) -> bool:
        """Whether the process that computed the blocks still runs."""
        return self.connector.engine is self.engine


class KvConnector:
    """The KV connector of one server. `before` is called before each change of the engine, and `after` after it."""

    def __init__(
        self, times: KvTransfer, loop: asyncio.AbstractEventLoop, before: Callable[[], None], after: Callable[[], None]
    ) -> None:
        self.times = times
        self.engine: Engine | None = None
        self._loop = loop
        self._before, self._after = before, after
        self._known: set[int] = set()
        self._leases: dict[KeptKv, asyncio.TimerHandle | None] = {}
        self._fetching: dict[str, KeptKv] = {}

    def restarted(self, engine: Engine) -> None:
        """Switches to the engine of a new process. The pinned blocks of the old process are gone."""
        for lease in self._leases.values():
            if lease is not None:
                lease.cancel()
        self._leases.clear()
        for kept in self._fetching.values():
            kept.connector.lease(kept, kept.connector.times.extension_s)
        self._fetching.clear()
        self._known.clear()
        self.engine = engine

    # --- KV that others fetch -----------------------------------------------------------------------------------------

    def keep(self, request_id: str, cached_tokens: int) -> KeptKv:
        """Pins the blocks of an ended request for one lease."""
        assert self.engine is not None, "a server without an engine serves nothing"
        kept = KeptKv(self, self.engine, request_id, cached_tokens)
        self.lease(kept, self.times.lease_s)
        return kept

    def lease(self, kept: KeptKv, lease_s: float) -> None:
        """Sets the lease of the blocks to `lease_s` from now, if they are still pinned."""
        if kept.reachable and kept.request_id in kept.engine.kv.kept:
            self.hold(kept)
            self._leases[kept] = self._loop.call_later(lease_s, self.release, kept)

    def hold(self, kept: KeptKv) -> None:
        """Pins the blocks without a lease, until `release` or a new `lease`."""
        if (lease := self._leases.pop(kept, None)) is not None:
            lease.cancel()
        if kept.reachable:
            self._leases[kept] = None

    def release(self, kept: KeptKv) -> bool:
        """Frees the pinned blocks of an ended request. Returns whether the blocks were still pinned."""
        if not kept.reachable:
            return False
        if (lease := self._leases.pop(kept, None)) is not None:
            lease.cancel()
        self._before()
        released = kept.engine.release(kept.request_id)
        self._after()
        return released

    # --- KV of others -------------------------------------------------------------------------------------------------

    def accepted(self, request_id: str, kept: KeptKv) -> None:
        """Records a request whose KV blocks are on another server."""
        self._fetching[request_id] = kept
        kept.connector.hold(kept)

    def left(self, request_id: str) -> None:
        """Records the end of a request. A transfer that has begun still ends."""
        if (kept := self._fetching.pop(request_id, None)) is not None:
            kept.connector.release(kept)

    def fetch(self, request_id: str, tokens: int, ended: Callable[[bool], None]) -> None:
        """Reads a request's KV blocks. Calls `ended` with True on success, unless this server dies earlier."""
        kept, engine = self._fetching.pop(request_id), self.engine
        known = id(kept.engine) in self._known
        if kept.reachable:
            took_s = self.times.transfer_s(tokens) + (0.0 if known else self.times.handshake_s)
            self._known.add(id(kept.engine))
        else:
            took_s = self.times.lost_s if known else self.times.unreachable_s

        def read() -> None:
            # Only after the read is it certain that the blocks were pinned all the time.
            right = kept.connector.release(kept)
            if self.engine is not engine:
                return
            assert engine is not None
            self._before()
            if kept.reachable:
                engine.fetched(request_id, right=right)
            else:
                if self.times.on_failure == "fail":
                    engine.abort(request_id)
                engine.not_fetched(request_id)
            ended(kept.reachable)
            self._after()

        self._loop.call_later(took_s, read)
