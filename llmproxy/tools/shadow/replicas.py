"""The replicas behind the router: their properties, and their load and caches while the shadow runs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmproxy.backends.metrics_text import parse_reading
from llmproxy.backends.poller import BODY_BYTES_MAX
from llmproxy.config import BackendConfig
from llmproxy.core.domain import Reading
from llmproxy.gateway.request.json_scan import drain
from llmproxy.tools.doctor.look import Replica
from llmproxy.upstream.client import HttpUpstream
from llmproxy.upstream.endpoints import Endpoints
from llmproxy.upstream.port import ConnectFailed, UpstreamBroken, read_response_body
from llmproxy.upstream.tls import peers_tls

INTERVAL_S = 5.0
TIMEOUT_S = 5.0
COUNTED = {
    "requests": b"request_success",
    "queried_tokens": b"prefix_cache_queries",
    "hit_tokens": b"prefix_cache_hits",
}
"""Counters of vLLM without their prefix, by the names that they have in `replicas.json`."""
_COUNTERS = re.compile(
    rb"^vllm:(request_success|prefix_cache_queries|prefix_cache_hits)(?:_total)?(?:\{[^\n]*\})? ([0-9.e+]+)",
    re.MULTILINE,
)


@dataclass(slots=True)
class _Seen:
    """The results of the polls of one replica.

    `running` and `waiting` are sums over all `readings`. `first` and `last` have the counters at the first and last
    poll.
    """

    readings: int = 0
    running: int = 0
    waiting: int = 0
    # The largest number of requests that ran while others waited in the engine. 0 if none waited.
    full: int = 0
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)


class Replicas:
    """Polls the metrics of the replicas, and sums them up."""

    def __init__(self, looked_at: Sequence[Replica], api_key: str | None) -> None:
        self._replicas = looked_at
        self._api_key = api_key
        self._seen = {replica.backend.url: _Seen() for replica in looked_at}

    async def poll(self) -> None:
        """Polls all replicas until it is cancelled. A poll with no readable answer is not counted."""
        endpoints = Endpoints()
        endpoints.tls.update(peers_tls([replica.backend for replica in self._replicas]))
        try:
            async with HttpUpstream(endpoints) as upstream:
                while True:
                    await asyncio.gather(*(self._poll(upstream, replica.backend) for replica in self._replicas))
                    await asyncio.sleep(INTERVAL_S)
        finally:
            await endpoints.close()

    async def _poll(self, upstream: HttpUpstream, backend: BackendConfig) -> None:
        key = backend.api_key or self._api_key
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            async with asyncio.timeout(TIMEOUT_S):
                exchange = await upstream.open(backend.url, "GET", "/metrics", headers, (), TIMEOUT_S)
                page = await read_response_body(exchange, BODY_BYTES_MAX)
            reading = drain(parse_reading(page, 0.0))
        except (TimeoutError, ConnectFailed, UpstreamBroken, ValueError):
            return
        if reading is not None:
            self._add(self._seen[backend.url], reading, page)

    def _add(self, seen: _Seen, reading: Reading, page: bytes) -> None:
        seen.readings += 1
        seen.running += reading.running
        seen.waiting += reading.waiting
        if reading.waiting:
            seen.full = max(seen.full, reading.running)
        found = _COUNTERS.findall(page)
        seen.last = {name: sum(float(value) for of, value in found if of == metric) for name, metric in COUNTED.items()}
        seen.first = seen.first or seen.last

    def facts(self) -> list[Mapping[str, Any]]:
        """Returns the properties, the mean load and the growth of the counters of each replica.

        `batch_seen` is None if no request waited in the engine. Without a counted poll, the means are None and the
        counters are absent.
        """
        return [
            {
                "name": replica.backend.name,
                "url": replica.backend.url,
                "engine": replica.engine,
                "models": [card.name for card in replica.models],
                "max_model_len": next((card.max_model_len for card in replica.models if card.max_model_len), None),
                "batch_limit": replica.batch_limit,
                "batch_seen": seen.full or None,
                "kv_tokens": replica.kv_tokens,
                "running_mean": seen.running / seen.readings if seen.readings else None,
                "waiting_mean": seen.waiting / seen.readings if seen.readings else None,
                # A restart of the engine sets its counters back.
                **{name: max(0.0, seen.last[name] - seen.first[name]) for name in seen.last},
            }
            for replica in self._replicas
            for seen in (self._seen[replica.backend.url],)
        ]
