"""The member side of leases: the `Leasing` of a cluster member, and its connection to a leader."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import structlog

from llmproxy.core.backends.backend import Backend
from llmproxy.core.backends.catalogue import Target
from llmproxy.core.domain import Outcome, Refused
from llmproxy.core.lease_events import LeaseEvent, Started
from llmproxy.lifecycle.background import spawned
from llmproxy.observe.exit import RequestExit
from llmproxy.remote import messages
from llmproxy.remote.client import DISCOVERY_LAG_S, NO_LEADER_RETRY_S, LeaseClient
from llmproxy.remote.cluster.election import Leadership
from llmproxy.remote.cluster.network import Network
from llmproxy.remote.link import TO_MEMBER, Link, Sender
from llmproxy.remote.messages import Hello, Message, RememberedPrefix, ToMember
from llmproxy.scheduling.dispatcher import Dispatcher, loop_time

PREFIXES_MAX = 2_000  # Prompts that a member remembers for its next leader.
HASHES_MAX = 100_000  # Maximum number of block hashes of all prompts: 50 MB of text, 4 MB of memory, 1 MB of frames.
CONNECT_S = 2.0  # Maximum time for connecting, until the leader's Welcome.

_log = structlog.get_logger()


class _Prefixes:
    """Remembers which blocks of the member's most recent requests are cached, and where."""

    def __init__(self, backends: Mapping[str, Backend]) -> None:
        self._backends = backends
        self._by_lease: OrderedDict[int, tuple[RememberedPrefix, int]] = OrderedDict()
        """Lease -> the prefix of its request, and the value of `Backend.processes` when the prefix was cached."""
        self._hashes = 0

    def note(self, pool: str, lease: int, name: str, hashes: Sequence[int]) -> None:
        """Records which blocks the backend of a lease has cached: blocks of the prompt, or of prompt and answer."""
        backend = self._backends.get(name)
        if backend is None or not hashes:
            return
        self._forget(lease)
        prefix = RememberedPrefix(pool, name, tuple(hashes))
        self._by_lease[lease] = prefix, backend.processes
        self._hashes += len(prefix.hashes)
        while self._hashes > HASHES_MAX or len(self._by_lease) > PREFIXES_MAX:
            self._forget(next(iter(self._by_lease)))

    def _forget(self, lease: int) -> None:
        if lease in self._by_lease:
            self._hashes -= len(self._by_lease.pop(lease)[0].hashes)

    def all(self) -> Iterator[RememberedPrefix]:
        """Yields the remembered prefixes, oldest first, except those of ended engine processes."""
        for prefix, process in self._by_lease.values():
            backend = self._backends.get(prefix.backend)
            if backend is not None and backend.processes == process:
                yield prefix


class ClusterLeasing(LeaseClient):
    """A `Leasing` that calls the leader, which may be in this process. Names are resolved in this process."""

    def __init__(self, local: Dispatcher, backends: Container[str]) -> None:
        """Creates the member side. `local` resolves names. `backends`: names of the backends that this member knows."""
        super().__init__(backends)
        self._local = local
        self._prefixes = _Prefixes(local.pools.backends)

    @property
    def is_leader(self) -> bool:
        """Whether the leader is in this process."""
        return self.link is not None and self.link.local

    @property
    def is_remote(self) -> bool:
        """Whether the leader is in another process."""
        return self.link is not None and not self.link.local

    def follow(self, leader: Sender) -> None:
        """Uses this leader from now on, and reports all waiting requests, running leases and known prefixes to it."""
        self.attach(leader, self._prefixes.all())

    async def resolve(
        self, name: str | None, no_backend_wait_s: float, body_bytes: int, key: str = "", beside: str | None = None
    ) -> Target:
        """Resolves a name in this process, as `Dispatcher.resolve`.

        While this process waits for the name, the leader counts the request for `/scale`. Then waits for the leader to
        know the name, at most DISCOVERY_LAG_S, because a leader refuses unknown names.
        """
        ends_s = loop_time() + no_backend_wait_s
        try:
            return await self._local.resolve(name, 0.0, body_bytes, key, beside)
        except Refused as refused:
            if refused.outcome is not Outcome.REJECTED_NO_BACKENDS or no_backend_wait_s <= 0.0:
                raise

        def message(call: int) -> messages.Resolve:
            return messages.Resolve(call, name, ends_s - loop_time(), body_bytes, key, beside)

        asking = asyncio.create_task(self._ask_leader(message), name="hold at the leader")
        try:
            target = await self._local.resolve(name, no_backend_wait_s, body_bytes, key, beside)
            if not self.is_leader:
                await asyncio.wait([asking], timeout=min(DISCOVERY_LAG_S, ends_s - loop_time()))
            return target
        finally:
            asking.cancel()

    def direct(self, backend: str, cut: Callable[[], None]) -> AbstractContextManager[None]:
        return self._local.direct(backend, cut)

    async def caught_up(self) -> None:
        """Waits as `LeaseClient.caught_up`. Returns at once if the leader is in this process."""
        if self.is_remote:
            await super().caught_up()

    async def _ask_leader(self, message: Callable[[int], Message]) -> None:
        """Calls a leader in another process. Waits for such a leader; repeats the call if the leader is lost."""
        while True:
            if self.is_remote:
                try:
                    await self.answer(message)
                except Refused as refused:
                    if refused.outcome is not Outcome.DRAINING:
                        return
                else:
                    return
            await asyncio.sleep(NO_LEADER_RETRY_S)

    def apply(self, event: LeaseEvent, now: float) -> None:
        if isinstance(event, Started):
            grant = self.grant(event.lease)
            self._prefixes.note(grant.request.pool, grant.lease, grant.placed.backend, grant.request.prefix)
        super().apply(event, now)

    def cached(self, pool: str, lease: int, backend: str, hashes: Sequence[int]) -> None:
        self._prefixes.note(pool, lease, backend, hashes)
        super().cached(pool, lease, backend, hashes)

    def exited(self, ended: RequestExit) -> None:
        """Reports the exit of a request, for the page of a leader in another process."""
        if self.is_remote:
            self.report(messages.ExitReport(ended.later(-loop_time())))

    def drain(self, *, finish_waiting: bool = False) -> None:
        # A leader goes on with the requests of other members until it has resigned.
        self._local.drain(finish_waiting=True, admitting=True)
        super().drain(finish_waiting=finish_waiting)


