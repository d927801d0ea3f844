"""JSON requests that the proxy itself posts to a backend, such as changes of adapters."""

from __future__ import annotations

from typing import Any

import msgspec

from llmproxy.config import BackendConfig
from llmproxy.upstream.port import Upstream, read_response_body


async def post(
    upstream: Upstream, backend: BackendConfig, key: str | None, path: str, body: Any, connect_s: float, bytes_max: int
) -> tuple[int, bytes]:
    """Sends `body` as JSON to a backend. Returns the status and the body of the response.

    The response body is cut somewhere after `bytes_max` bytes. `key` is sent if the backend has no configured API key;
    None sends none. `connect_s` limits only the time to connect. Cancellation cuts the connection. Raises ConnectFailed
    or UpstreamBroken.
    """
    key = backend.api_key or key
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    exchange = await upstream.open(backend.url, "POST", path, headers, (msgspec.json.encode(body),), connect_s)
    return exchange.status, await read_response_body(exchange, bytes_max)
