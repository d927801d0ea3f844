"""Pages of a member: those that only the leader can answer, it asks of the leader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import orjson
from aiohttp import web

from llmproxy.gateway.admin.backends import BACKENDS, DRAINING, RELOAD
from llmproxy.gateway.admin.debug import page_response, refusal
from llmproxy.gateway.admin.scale import SCALE
from llmproxy.gateway.pages import READY, OwnPages, check_method, not_ready
from llmproxy.gateway.proxying.rules import Rulebook
from llmproxy.remote.cluster.cluster import Cluster, Page
from llmproxy.remote.cluster.shard import Shard
from llmproxy.remote.workers import protocol
from llmproxy.remote.workers.page import PASSED_ON
from llmproxy.remote.workers.remote import RemotePages

PATH = "/admin/cluster"
POOL = "pool"
"""The parameter of a query that asks the leader of this pool, where it has a lock of its own."""
OF_LEADER = (SCALE, "/debug", "/admin", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""What begins so is about the waiting room, the backends as the scheduler sees them, or what it does with them."""
PAGE_BYTES_MAX = 8 << 20
"""A longer page would not fit into a frame."""
PASSED_ON_MAX = 2
"""From a member to the leader that it thinks of, and from there to the one that leads."""
UNLED = "Nobody leads the pool of this backend now, and the next leader would not know what was asked. Ask again."
DIFFER = "Members differ about who leads what this page is about, and have passed it on twice. Ask again."


def bounded(page: Page) -> Page:
    """The same pages, but for those that are too long for a member to pass on."""

    async def answer(asked: protocol.PageRequest) -> protocol.PageResponse:
        found = await page(asked)
        if len(found.body) <= PAGE_BYTES_MAX:
            return found
        why = b"This page is too long to be passed on. Ask the member that leads."
        return protocol.PageResponse(asked.call, 502, "Bad Gateway", (("content-type", "text/plain"),), why)

    return answer


class MemberPages:
    """`Pages` of a member."""

    def __init__(self, own: OwnPages, cluster: Cluster, rulebook: Rulebook) -> None:
        self._own = own
        self._cluster = cluster
        self._rulebook = rulebook

    async def show(self, path: str, request: web.BaseRequest) -> web.Response:
        if path == READY and self._cluster.refuses:
            return not_ready("this member of the cluster has no leader")
        return await self._own.show(path, request)

    async def administer(self, path: str, request: web.BaseRequest, on_admin_port: bool) -> web.Response:
        if path == PATH:
            self._own.check(path, request, on_admin_port)
            check_method(request, "GET", "HEAD")
            return web.Response(body=orjson.dumps(status_of(self._cluster)), content_type="application/json")
        if path == RELOAD or not path.startswith(OF_LEADER):
            return await self._own.administer(path, request, on_admin_port)
        shard = self._asked_about(path, request)
        if not shard.led and (path == SCALE or path.startswith(f"{SCALE}/")):
            self._own.check(path, request, on_admin_port)
            return _unknown(shard)
        if not shard.led and not shard.parts and DRAINING.fullmatch(path):
            self._own.check(path, request, on_admin_port)
            return refusal(503, UNLED, {"Retry-After": "5"})
        if shard.calls is not None:
            self._own.check(path, request, on_admin_port)
            if request.get(PASSED_ON, 0) >= PASSED_ON_MAX:
                return refusal(503, DIFFER, {"Retry-After": "5"})
            return await RemotePages(shard.calls, self._rulebook).show(path, request)
        response = await self._own.administer(path, request, on_admin_port)
        if path in MERGED and response.status == 200 and shard is self._cluster.default and POOL not in request.query:
            return await self._merged(MERGED[path], response, request)
        return response

    def _asked_about(self, path: str, request: web.BaseRequest) -> Shard:
        """The shard whose leader answers. What is about none is the business of the default one."""
        if drained := DRAINING.fullmatch(path):
            return self._cluster.shard_of_backend(drained[1])
        named = path.removeprefix(SCALE).strip("/") if path.startswith(f"{SCALE}/") else request.query.get(POOL)
        return self._cluster.shard_of(named)

    async def _merged(self, page: Merged, response: web.Response, request: web.BaseRequest) -> web.Response:
        """A page that lists something of all shards: what other members lead, they are asked for.

        Where one of them gives no answer, that is the answer: a part of a list would be taken for the whole. What
        nobody leads is listed as this member sees it, if it sees that as well as others do.
        """
        assert isinstance(response.body, bytes)
        listed: list[dict[str, Any]] = orjson.loads(response.body)[page.entries]
        elsewhere = [one for one in self._cluster.shards.values() if not one.leads]
        if page.seen_by_all:
            elsewhere = [one for one in elsewhere if one.calls is not None]
        if not elsewhere:
            return response
        merged = [one for one in listed if page.shard_of(self._cluster, one) not in elsewhere]
        for shard in elsewhere:
            if shard.calls is None:
                return _unknown(shard)
            found = await RemotePages(shard.calls, self._rulebook).get(page.path_for(shard), request)
            if found.status == 404:
                # Nobody has ever served this pool.
                continue
            if found.status != 200:
                return web.Response(
                    status=found.status, reason=found.reason, headers=list(found.headers), body=found.body
                )
            answer = orjson.loads(found.body)
            theirs = answer.get(page.entries, [answer])
            merged += [one for one in theirs if page.shard_of(self._cluster, one) is shard]
        merged.sort(key=lambda one: str(one[page.name]))
        return page_response({page.entries: merged})


