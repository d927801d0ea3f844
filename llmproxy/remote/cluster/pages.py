"""The pages of a member. It forwards requests that only a leader can answer."""

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
from llmproxy.remote.cluster.cluster import Cluster
from llmproxy.remote.cluster.shard import Shard
from llmproxy.remote.messages import PageRequest, PageResponse
from llmproxy.remote.pages import PASSED_ON, RemotePages
from llmproxy.remote.server import Page

PATH = "/admin/cluster"
POOL = "pool"
"""The query parameter that selects the leader of a pool."""
LEADER_PATHS = (SCALE, "/debug", "/admin", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Prefixes of paths that the leader answers, because they concern the waiting room or the scheduler's backends."""
PAGE_BYTES_MAX = 8 << 20
"""A longer page would not fit into a frame."""
PASSED_ON_MAX = 2
"""Two hops: from a member to the leader that it knows, and from there to the actual leader."""
UNLED = "The pool of this backend has no leader now, and the next leader would not know of this change. Try again."
DIFFER = "Members disagree about the leader for this page, and have forwarded the request twice. Try again."


def bounded(page: Page) -> Page:
    """Wraps a page handler: an answer that does not fit into a frame becomes 502."""

    async def answer(asked: PageRequest) -> PageResponse:
        answered = await page(asked)
        if len(answered.body) <= PAGE_BYTES_MAX:
            return answered
        why = b"This page is too long to forward. Ask the leader itself."
        return PageResponse(asked.call, 502, "Bad Gateway", (("content-type", "text/plain"),), why)

    return answer


class MemberPages:
    """The `Pages` of a member."""

    def __init__(self, own: OwnPages, cluster: Cluster, rulebook: Rulebook) -> None:
        self._own = own
        self._cluster = cluster
        self._rulebook = rulebook

    async def show(self, path: str, request: web.BaseRequest) -> web.Response:
        if path == READY and self._cluster.is_refusing:
            return not_ready("this member of the cluster has no leader")
        return await self._own.show(path, request)

    async def administer(self, path: str, request: web.BaseRequest, on_admin_port: bool) -> web.Response:
        if path == PATH:
            self._own.check(path, request, on_admin_port)
            check_method(request, "GET", "HEAD")
            return web.Response(body=orjson.dumps(cluster_status(self._cluster)), content_type="application/json")
        if path == RELOAD or not path.startswith(LEADER_PATHS):
            return await self._own.administer(path, request, on_admin_port)
        shard = self._asked_about(path, request)
        if not shard.has_leader and (path == SCALE or path.startswith(f"{SCALE}/")):
            self._own.check(path, request, on_admin_port)
            return _unknown(shard)
        if not shard.has_leader and not shard.limit_divisor and DRAINING.fullmatch(path):
            self._own.check(path, request, on_admin_port)
            return refusal(503, UNLED, {"Retry-After": "5"})
        if shard.leader_client.is_remote:
            self._own.check(path, request, on_admin_port)
            if request.get(PASSED_ON, 0) >= PASSED_ON_MAX:
                return refusal(503, DIFFER, {"Retry-After": "5"})
            return await RemotePages(shard.leader_client, self._rulebook).show(path, request)
        response = await self._own.administer(path, request, on_admin_port)
        if path in MERGED and response.status == 200 and shard is self._cluster.default and POOL not in request.query:
            return await self._merged(MERGED[path], response, request)
        return response

    def _asked_about(self, path: str, request: web.BaseRequest) -> Shard:
        """Returns the shard that a request concerns, else the default shard."""
        if drained := DRAINING.fullmatch(path):
            return self._cluster.shard_for_backend(drained[1])
        named = path.removeprefix(SCALE).strip("/") if path.startswith(f"{SCALE}/") else request.query.get(POOL)
        return self._cluster.shard_for_pool(named)

    async def _merged(self, page: Merged, response: web.Response, request: web.BaseRequest) -> web.Response:
        """Returns a list of the entries of all shards. Entries of other shards come from their leaders.

        If a leader fails to answer, its error is the response, because a partial list would look complete. Entries of a
        shard without a leader are listed as this member sees them if the page is `seen_by_all`.
        """
        assert isinstance(response.body, bytes)
        listed: list[dict[str, Any]] = orjson.loads(response.body)[page.entries]
        elsewhere = [shard for shard in self._cluster.shards.values() if not shard.is_leader]
        if page.seen_by_all:
            elsewhere = [shard for shard in elsewhere if shard.leader_client.is_remote]
        if not elsewhere:
            return response
        merged = [one for one in listed if page.shard_of(self._cluster, one) not in elsewhere]
        for shard in elsewhere:
            if not shard.leader_client.is_remote:
                return _unknown(shard)
            found = await RemotePages(shard.leader_client, self._rulebook).get(page.path_for(shard), request)
            if found.status == 404:
                # This pool has never had a backend.
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
    """A page with a list that has entries of all shards."""

    entries: str
    """The key of the list."""
    name: str
    """The key of the name in each entry."""
    shard_of: Callable[[Cluster, dict[str, Any]], Shard]
    path_for: Callable[[Shard], str]
    """The path at which a leader lists the entries of its shard."""
    seen_by_all: bool
    """Whether members that do not lead see the same entries, except for requests in flight."""


MERGED = {
    SCALE: Merged(
        "pools",
        "pool",
        lambda cluster, one: cluster.shard_for_pool(one["pool"]),
        lambda shard: f"{SCALE}/{quote(shard.name)}",
        seen_by_all=False,
    ),
    BACKENDS: Merged(
        "backends",
        "backend",
        lambda cluster, one: cluster.shard_for_backend(one["backend"]),
        lambda shard: f"{BACKENDS}?{urlencode({POOL: shard.name})}",
        seen_by_all=True,
    ),
}


def _unknown(shard: Shard) -> web.Response:
    what = f"No member leads the pool {shard.name} now" if shard.name else "This member of the cluster has no leader"
    return refusal(503, f"{what}. This member knows at most a part of the work. Try again.", {"Retry-After": "5"})


def cluster_status(cluster: Cluster) -> dict[str, Any]:
    """Returns the cluster as this member sees it: the default shard at the top level, and all other shards under
    `pools`."""
    return {
        "member": cluster.me.name,
        "address": cluster.me.address,
        **_status(cluster, cluster.default),
        "pools": {name: _status(cluster, shard) for name, shard in cluster.shards.items() if name},
    }


def _status(cluster: Cluster, shard: Shard) -> dict[str, Any]:
    found: dict[str, Any] = {
        "lock": shard.lock,
        "leads": shard.is_leader,
        "leader": shard.leader,
        "alone": shard.limit_divisor > 0,
        "epoch": shard.epoch,
        "members": list(shard.members),
        "waiting": shard.leader_client.waiting,
        "running": shard.leader_client.running,
        "changes": shard.leader_changes,
        "last_gap_s": shard.last_gap_s,
        "lock_away": shard.lock_error,
        "leader_away": shard.leader_error,
    }
    if shard.sessions is not None:
        found["sessions"] = [
            {
                "member": name,
                "address": session.hello.address,
                "version": session.hello.version,
                "same_config": session.hello.config == cluster.me.config,
                "connected": session.connected,
                "requests": session.server.open_requests,
                "leases": session.server.leases,
            }
            for name, session in sorted(shard.sessions.by_name.items())
        ]
    return found
