"""Debug pages for operators, and the rule that decides who may see administrative pages.

`GET /debug/queue` shows waiting requests, why they wait and which backends have free slots. `GET /debug/explain` shows
where the last requests went, and why not to other backends. `GET /debug/adapters` shows the adapters loaded through the
proxy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from hmac import compare_digest
from types import MappingProxyType
from typing import Any

import orjson
from aiohttp import web

from llmproxy.config import TRUST_WORDS, Config
from llmproxy.core.adapters import Adapters, AdapterState
from llmproxy.core.domain import Outcome, Waited
from llmproxy.core.snapshot import BackendSnapshot, BandSnapshot, FlowSnapshot, PoolSnapshot, Position
from llmproxy.core.token_bucket import TokenBucket
from llmproxy.gateway.admin.explained import choice_pages, page_fields
from llmproxy.gateway.http.client_address import Clients, InNetworks
from llmproxy.gateway.http.errors import Failure, error_body, nothing_at
from llmproxy.gateway.http.routes import METRICS, Dialect
from llmproxy.gateway.request.auth import key_digest, presented_digest
from llmproxy.scheduling.dispatcher import Dispatcher

UI = "/ui"  # The page in a browser; its files are below it.
QUEUE = "/debug/queue"
ADAPTERS = "/debug/adapters"
EXPLAIN = "/debug/explain"
CHOICES = 10  # The number of choices shown for each pool by default.
CHOICES_MAX = 100
PAGES_PER_S = 5.0
BURST = 10.0  # The number of pages that may be requested at once after a pause. Building a page blocks the event loop.

LOOPBACK = InNetworks(TRUST_WORDS["loopback"])  # Maps an address to whether it is a loopback address.
UNSTORED = {"Cache-Control": "no-store"}

WRONG_ADMIN_KEY = "This needs the admin key of the proxy (admin_key), as `Authorization: Bearer KEY`."
NO_ADMIN_KEY = (
    "This needs an admin key, and the proxy has none: `llmproxy hash-key --new` makes one,"
    " and its hash is the proxy's admin_key."
)


class AdminPages:
    """Decides who may use administrative paths, and builds the debug pages."""

    def __init__(self, config: Config, dispatcher: Dispatcher, adapters: Adapters, clock: Callable[[], float]) -> None:
        self._dispatcher = dispatcher
        self._adapters = adapters
        self._pools = dispatcher.pools
        self._clock = clock
        self._has_port = config.admin.port is not None
        self._bound = {config.host.lower(), config.admin.host.lower()}
        self._clients = Clients(config.clients.trusted_proxies)
        self._public_metrics = config.admin.public_metrics
        self.reconfigure(config)
        self._bucket = TokenBucket(BURST, PAGES_PER_S)

    def reconfigure(self, config: Config) -> None:
        """Applies new keys and band names. The other settings need a restart."""
        self._digest = None if config.admin_key is None else key_digest(config.admin_key)
        self._names = config.band_names()
        self._secret_metrics = bool(config.tenants) or config.admin_key is not None

    def admits(self, request: web.BaseRequest) -> bool:
        """Returns whether the client has the admin key or, if no key is configured, is on this machine."""
        return self.has_key(request) if self._digest is not None else self._is_local(request)

    def _is_local(self, request: web.BaseRequest) -> bool:
        """Returns whether the client seems to be on this machine.

        Behind a reverse proxy on this machine that adds no fields, every client seems local. A web page of another
        server is no local client, even in a browser on this machine. The `Origin` of such a page differs from the
        `Host`. If the name of the page resolves to this machine (DNS rebinding), the `Host` is not a name of this
        machine.
        """
        client = self._clients.identify(request)
        return client.certain and LOOPBACK[client.address] and self._names_us(request.headers.get("host", "").lower())

    def _names_us(self, host: str) -> bool:
        """Returns whether a `Host` names this machine or an address of the proxy.

        An absent `Host` counts too, because every browser sends one.
        """
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if name in ("", "localhost") or name in self._bound:
            return True
        try:
            return LOOPBACK[name]
        except ValueError:
            return False

    def check(self, path: str, request: web.BaseRequest, on_admin_port: bool) -> None:
        """Raises Failure if the client may not send this request to an administrative path.

        Without the right, a client on this machine gets 401, and so does any client of `/metrics`. Every other client,
        and every client on the wrong port, gets 404, as if the path did not exist. `/metrics` is open on the port for
        operators, or with `admin.public_metrics`, or if there are neither tenants nor an admin key. `/ui` is open if
        there is an admin key, because the page shows no data without the key. A change outside `/debug` always needs
        the key, because a web page in a local browser can send a POST.
        """
        if self._has_port is not on_admin_port:
            raise nothing_at(path)
        if path == METRICS and (on_admin_port or self._public_metrics or not self._secret_metrics):
            return
        if path.startswith(UI) and self._digest is not None:
            # The page itself shows no data. It asks for the key, and then requests the data with the key.
            return
        if path.startswith("/debug") or request.method in ("GET", "HEAD"):
            if self.admits(request):
                return
        elif self.has_key(request):
            return
        if path == METRICS or self._is_local(request):
            raise Failure(Outcome.UNAUTHORIZED, NO_ADMIN_KEY if self._digest is None else WRONG_ADMIN_KEY)
        raise nothing_at(path)

    def has_key(self, request: web.BaseRequest) -> bool:
        return self._digest is not None and compare_digest(presented_digest(request.headers), self._digest)

    def adapters(self) -> web.Response:
        """Returns the adapters loaded through the proxy and their state on each backend; 429 if requested too often."""
        if not self._bucket.try_take(1.0, self._clock()):
            return too_many_requests()
        states, more = self._adapters.states()
        return page_response({"adapters": [_adapter(state) for state in states], "more": more})

    def queue(self, request: web.BaseRequest) -> web.Response:
        """Returns the state of all queues; with `?request=`, the position of that request (404 if it does not wait).

        Returns 429 if pages are requested too often. Requests for this page appear neither in the metrics nor in the
        log.
        """
        now, wanted = self._clock(), request.query.get("request")
        if not self._bucket.try_take(1.0, now):
            return too_many_requests()
        if not wanted:
            return page_response(self._everything(now))
        position = self._pools.position(wanted, now)
        if position is None:
            return refusal(404, f"No request `{wanted[:256]}` waits.")
        return page_response(self.position(position))

    def explain(self, request: web.BaseRequest) -> web.Response:
        """Returns the last `?limit=` (1 to 100) placement decisions of each pool, or only about one `?request=`.

        Returns 404 if no decision about that request is remembered, and 429 if pages are requested too often.
        """
        now, wanted = self._clock(), request.query.get("request")
        if not self._bucket.try_take(1.0, now):
            return too_many_requests()
        limit = query_number(request, "limit", CHOICES, CHOICES_MAX)
        if limit is None:
            return refusal(400, f"`limit` should be an integer from 1 to {CHOICES_MAX}.")
        pools = choice_pages(self._pools.choices(now), now, limit, wanted or None)
        if wanted and not any(pool["choices"] for pool in pools):
            return refusal(404, f"No choice for a request `{wanted[:256]}` is remembered.")
        return page_response({"placement": self._pools.settings.placement, "pools": pools})

    def _name(self, level: int) -> str:
        return self._names.get(level, str(level))

    def _everything(self, now: float) -> dict[str, Any]:
        seen = self._pools.snapshot(now)
        return {
            "nameless": self._dispatcher.nameless,
            "pools": [self._pool(pool) for pool in seen.pools],
            "usage_limits": [page_fields(limit, 1, name="limit") for limit in seen.limits],
            "more_usage_limits": seen.limits_more,
        }

    def _pool(self, pool: PoolSnapshot) -> dict[str, Any]:
        return {
            "pool": pool.pool,
            "alive": pool.alive,
            "held": pool.held,
            "in_flight": pool.leases,
            "being_preempted": pool.preempting,
            "bands": [self._band(band) for band in pool.bands],
            "backends": [self._backend(backend) for backend in pool.backends],
        }

    def _band(self, band: BandSnapshot) -> dict[str, Any]:
        return {
            "band": self._name(band.level),
            "level": band.level,
            "ceiling": band.ceiling,
            "min_share": band.min_share,
            "waiting": band.waiting,
            "continued": band.continued,
            "blocked": dict(band.blocked),
            "flows": [_flow(flow) for flow in band.shown],
            "more": band.flows - len(band.shown),
        }

    def _backend(self, backend: BackendSnapshot) -> dict[str, Any]:
        view = backend.view
        return {
            "backend": view.backend,
            "role": view.role,
            "available": view.available,
            "load": view.load,
            "limit": view.limit,
            "saturation": round(view.saturation, 4),
            "kv_used": round(view.kv_used, 4),
            "waiting_in_engine": view.waiting,
            "room_for": [self._name(level) for level in backend.room_for],
        }

    def position(self, position: Position) -> dict[str, Any]:
        """Returns the position of a request in the queue, as fields of a page."""
        renamed = {"label": "request", "ahead_in_bands": "ahead_in_higher_bands"}
        fields = page_fields(position, 4, **renamed) | {"band": self._name(position.band)}
        return {name: value for name, value in fields.items() if name != "waited"} | self.waited(position.waited)

    def waited(self, waited: Waited | None) -> dict[str, Any]:
        """Returns why a request waited, as fields of a page. `waited_for` is None if nothing delayed it."""
        if waited is None:
            return {"waited_for": None, "went_first": []}
        first = [(self._name(level), flow, count) for level, flow, count in waited.went_first]
        return {"waited_for": waited.rule, "went_first": first}


def _flow(flow: FlowSnapshot) -> dict[str, Any]:
    head = page_fields(flow.head, 4, label="request")
    return page_fields(flow, 4) | {"head": head, "standing": {name: round(value, 4) for name, value in flow.standing}}


def _adapter(state: AdapterState) -> dict[str, Any]:
    return page_fields(state, 0, name="adapter", pool="model", joining="later_ones_too", standings="replicas")


def page_response(page: dict[str, Any], *, status: int = 200) -> web.Response:
    """Returns a page as indented JSON that no cache may store."""
    return web.Response(status=status, body=_dumped(page), content_type="application/json", headers=UNSTORED)


def _dumped(page: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(page, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    except TypeError:
        # A name on the page has surrogates, which represent bytes that are not UTF-8.
        return json.dumps(page, indent=2).encode() + b"\n"


def query_number(request: web.BaseRequest, name: str, default: int, most: int) -> int | None:
    """Returns an integer query parameter.

    Returns `default` if the parameter is absent. Returns None if the value, or this `default`, is no integer from 1 to
    `most`.
    """
    asked = request.query.get(name, str(default))
    # Python refuses to read thousands of digits.
    return int(asked) if re.fullmatch(r"[0-9]{1,9}", asked) and 1 <= int(asked) <= most else None


def too_many_requests() -> web.Response:
    """Returns the 429 for a page that is requested too often."""
    return refusal(429, "This page is requested too often. Try again.", {"Retry-After": "1"})


def refusal(status: int, message: str, headers: Mapping[str, str] = MappingProxyType({})) -> web.Response:
    """Returns an error of a page, in the JSON format of OpenAI."""
    body = error_body(Dialect.OPENAI, status, message)
    return web.Response(status=status, body=body, content_type="application/json", headers={**UNSTORED, **headers})
