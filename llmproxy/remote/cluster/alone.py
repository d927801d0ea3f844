"""What a member does while there is no leader: it decides about its own requests, with its part of every limit."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from math import inf

import structlog

from llmproxy.remote.cluster.channel import LocalChannel
from llmproxy.remote.cluster.protocol import FromMember, Hello
from llmproxy.remote.cluster.relay import UNSENT_MAX, RelayDispatcher
from llmproxy.remote.cluster.session import MemberSession
from llmproxy.remote.workers import protocol
from llmproxy.remote.workers.session import SchedulerContext
from llmproxy.scheduling.dispatcher import Dispatcher

_log = structlog.get_logger()


class Alone:
    """Makes the dispatcher of a member decide about a shard for that member only, while `parts` is not 0."""

    def __init__(self, dispatcher: Dispatcher, relay: RelayDispatcher, shard: str) -> None:
        self._dispatcher = dispatcher
        self._relay = relay
        self._shard = shard
        self._log = _log.bind(pool=shard) if shard else _log
        self._session: MemberSession | None = None
        self._stored: deque[protocol.ResponseStored] = deque(maxlen=UNSENT_MAX)
        """What was stored meanwhile, of which the next leader is to hear."""
        self.parts = 0
        """How many members were known when it began; each may use that part of every limit."""

    def begin(self, context: SchedulerContext, me: Hello, parts: int, without_leader_s: float) -> None:
        """Decide from now on."""
        self.parts = parts
        self._log.warning("cluster_decides_alone", parts=parts, without_leader_s=round(without_leader_s, 3))
        self._dispatcher.pools.split_limits(parts, _now(), self._shard)
        session = self._session = MemberSession(context, me, lambda: None)
        session.attach(LocalChannel(self._relay.take))
        self._relay.follow(LocalChannel(partial(self._take, session)))
        self._dispatcher.decide_until(inf, self._shard)

    def _take(self, session: MemberSession, message: FromMember) -> None:
        if isinstance(message, protocol.ResponseStored):
            self._stored.append(message)
        session.take(message)

    def end(self) -> None:
        """Decide no more, because somebody leads or this member ends. What waits and what runs stays in the relay."""
        if self._session is None:
            return
        self._log.info("cluster_decides_alone_no_more", parts=self.parts)
        self._dispatcher.decide_until(-inf, self._shard)
        self._relay.detach()
        while self._stored:
            one = self._stored.popleft()
            self._relay.response_stored(one.response_id, one.backend, one.tenant)
        self._session.end(goes_on=True)
        self._session, self.parts = None, 0
        self._dispatcher.pools.split_limits(1, _now(), self._shard)


def _now() -> float:
    return asyncio.get_running_loop().time()
