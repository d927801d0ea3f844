"""The part of Kubernetes' API server that the proxy uses: lists, watches, bookmarks, versions that are gone, discovery
documents for kubectl, and Leases that are read, created and replaced."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

Object = dict[str, Any]
KINDS = {
    "pods": ("v1", "Pod"),
    "endpointslices": ("discovery.k8s.io/v1", "EndpointSlice"),
    "inferencepools": ("inference.networking.k8s.io/v1", "InferencePool"),
    "leases": ("coordination.k8s.io/v1", "Lease"),
    "inferenceobjectives": ("llm-d.ai/v1alpha2", "InferenceObjective"),
    "inferencemodelrewrites": ("llm-d.ai/v1alpha2", "InferenceModelRewrite"),
    "old.inferenceobjectives": ("inference.networking.x-k8s.io/v1alpha2", "InferenceObjective"),
    "old.inferencemodelrewrites": ("inference.networking.x-k8s.io/v1alpha2", "InferenceModelRewrite"),
}
WRITABLE = "leases"
OLD = "inference.networking.x-k8s.io"


def selects(selector: str, labels: dict[str, str]) -> bool:
    """Whether an equality-based selector fits these labels."""
    for part in filter(None, selector.split(",")):
        key, _, value = part.partition("!=" if "!=" in part else "=")
        if (labels.get(key) == value.lstrip("=")) is ("!=" in part):
            return False
    return True


class ApiServer:
    """A Kubernetes API server whose objects tests put and delete, with all its failures.

    Attributes:
        refuses: Status of the answer to every request, None for normal answers.
        silent: Open watches get no more events.
        bookmarks: Each watch begins with a bookmark.
        missing: Kinds that answer 404.
        refused: Kinds with a status of their own.
        asked: The queries, in order.
        tokens: The token of each query.
        before: Called with the method before an object is read or written. It may wait, and returns a status for a
            refusal, or None.
    """

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Object]] = {kind: {} for kind in KINDS}
        self.history: list[tuple[int, str, str, Object]] = []
        self.version = 100
        self.gone_before = 0
        self.refuses: int | None = None
        self.silent = False
        self.bookmarks = False
        self.missing: set[str] = set()
        self.refused: dict[str, int] = {}
        self.asked: list[dict[str, str]] = []
        self.tokens: list[str] = []
        self.token: str | None = None
        self.before: Callable[[str], Awaitable[int | None]] | None = None
        self.url = ""
        self._watches: dict[web.StreamResponse, str] = {}
        self._news: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    # --- what tests do -----------------------------------------------------------------------------------------------

    def put(self, kind: str, one: Object) -> None:
        known = one["metadata"]["name"] in self.objects[kind]
        self._happened(kind, "MODIFIED" if known else "ADDED", one)
        self.objects[kind][one["metadata"]["name"]] = one

    def delete(self, kind: str, name: str) -> None:
        self._happened(kind, "DELETED", self.objects[kind].pop(name))

    def vanish(self, kind: str, name: str) -> None:
        """Delete it without an event, and forget all versions, as after a long absence."""
        del self.objects[kind][name]
        self.compact()

    def compact(self) -> None:
        self.version += 1
        self.gone_before, self.history = self.version, []

    def cut(self, rest: bytes = b"") -> None:
        """End all watches, after this part of a line."""
        for watch in list(self._watches):
            if rest and (transport := watch._req.transport if watch._req is not None else None):
                transport.write(b"%x\r\n%s\r\n" % (len(rest), rest))
            if watch._req is not None and watch._req.transport is not None:
                watch._req.transport.close()

    async def say(self, line: bytes) -> None:
        """Send these bytes on all watches."""
        for watch in list(self._watches):
            await watch.write(line)

    @property
    def watching(self) -> list[str]:
        """The kinds that are watched now."""
        return sorted(self._watches.values())

    def _happened(self, kind: str, what: str, one: Object) -> None:
        self.version += 1
        one["metadata"]["resourceVersion"] = str(self.version)
        self.history.append((self.version, kind, what, json.loads(json.dumps(one))))
        # Every watch of the kind waits for the same event, and for the next one from then on.
        self._news.pop(kind, asyncio.Event()).set()

    # --- answers -----------------------------------------------------------------------------------------------------

    async def serve(self, request: web.Request) -> web.StreamResponse:
        query, kind = dict(request.query), request.path.rstrip("/").rpartition("/")[2]
        if request.path.startswith(f"/apis/{OLD}/"):
            kind = f"old.{kind}"
        self.asked.append({"kind": kind, "path": request.path, **query})
        self.tokens.append(request.headers.get("Authorization", ""))
        if self.token is not None and self.tokens[-1] != f"Bearer {self.token}":
            return web.json_response(status_of(401, "Unauthorized"), status=401)
        if self.refuses is not None:
            return web.json_response(status_of(self.refuses, "refused"), status=self.refuses)
        if (document := documents().get(request.path)) is not None:
            return web.json_response(document)
        of_kind, _, name = request.path.rstrip("/").rpartition("/")
        if of_kind.rpartition("/")[2] == WRITABLE or (kind == WRITABLE and request.method == "POST"):
            return await self._one(request, "" if kind == WRITABLE else name)
        if kind not in KINDS or kind in self.missing:
            return web.json_response(status_of(404, "the server could not find the requested resource"), status=404)
        fits = self._fits(query)
        if (status := self.refused.get(kind)) is not None:
            return web.json_response(status_of(status, "refused"), status=status)
        if "watch" not in query:
            version, name = KINDS[kind]
            items = [one for one in self.objects[kind].values() if fits(one)]
            metadata = {"resourceVersion": str(self.version)}
            return web.json_response(
                {"kind": f"{name}List", "apiVersion": version, "metadata": metadata, "items": items}
            )
        marks = self.bookmarks and query.get("allowWatchBookmarks") == "true"
        return await self._watch(request, kind, int(query.get("resourceVersion") or self.version), fits, marks)

    async def _one(self, request: web.Request, name: str) -> web.Response:
        """Read, create or replace one object. Who replaces it must have read its latest version."""
        writes = request.method != "GET"
        sent: Object = await request.json() if writes else {}
        if self.before is not None and (refused := await self.before(request.method)) is not None:
            return web.json_response(status_of(refused, "refused"), status=refused)
        if writes and (wrong := _invalid(sent)):
            return web.json_response(status_of(422, wrong), status=422)
        name = name or sent["metadata"]["name"]
        known, status = self.objects[WRITABLE].get(name), 200
        if request.method == "POST":
            if known is not None:
                return web.json_response(status_of(409, f'leases "{name}" already exists'), status=409)
            namespace = request.path.split("/")[5]
            sent["metadata"] |= {"namespace": namespace, "uid": f"uid-{name}", "creationTimestamp": CREATED}
            status = 201
        elif known is None:
            return web.json_response(status_of(404, f'leases "{name}" not found'), status=404)
        elif request.method == "PUT":
            version = sent["metadata"].get("resourceVersion")
            if version is not None and version != known["metadata"]["resourceVersion"]:
                return web.json_response(status_of(409, "the object has been modified"), status=409)
        if writes:
            self.put(WRITABLE, sent)
        return web.json_response(self.objects[WRITABLE][name], status=status)

    def _fits(self, query: dict[str, str]) -> Callable[[Object], bool]:
        name = query.get("fieldSelector", "").removeprefix("metadata.name=")
        labels = query.get("labelSelector", "")
        return lambda one: (
            selects(labels, one["metadata"].get("labels") or {}) and name in ("", one["metadata"]["name"])
        )

    async def _watch(
        self, request: web.Request, kind: str, since: int, fits: Callable[[Object], bool], marks: bool
    ) -> web.StreamResponse:
        answer = web.StreamResponse()
        answer.content_type = "application/json"
        await answer.prepare(request)
        if since < self.gone_before:
            gone = status_of(410, "too old resource version")
            await answer.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
            return answer
        self._watches[answer] = kind
        try:
            if marks:
                mark = {"kind": KINDS[kind][1], "metadata": {"resourceVersion": str(self.version)}}
                await answer.write(json.dumps({"type": "BOOKMARK", "object": mark}).encode() + b"\n")
            while True:
                news = self._news[kind]
                for version, of, what, one in [*self.history]:
                    if version > since and of == kind and fits(one) and not self.silent:
                        since = version
                        await answer.write(json.dumps({"type": what, "object": one}).encode() + b"\n")
                await news.wait()
        finally:
            self._watches.pop(answer, None)


def _invalid(lease: Object) -> str | None:
    """Why the API server rejects a Lease, None for a valid one."""
    spec = lease["spec"]
    if (spec.get("leaseDurationSeconds") or 0) <= 0 or not isinstance(spec["leaseDurationSeconds"], int):
        return "spec.leaseDurationSeconds: must be greater than 0"
    if not 0 <= spec.get("leaseTransitions", 0) < 1 << 31:
        return "spec.leaseTransitions: must be greater than or equal to 0"
    for key in ("acquireTime", "renewTime"):
        if key in spec and not MICRO_TIME.fullmatch(spec[key]):
            return f"spec.{key}: cannot be parsed"
    return None


MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
CREATED = "2026-01-01T00:00:00Z"


def status_of(code: int, message: str) -> Object:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message}


def documents() -> dict[str, Object]:
    """The answers that kubectl reads before it asks for objects."""
    groups = dict.fromkeys(tuple(version.split("/")) for version, _ in KINDS.values() if "/" in version)
    found: dict[str, Object] = {
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [
                {
                    "name": group,
                    "versions": [{"groupVersion": f"{group}/{version}", "version": version}],
                    "preferredVersion": {"groupVersion": f"{group}/{version}", "version": version},
                }
                for group, version in groups
            ],
        },
    }
    for plural, (version, kind) in KINDS.items():
        verbs = ["get", "list", "watch"]
        name = plural.removeprefix("old.")
        resource = {"name": name, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
        path = f"/apis/{version}" if "/" in version else f"/api/{version}"
        found.setdefault(path, {"kind": "APIResourceList", "groupVersion": version, "resources": []})
        found[path]["resources"].append(resource)
    return found


@asynccontextmanager
async def api_server(tls: ssl.SSLContext | None = None) -> AsyncIterator[ApiServer]:
    api = ApiServer()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api.serve)
    server = TestServer(app, handler_cancellation=True)
    await server.start_server(ssl=tls)
    api.url = str(server.make_url("")).rstrip("/")
    try:
        yield api
    finally:
        await server.close()


# --- objects ----------------------------------------------------------------------------------------------------------


def pod(name: str, ip: str | None = "10.0.0.1", *, ready: bool = True, uid: str = "", **more: Any) -> Object:
    """A pod as the kubelet reports it. `more`: labels, annotations, ports (name -> number), deleted, phase."""
    metadata: Object = {"name": name, "namespace": "default", "uid": uid or f"uid-{name}"}
    metadata |= {key: more[key] for key in ("labels", "annotations") if key in more}
    if more.get("deleted"):
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    ports = more.get("ports", {"http": 8000})
    declared = [{"name": key, "containerPort": number, "protocol": "TCP"} for key, number in ports.items()]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"containers": [{"name": "vllm", "image": "vllm", "ports": declared or None}]},
        "status": {
            "phase": more.get("phase", "Running"),
            **({"podIP": ip} if ip else {}),
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


def endpoint(name: str, ip: str = "10.0.0.1", **conditions: bool | None) -> Object:
    """An endpoint of a slice, with the given conditions only."""
    target = {"kind": "Pod", "name": name, "namespace": "default", "uid": f"uid-{name}"} if name else None
    return {"addresses": [ip], "conditions": conditions, **({"targetRef": target} if target else {})}


def endpoint_slice(
    name: str, *endpoints: Object, service: str = "vllm", ports: dict[str, int] | None = None, family: str = "IPv4"
) -> Object:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": "default", "labels": {"kubernetes.io/service-name": service}},
        "addressType": family,
        "endpoints": list(endpoints) or None,
        "ports": [
            {"name": key, "port": number, "protocol": "TCP"} for key, number in (ports or {"http": 8000}).items()
        ],
    }


def inference_pool(name: str, labels: dict[str, str], *ports: int) -> Object:
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}"},
        "spec": {
            "selector": {"matchLabels": labels},
            "targetPorts": [{"number": port} for port in ports],
            "endpointPickerRef": {"name": "epp", "port": {"number": 9002}},
        },
    }


def objective(name: str, priority: Any = None, pool: str = "qwen", created: str = "2026-01-01", **spec: Any) -> Object:
    """An InferenceObjective. `created` is a day; `spec` has further fields."""
    given = {} if priority is None else {"priority": priority}
    return _of_pool("InferenceObjective", name, pool, created, given | spec)


def rewrite(name: str, *rules: Object, pool: str = "qwen", created: str = "2026-01-01") -> Object:
    return _of_pool("InferenceModelRewrite", name, pool, created, {"rules": [*rules]})


def rule(*models: str, **targets: Any) -> Object:
    """A rule for these models (all, without any): `new=1` is a target with a weight, `new=None` one without."""
    matches = [{"model": {"type": "Exact", "value": model}} for model in models]
    weighted = [
        {"modelRewrite": name} | ({} if weight is None else {"weight": weight}) for name, weight in targets.items()
    ]
    return ({"matches": matches} if matches else {}) | {"targets": weighted}


def _of_pool(kind: str, name: str, pool: str, created: str, spec: Object) -> Object:
    ref = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": pool}
    return {
        "apiVersion": "llm-d.ai/v1alpha2",
        "kind": kind,
        "metadata": {"name": name, "namespace": "default", "creationTimestamp": f"{created}T00:00:00Z"},
        "spec": {"poolRef": ref} | spec,
    }
