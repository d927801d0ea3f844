"""A client of a Kubernetes API server."""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds the token, the CA and the namespace of its service account."""
ANSWER_S = 30.0  # How long connecting, a pause within a list, or a whole request of `send` may take.
SILENCE_S = 330.0  # A watch without data for this time counts as broken: bookmarks come about once a minute.
BUFFER_BYTES = 4 << 20
"""The size of the read buffer. A slice of 1,000 endpoints has 286 kB."""


class ApiError(Exception):
    """The API server refused a request, or did not answer.

    `status` is the HTTP status; 0 without an answer. `cut`: the connection broke in the middle of an answer.
    """

    def __init__(self, why: str, status: int = 0, *, cut: bool = False) -> None:
        super().__init__(why)
        self.status = status
        self.cut = cut


class KubernetesApi:
    """Sends requests to the API server. Call `close` at the end.

    `url` is the URL of the server; None means the cluster in which this process runs. Only this cluster's server gets
    the token of the service account, and is verified with its CA. Any other is verified with the CAs of the system.
    """

    def __init__(self, url: str | None, account: Path = ACCOUNT) -> None:
        self._url = url
        self._account = account
        self._session: aiohttp.ClientSession | None = None

    @property
    def namespace(self) -> str:
        """The namespace of this process; `default` outside a cluster."""
        return self._read("namespace") or "default"

    @asynccontextmanager
    async def get(self, path: str, query: Mapping[str, str], silence_s: float) -> AsyncIterator[aiohttp.StreamReader]:
        """Yields the body of a response with status 200 as a stream. Raises ApiError, also while the body is read.

        The connection counts as broken after `silence_s` without data.
        """
        server, begun = self._server(), False
        try:
            async with self._opened().get(
                f"{server}{path}",
                params=query,
                headers=self._headers(),
                ssl=self._trust(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_S, sock_read=silence_s),
            ) as answer:
                if answer.status != 200:
                    raise ApiError(f"{path} answered {answer.status}{_advice(answer.status, path)}", answer.status)
                begun = True
                yield answer.content
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiError(
                f"a request to the API server {server} failed: {str(error) or repr(error)}", cut=begun
            ) from None

    async def send(self, method: str, path: str, content: object = None) -> Any:
        """Sends `content` as JSON and returns the JSON of the response. Raises ApiError, also for an error status."""
        server = self._server()
        try:
            async with self._opened().request(
                method,
                f"{server}{path}",
                json=content,
                headers=self._headers(),
                ssl=self._trust(),
                timeout=aiohttp.ClientTimeout(total=ANSWER_S),
            ) as answer:
                if not answer.ok:
                    raise ApiError(f"{method} {path} answered {answer.status}", answer.status)
                return await answer.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ApiError(f"a request to the API server {server} failed: {str(error) or repr(error)}") from None

    def _server(self) -> str:
        if self._url is not None:
            return self._url
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ApiError("this is no pod of a cluster: set discovery.kubernetes_api to the URL of `kubectl proxy`")
        return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(read_bufsize=BUFFER_BYTES)
        return self._session

    def _headers(self) -> dict[str, str]:
        # The token is replaced about once an hour, so it is read for each request.
        token = self._read("token") if self._url is None else None
        return {"Accept": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})

    def _trust(self) -> ssl.SSLContext | bool:
        authorities = self._account / "ca.crt"
        if self._url is not None or not authorities.exists():
            return True
        return ssl.create_default_context(cafile=authorities)

    def _read(self, name: str) -> str | None:
        try:
            return (self._account / name).read_text("utf-8").strip()
        except OSError:
            return None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _advice(status: int, path: str) -> str:
    first, _, rest = path.strip("/").partition("/")
    what, group = path.rpartition("/")[2], rest.partition("/")[0] if first == "apis" else '""'
    return {
        401: ": the token of the service account is not accepted",
        403: f": the role of the service account needs the rule {{apiGroups: [{group}], resources: [{what}],"
        " verbs: [list, watch]}",
        404: f": this cluster has no {what}",
    }.get(status, "")
