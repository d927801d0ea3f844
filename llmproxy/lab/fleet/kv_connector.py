"""How simulated servers hand KV to each other in virtual time: what is kept for whom, and when a read has ended.

The rules are those of `simulator.server.nixl`, without the HTTP between the two: the server that answers pulls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from llmproxy.lab.simulator.engine.engine import Engine
from llmproxy.lab.simulator.engine.kv_transfer import KvTransfer


@dataclass(slots=True, eq=False)
class KeptKv:
    """The blocks of a prompt that a server has computed for another one. `cached_tokens` it had found cached."""

    connector: KvConnector
    engine: Engine
    request_id: str
    cached_tokens: int

    @property
    def reachable(self) -> bool:
        """Whether the process that computed it still serves."""
        return self.connector.engine is self.engine

    def hold(self) -> None:
        """The other server has the request: as long as it waits there, it keeps the lease alive."""
        self.connector.hold(self)

    def lost(self) -> None:
        """The other server is gone, and keeps the lease alive no more."""
        self.connector.lease(self, self.connector.times.extension_s)

    def release(self) -> bool:
        """The blocks are needed no more; whether they were kept until now."""
        return self.connector.release(self)


class KvConnector:
    """The part of one server in transfers. `before` and `after` are called around each change of its engine."""

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
        """A process begins with this engine, and what the one before it kept is gone."""
        for lease in self._leases.values():
            if lease is not None:
                lease.cancel()
        self._leases.clear()
        for kept in self._fetching.values():
            kept.lost()
        self._fetching.clear()
        self._known.clear()
        self.engine = engine

    # --- KV that others fetch -----------------------------------------------------------------------------------------

    def keep(self, request_id: str, cached_tokens: int) -> KeptKv:
        """The blocks of a request that has ended stay, for the time of a lease."""
        assert self.engine is not None, "a server without an engine serves nothing"
        kept = KeptKv(self, self.engine, request_id, cached_tokens)
        self.lease(kept, self.times.lease_s)
        return kept

    def lease(self, kept: KeptKv, lease_s: float) -> None:
        """Keep blocks for so long from now on, if they are still kept."""
        if kept.reachable and kept.request_id in kept.engine.kv.kept:
            self.hold(kept)
            self._leases[kept] = self._loop.call_later(lease_s, self.release, kept)

    def hold(self, kept: KeptKv) -> None:
        """Keep blocks until they are released."""
        if (lease := self._leases.pop(kept, None)) is not None:
            lease.cancel()
        if kept.reachable:
            self._leases[kept] = None

    def release(self, kept: KeptKv) -> bool:
        """Give blocks away; whether they were kept until now."""
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
        """A request came whose KV is elsewhere."""
        self._fetching[request_id] = kept
        kept.hold()

    def left(self, request_id: str) -> None:
        """A request is over. A transfer that has begun goes on to its end."""
        if (kept := self._fetching.pop(request_id, None)) is not None:
            kept.release()

    def fetch(self, request_id: str, tokens: int, ended: Callable[[bool], None]) -> None:
        """Read the KV of a request. `ended` is told whether it could be had, unless this server dies before."""
        kept, engine = self._fetching.pop(request_id), self.engine
        known = id(kept.engine) in self._known
        if kept.reachable:
            took_s = self.times.transfer_s(tokens) + (0.0 if known else self.times.handshake_s)
            self._known.add(id(kept.engine))
        else:
            took_s = self.times.lost_s if known else self.times.unreachable_s

        def read() -> None:
            # Only now is it certain that the blocks were its own to the end.
            right = kept.release()
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
