"""Pages of a member: those that only the leader can answer, it asks of the leader."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from llmproxy.cluster.cluster import Cluster, Page
from llmproxy.gateway.admin.backends import RELOAD
from llmproxy.gateway.admin.debug import refusal
from llmproxy.gateway.admin.scale import SCALE
from llmproxy.gateway.pages import READY, OwnPages, check_method, not_ready
from llmproxy.gateway.proxying.rules import Rulebook
from llmproxy.workers import protocol
from llmproxy.workers.remote import RemotePages

PATH = "/admin/cluster"
OF_LEADER = (SCALE, "/debug", "/admin", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""What begins so is about the waiting room, the backends as the scheduler sees them, or what it does with them."""


PAGE_BYTES_MAX = 8 << 20
"""A longer page would not fit into a frame."""


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
        if not self._cluster.led and (path == SCALE or path.startswith(f"{SCALE}/")):
            self._own.check(path, request, on_admin_port)
            why = "This member of the cluster has no leader, and sees a part of the work at most. Ask again."
            return refusal(503, why, {"Retry-After": "5"})
        calls = self._cluster.calls
        if calls is None or path == RELOAD or not path.startswith(OF_LEADER):
            return await self._own.administer(path, request, on_admin_port)
        self._own.check(path, request, on_admin_port)
        return await RemotePages(calls, self._rulebook).show(path, request)


def status_of(cluster: Cluster) -> dict[str, Any]:
    """The cluster as this member sees it."""
    leadership = cluster.leadership
    found: dict[str, Any] = {
        "member": cluster.me.name,
        "address": cluster.me.address,
        "leads": cluster.leads,
        "leader": None if leadership is None or not cluster.led else leadership.holder.rpartition("/")[0],
        "alone": cluster.parts > 0,
        "epoch": cluster.epoch,
        "members": list(cluster.members),
        "waiting": cluster.relay.waiting,
        "running": cluster.relay.running,
        "changes": cluster.changes,
        "last_gap_s": cluster.last_gap_s,
        "lock_away": cluster.store_away,
        "leader_away": cluster.leader_away,
    }
    if cluster.leads:
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
            for name, session in sorted(cluster.sessions.items())
        ]
    return found
