"""A Kubernetes API server for members of a cluster, with their Lease and the Service of their backends."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from aiohttp import web

from tests.backends.kubernetes.api_server import ApiServer, endpoint, endpoint_slice

SERVICE = "kubernetes+http://service/vllm"


class RestartedApiServer:
    """It forgets nothing while it is away, because what real ones know is in etcd."""

    def __init__(self, port: int, replica_urls: Sequence[str]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        self._known = ApiServer()
        self._runner: web.AppRunner | None = None
        for number, url in enumerate(replica_urls):
            ports = {"http": urlsplit(url).port or 0}
            one = endpoint_slice(f"vllm-{number}", endpoint(f"vllm-{number}", "127.0.0.1", ready=True), ports=ports)
            self._known.put("endpointslices", one)

    @property
    def epoch(self) -> int:
        """That of the Lease: the number of turns of leaders."""
        [lease] = self._known.objects["leases"].values()
        epoch: int = lease["spec"]["leaseTransitions"]
        return epoch

    async def open(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._known.serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()

    async def close(self) -> None:
        """End all connections, watches among them, and refuse new ones."""
        if self._runner is not None:
            self._known.cut()
            await self._runner.cleanup()
            self._runner = None