@dataclass(frozen=True, slots=True)
class Merged:
    """A page with a list of `entries`, which have a `name`. `path_for` is where a leader has those of its shard.

    `seen_by_all`: members that do not lead see the same, but for what is in flight.
    """

    entries: str
    name: str
    shard_of: Callable[[Cluster, dict[str, Any]], Shard]
    path_for: Callable[[Shard], str]
    seen_by_all: bool


MERGED = {
    SCALE: Merged(
        "pools",
        "pool",
        lambda cluster, one: cluster.shard_of(one["pool"]),
        lambda shard: f"{SCALE}/{quote(shard.name)}",
        seen_by_all=False,
    ),
    BACKENDS: Merged(
        "backends",
        "backend",
        lambda cluster, one: cluster.shard_of_backend(one["backend"]),
        lambda shard: f"{BACKENDS}?{urlencode({POOL: shard.name})}",
        seen_by_all=True,
    ),
}


def _unknown(shard: Shard) -> web.Response:
    what = f"No member leads the pool {shard.name} now" if shard.name else "This member of the cluster has no leader"
    return refusal(503, f"{what}, and sees a part of the work at most. Ask again.", {"Retry-After": "5"})


def status_of(cluster: Cluster) -> dict[str, Any]:
    """The cluster as this member sees it: what is led together, and the `pools` that have a lock of their own."""
    return {
        "member": cluster.me.name,
        "address": cluster.me.address,
        **_status(cluster, cluster.default),
        "pools": {name: _status(cluster, shard) for name, shard in cluster.shards.items() if name},
    }


def _status(cluster: Cluster, shard: Shard) -> dict[str, Any]:
    found: dict[str, Any] = {
        "lock": shard.lock,
        "leads": shard.leads,
        "leader": shard.leader,
        "alone": shard.parts > 0,
        "epoch": shard.epoch,
        "members": list(shard.members),
        "waiting": shard.relay.waiting,
        "running": shard.relay.running,
        "changes": shard.changes,
        "last_gap_s": shard.last_gap_s,
        "lock_away": shard.store_away,
        "leader_away": shard.leader_away,
    }
    if shard.sessions is not None:
        found["sessions"] = [
            {
                "member": name,
                "address": session.hello.address,
                "version": session.hello.version,
                "same_config": session.hello.config == cluster.me.config,
                "connected": session.connected,
                "requests": session.open_requests,
                "leases": session.leases,
            }
            for name, session in sorted(shard.sessions.by_name.items())
        ]
    return found