class LeaderConnection:
    """A connection from this member to a leader, which carries lease calls once the leader has sent a Welcome."""

    def __init__(
        self, leadership: Leadership, handle: Callable[[LeaderConnection, ToMember], None],
        lost: Callable[[LeaderConnection, str], None],
    ) -> None:  # fmt: skip
        """Creates a connection that passes messages to `handle`, and the reason of its end to `lost`."""
        self.leadership = leadership
        self.link: Link[ToMember] = Link(
            TO_MEMBER, lambda message: handle(self, message), lambda: lost(self, self._end_reason()), local=False
        )
        self.refusal: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        """Resolves to None when the leader has accepted this member, or to the reason of a refusal."""

    async def open(self, network: Network, me: Hello) -> str | None:
        """Connects, and waits for the Welcome. Returns None on success, else the reason of the failure."""
        try:
            async with asyncio.timeout(CONNECT_S):
                await network.connect(self.leadership.address, lambda: self.link)
                self.link.send(me)
                return await self.refusal
        except (OSError, ValueError) as error:
            return str(error) or "no answer"

    @property
    def accepted(self) -> bool:
        """Whether the leader has welcomed this member."""
        return self.refusal.done() and not self.refusal.cancelled() and self.refusal.result() is None

    def _end_reason(self) -> str:
        if self.refusal.done():
            return "the connection ended"
        return "the connection ended before an answer, as where only one of two members uses TLS"

    def set_refusal(self, why: str | None) -> None:
        """Resolves `refusal` with the reason, or None for a Welcome. Later calls change nothing."""
        if not self.refusal.done():
            self.refusal.set_result(why)


class Dialer:
    """Connects this member to the leader, the holder of the lock. Makes one attempt at a time."""

    def __init__(
        self, network: Network, hello: Callable[[], Hello], handle: Callable[[LeaderConnection, ToMember], None],
        lost: Callable[[LeaderConnection, str], None],
    ) -> None:  # fmt: skip
        """Creates a dialer. `hello` returns the Hello of this member, and `handle` gets each message of the leader.

        `lost` is called when a connection to a leader is closed.
        """
        self._network = network
        self._hello = hello
        self._handle = handle
        self._lost = lost
        self._attempt: asyncio.Task[None] | None = None
        self._to: Leadership | None = None
        self.failure: tuple[str, str] | None = None  # Holder and reason of the last failed attempt.

    def dial(self, leadership: Leadership) -> None:
        """Begins to connect to this leader, and cancels an attempt to another leader.

        Does nothing if an attempt to this leader is under way. When the leader has sent its Welcome, `handle` gets it.
        A failed attempt is not repeated. It is logged, unless the last failure had the same leader and reason.
        """
        if self._attempt is not None and not self._attempt.done():
            if self._to == leadership:
                return
            self._attempt.cancel()
        self._to = leadership
        self._attempt = spawned(self._connect(leadership), "connect")

    async def _connect(self, leadership: Leadership) -> None:
        """Connects to a leader, whose Welcome then makes this member follow it."""
        connection = LeaderConnection(leadership, self._handle, self._lost)
        try:
            why = await connection.open(self._network, self._hello())
        finally:
            if not connection.accepted:
                connection.link.abort()
        if why is not None and (leadership.holder, why) != self.failure:
            _log.warning("cluster_leader_unreachable", leader=leadership.holder, address=leadership.address, error=why)
            self.failure = leadership.holder, why

    async def close(self) -> None:
        """Cancels the attempt that is under way."""
        if self._attempt is not None:
            self._attempt.cancel()
            await asyncio.gather(self._attempt, return_exceptions=True)
