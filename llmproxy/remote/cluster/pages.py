"""The pages of a member, which forwards requests that only a leader can answer."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from llmproxy.gateway.admin.backends import DRAINING, RELOAD
from llmproxy.gateway.admin.debug import refusal
from llmproxy.gateway.admin.scale import SCALE
from llmproxy.gateway.pages import READY, OwnPages, check_method, not_ready
from llmproxy.gateway.proxying.rules import Rulebook
from llmproxy.remote.cluster.cluster import Cluster
from llmproxy.remote.messages import PageRequest, PageResponse
from llmproxy.remote.pages import PASSED_ON, RemotePages
from llmproxy.remote.server import Page

PATH = "/admin/cluster"
LEADER_PATHS = (SCALE, "/debug", "/admin", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Prefixes of paths about the waiting room or the scheduler's backends. The leader answers all but PATH and RELOAD."""
PAGE_BYTES_MAX = 8 << 20  # A longer page would not fit into a frame.
PASSED_ON_MAX = 2  # Hops: from a member to the leader that it knows, and from there to the actual leader.
UNLED = "The cluster has no leader now, and the next leader would not know of this change. Try again."
UNKNOWN = "This member of the cluster has no leader, so it knows at most a part of the work. Try again."
DIFFER = "Members disagree about the leader for this page, and have forwarded the request twice. Try again."


def bounded(page: Page) -> Page:
    """Wraps a page handler, so that an answer that does not fit into a frame becomes 502."""

    async def answer(asked: PageRequest) -> PageResponse:
        answered = await page(asked)
        if len(answered.body) <= PAGE_BYTES_MAX:
            return answered
        why = b"This page is too long to forward. Ask the leader itself."
        return PageResponse(asked.call, 502, "Bad Gateway", (("content-type", "text/plain"),), why)

    return answer


class MemberPages:
    """The `Pages` of a cluster member. Requests for LEADER_PATHS are forwarded to a leader in another process."""

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
        cluster = self._cluster
        is_scale = path == SCALE or path.startswith(f"{SCALE}/")
        if not cluster.has_leader and (is_scale or DRAINING.fullmatch(path)):
            self._own.check(path, request, on_admin_port)
            return refusal(503, UNKNOWN if is_scale else UNLED, {"Retry-After": "5"})
        if cluster.leasing.is_remote:
            self._own.check(path, request, on_admin_port)
            if request.get(PASSED_ON, 0) >= PASSED_ON_MAX:
                return refusal(503, DIFFER, {"Retry-After": "5"})
            return await RemotePages(cluster.leasing, self._rulebook).show(path, request)
        return await self._own.administer(path, request, on_admin_port)


def cluster_status(cluster: Cluster) -> dict[str, Any]:
    """Returns the content of `/admin/cluster`: the state of this member; on the leader, also all sessions."""
    found: dict[str, Any] = {
        "member": cluster.me.name,
        "address": cluster.me.address,
        "lock": cluster.store.name,
        "leads": cluster.is_leader,
        "leader": cluster.leader,
        "epoch": cluster.epoch,
        "members": list(cluster.members),
        "waiting": cluster.leasing.waiting,
        "running": cluster.leasing.running,
        "changes": cluster.leader_changes,
        "last_gap_s": cluster.last_gap_s,
        "lock_away": cluster.lock_error,
        "leader_away": cluster.leader_error,
    }
    if cluster.sessions is not None:
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
            for name, session in sorted(cluster.sessions.by_name.items())
        ]
    return found
