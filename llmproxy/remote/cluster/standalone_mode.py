"""Standalone mode: a member without a leader schedules its own requests, with its part of every limit."""

from __future__ import annotations

from collections import deque
from functools import partial
from math import inf

import structlog

from llmproxy.remote.client import UNSENT_MAX
from llmproxy.remote.cluster.leasing import ClusterLeasing
from llmproxy.remote.cluster.sessions import MemberSession
from llmproxy.remote.link import LocalLink
from llmproxy.remote.messages import FromMember, Hello, ResponseStored
from llmproxy.remote.server import Services
from llmproxy.scheduling.dispatcher import Dispatcher, loop_time

_log = structlog.get_logger()


class StandaloneMode:
    """Standalone mode: the member's own dispatcher replaces the leader, for this member only."""

    def __init__(self, dispatcher: Dispatcher, leasing: ClusterLeasing) -> None:
        self._dispatcher = dispatcher
        self._leasing = leasing
        self._session: MemberSession | None = None
        self._stored: deque[ResponseStored] = deque(maxlen=UNSENT_MAX)  # Stored responses to report to the next leader.
        self.limit_divisor = 0  # 0 while inactive, else the last known number of members. Every limit is divided by it.

    def begin(self, services: Services, me: Hello, limit_divisor: int, without_leader_s: float) -> None:
        """Enters standalone mode: this process grants its own leases, and divides each limit by `limit_divisor`.

        `me` is the Hello of this member. `without_leader_s` is only logged.
        """
        self.limit_divisor = limit_divisor
        _log.warning("cluster_standalone_began", parts=limit_divisor, without_leader_s=round(without_leader_s, 3))
        self._dispatcher.pools.split_limits(limit_divisor, loop_time())
        session = self._session = MemberSession(services, me, lambda: None)
        session.attach(LocalLink(self._leasing.handle))
        self._leasing.follow(LocalLink(partial(self._handle, session)))
        self._dispatcher.decide_until(inf)

    def _handle(self, session: MemberSession, message: FromMember) -> None:
        if isinstance(message, ResponseStored):
            self._stored.append(message)
        session.server.handle(message)

    def end(self) -> None:
        """Leaves standalone mode. `ClusterLeasing` reports requests and leases to the next leader."""
        if self._session is None:
            return
        _log.info("cluster_standalone_ended", parts=self.limit_divisor)
        self._dispatcher.decide_until(-inf)
        self._leasing.detach()
        while self._stored:
            stored = self._stored.popleft()
            self._leasing.response_stored(stored.response_id, stored.backend, stored.tenant)
        self._session.end(requests_continue=True)
        self._session, self.limit_divisor = None, 0
        self._dispatcher.pools.split_limits(1, loop_time())
