"""Members of one cluster on the loop of a test, over the same simulated replicas, with a lock in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest

from llmproxy.app import running
from llmproxy.config import Config
from llmproxy.lab.simulator.replica import Replica, ReplicaOptions
from llmproxy.remote.cluster import build
from llmproxy.remote.cluster.cluster import Cluster
from llmproxy.remote.cluster.sessions import MemberSession
from tests.e2e.leftovers import nothing_left
from tests.e2e.proxies import QUICK, ProxyUnderTest, all_up, merged_with, until
from tests.remote.cluster.elections import Store


class Members(list[ProxyUnderTest]):
    """The members, in the order of their names m0, m1, ..."""

    def __init__(self, lock: Store) -> None:
        super().__init__()
        self.lock = lock

    @property
    def leader(self) -> ProxyUnderTest:
        """The leader."""
        (leader,) = [one for one in self if cluster_of(one).is_leader]
        return leader

    @property
    def followers(self) -> list[ProxyUnderTest]:
        return [one for one in self if not cluster_of(one).is_leader]

    def together(self) -> bool:
        """Whether all members follow a single leader."""
        led = [cluster_of(one) for one in self]
        return sum(one.is_leader for one in led) == 1 and all(
            one.has_leader and len(one.members) == len(self) for one in led
        )

    def check_settled(self) -> None:
        """Nothing is left in any member."""
        for one in self:
            one.check()
            leasing = cluster_of(one).leasing
            assert (leasing.waiting, leasing.running) == (0, 0)
            for session in sessions_of(one).values():
                assert (session.server.open_requests, session.server.leases) == (0, 0)


def cluster_of(member: ProxyUnderTest) -> Cluster:
    assert member.app.cluster is not None
    return member.app.cluster


def sessions_of(member: ProxyUnderTest) -> dict[str, MemberSession]:
    """Returns the sessions of a leader by member name; empty for a follower."""
    sessions = cluster_of(member).sessions
    return {} if sessions is None else sessions.by_name


@asynccontextmanager
async def members(
    count: int, *options: ReplicaOptions, fixed_limit: int | None = None, **config: Any
) -> AsyncIterator[Members]:
    """So many members over one replica for each of `options`. All follow one of them when the block is entered."""
    with pytest.MonkeyPatch.context() as patch:
        found = Members(Store(away=set()))
        patch.setattr(build, "open_lock_store", lambda _config, _api: found.lock)
        async with nothing_left(), AsyncExitStack() as stack:
            replicas = [await stack.enter_async_context(Replica(one)) for one in options]
            backends = [
                {"url": one.url, "name": f"b{number}", "max_in_flight": fixed_limit}
                for number, one in enumerate(replicas)
            ]
            http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
            for number in range(count):
                cluster = {"listen": "127.0.0.1:0", "member": f"m{number}", "lock_s": 1.0} | config.get("cluster", {})
                data = merged_with(QUICK | {"backends": backends}, config | {"cluster": cluster})
                app = await stack.enter_async_context(running(Config.model_validate(data)))
                found.append(ProxyUnderTest(app, replicas, http, data))
            await until(lambda: all(all_up(one) for one in found) and found.together())
            yield found
            for one in found:
                await one.settled()
            found.check_settled()
