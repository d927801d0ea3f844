"""`GET /scale` and `GET /scale/{pool}`: how many replicas each pool needs, for autoscalers and for people.

If a number is unknown, the answer is 503 and never 0, because an autoscaler without a number keeps its replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

from aiohttp import web

from llmproxy.core.pools import Pools
from llmproxy.core.scaling.need import PRESENT, Need
from llmproxy.core.snapshot import EXTERNAL, BackendStatus
from llmproxy.gateway.admin.debug import page_response, refusal

SCALE = "/scale"
CACHE_S = 1.0  # How long computed numbers are reused, however many clients ask.
STATES = ("up", "starting", "ejected", "down", "drained", "leaving")


class ScalePages:
    """Serves the pages of this module. The caller must check first that the client may see them."""

    def __init__(
        self, pools: Pools, statuses: Callable[[], Sequence[BackendStatus]], clock: Callable[[], float]
    ) -> None:
        self._pools = pools
        self._statuses = statuses
        self._clock = clock
        self._needs: dict[str, Need] = {}
        self._needs_at_s = -CACHE_S
        self._known = False  # Whether each backend was polled since the start of the process, and some answered.

    def needs(self) -> dict[str, Need]:
        """Maps each pool to its need for replicas. The result is at most CACHE_S old.

        Until each source has answered, each backend was polled and one has answered, the number of present replicas is
        unknown, so the result lacks the pools that would keep it. Numbers from the load count requests of this proxy,
        which only known replicas serve.
        """
        now, catalogue = self._clock(), self._pools.catalogue
        if now >= self._needs_at_s + CACHE_S:
            self._known = self._known or (catalogue.ever_read and catalogue.all_polled)
            needs = self._pools.needs(now)
            self._needs = {pool: need for pool, need in needs.items() if self._known or need.reason != PRESENT}
            self._needs_at_s = now
        return self._needs

    def page(self, path: str) -> Callable[[web.BaseRequest], web.Response] | None:
        """Returns the handler of a path; None if this class does not serve the path."""
        return self._serve if path == SCALE or path.startswith(f"{SCALE}/") else None

    def _serve(self, request: web.BaseRequest) -> web.Response:
        needs, name = self.needs(), request.path.removeprefix(SCALE).strip("/")
        pool = self._pools.catalogue.pool_named(name)
        named = self._pools.settings.scaling.pools
        if not self._known and (pool not in needs if name else not needs):
            return refusal(503, self._why_unknown(), {"Retry-After": "5"})
        if name and pool not in needs:
            known = ", ".join(f"`{one}`" for one in sorted(needs)) or "none"
            return refusal(404, f"There is no pool `{name[:256]}`. Known pools: {known}; scaling.pools names others.")
        states = self._states()
        pages = [shown(one, need, states.get(one, {}), named=one in named) for one, need in sorted(needs.items())]
        if name:
            return page_response(next(one for one in pages if one["pool"] == pool))
        return page_response({"pools": pages})

    def _why_unknown(self) -> str:
        catalogue = self._pools.catalogue
        if catalogue.expecting:
            sources = ", ".join(f"`{source}`" for source in sorted(catalogue.expecting))
            why = f"these sources of backends have not answered: {sources}. `discovery_failed` in the log says why"
        else:
            why = "some backends were not polled" if catalogue.ever_read else "no backend has answered"
        return f"The number of replicas is unknown: since the start of the proxy, {why}."

    def _states(self) -> dict[str, Counter[str]]:
        """Returns pool -> state -> number of backends, without external backends.

        A backend that has not listed its models yet counts toward the pool of the other backends from its source, if
        they have only one pool.
        """
        pools: dict[str, set[str]] = {}
        statuses: list[tuple[BackendStatus, str | None]] = []
        for status in self._statuses():
            if status.role == EXTERNAL:
                continue
            pool = self._pools.pool_of(status.name)
            statuses.append((status, pool))
            if pool is not None:
                pools.setdefault(status.source, set()).add(pool)
        states: dict[str, Counter[str]] = {}
        for status, pool in statuses:
            of_source = pools.get(status.source, set())
            if pool is None and len(of_source) == 1:
                (pool,) = of_source
            if pool is not None:
                states.setdefault(pool, Counter())[status.state] += 1
        return states


def shown(pool: str, need: Need, states: Mapping[str, int], *, named: bool) -> dict[str, Any]:
    """Returns the JSON fields of the answer for one pool.

    `states` maps a state to the number of backends in it. `named`: whether `scaling.pools` has the pool.
    """
    capacity = need.capacity
    return {
        "pool": pool,
        "desired": need.desired,
        "need": round(need.need, 3),
        "own": round(need.own, 3),
        "reason": need.reason,
        "sure": need.sure,
        "named": named,
        "replicas": {state: states.get(state, 0) for state in STATES},
        "terms": {name: round(value, 3) for name, value in need.terms.items()},
        "prefill": round(need.prefill, 3),
        "decode": round(need.decode, 3),
        "replica": None
        if capacity is None
        else {
            "requests_per_s": round(capacity.requests_per_s, 4) if isfinite(capacity.requests_per_s) else None,
            "seats": round(capacity.seats, 1),
            "request_s": round(capacity.request_s, 6),
        },
        "start_s": round(need.start_s, 1),
        "waiting": {"requests": need.waiting, "seconds": round(need.waiting_s, 3)},
        "roles": {
            name: {"desired": one.desired, "need": round(one.need, 3), "up": one.up} for name, one in need.roles.items()
        },
    }
