"""Connects new pairs of prefill and decode engines before a client's request needs them.

The first transfer of KV blocks between two engines takes longer than later ones, because the engines connect and
compare their memory layouts. So each new backend transfers a short prompt with each partner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

import structlog
from msgspec import Raw

from llmproxy.backends.events import BackendObserver
from llmproxy.config import BackendConfig, Config
from llmproxy.core.domain import Listing, Role, Trouble
from llmproxy.core.kv_connectors import KvConnector, NotHandedOver, connectors
from llmproxy.core.pools import Pools
from llmproxy.lifecycle.background import spawned
from llmproxy.upstream.own_requests import post
from llmproxy.upstream.port import ConnectFailed, Upstream, UpstreamBroken

PATH = "/v1/completions"
PROMPT_TOKENS = 256
"""The length of the transferred prompt.

It is longer than a KV block of any engine, because some engines transfer only whole blocks.
"""
TOKENS_KNOWN = 1_000
"""Every vocabulary has at least this many tokens.

Each warm-up repeats a different token, so that no prefix cache has the prompt.
"""
FIRST_TOKENS = 8
"""The length of the prompt that is sent first.

It is shorter than a KV block, so that no part of the full prompt gets cached.
"""
LIMIT_S = 30.0  # The longest warm-up of a pair, in seconds.
ANSWER_BYTES_MAX = 64 << 10

Pair = tuple[str, str]
_log = structlog.get_logger()


class PairWarmUp(BackendObserver):
    """Connects each pair of a prefill and a decode backend once after either has started, until `close`.

    Pairs are connected one after the other. The mapping `backends` may change at any time. `config` returns the current
    configuration. A failed pair is not retried: the first split request shows the error.
    """

    def __init__(
        self, pools: Pools, backends: Mapping[str, BackendConfig], upstream: Upstream, config: Callable[[], Config]
    ) -> None:
        self._pools = pools
        self._backends = backends
        self._upstream = upstream
        self._config = config
        self._met: set[Pair] = set()
        self._listed: set[str] = set()
        self._serials = count(1)
        self._task: asyncio.Task[None] | None = None

    def listed(self, backend: str, listing: Listing) -> None:
        del listing
        self._listed.add(backend)

    def answered(self, backend: str) -> None:
        """Warms up the pairs of a backend at its first healthy poll after each new model list.

        A pair that is connected already is left out.
        """
        if backend not in self._listed:
            return
        # Partners may still be down; their own first answer starts the warm-up then.
        self._listed.remove(backend)
        if (self._task is None or self._task.done()) and next(self._new(self._config()), None) is not None:
            self._task = spawned(self._warm_up(), "warm up pairs")

    def troubled(self, backend: str, trouble: Trouble, detail: str) -> None:
        """Forgets the pairs of a backend that is down, because its next process will have no connections."""
        del trouble, detail
        if self._pools.backends[backend].health.down:
            self.removed(backend)

    def removed(self, backend: str) -> None:
        self._listed.discard(backend)
        self._met = {pair for pair in self._met if backend not in pair}

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _new(self, config: Config) -> Iterator[Pair]:
        """Yields the pairs that are not connected yet, in the same pool and with both backends up."""
        scheduling = config.scheduling
        if not scheduling.warm_up_pairs or scheduling.disaggregation == "never" or not _connector(config).asks:
            return
        asked = {
            name: one for name, one in self._pools.backends.items() if name in self._backends and not one.health.down
        }
        for first in asked:
            if self._backends[first].role != Role.PREFILL or (pool := self._pools.pool_of(first)) is None:
                continue
            for second in asked:
                apart = self._backends[second].role != Role.PREFILL and self._pools.pool_of(second) == pool
                if apart and (first, second) not in self._met:
                    yield first, second

    async def _warm_up(self) -> None:
        while pair := next(self._new(self._config()), None):
            self._met.add(pair)
            clock = asyncio.get_running_loop().time
            begun_s = clock()
            try:
                async with asyncio.timeout(LIMIT_S):
                    why = await self._meet(*pair)
            except TimeoutError:
                why = f"No answer within {LIMIT_S:g} s."
            except (ConnectFailed, UpstreamBroken) as error:
                why = str(error)
            facts = {"prefill_backend": pair[0], "backend": pair[1], "took_s": round(clock() - begun_s, 3)}
            if why is None:
                _log.info("pair_warmed_up", **facts)
            else:
                _log.warning("pair_not_warmed_up", **facts, why=why[:500])

    async def _meet(self, first: str, second: str) -> str | None:
        """Prefills a prompt on backend `first` and decodes it on `second`. Returns None, or the reason of a failure."""
        connector = _connector(self._config())
        listing = self._pools.backends[first].listing
        name = next((card.name for card in listing.cards if card.parent is None), None) if listing else None
        if name is None:
            return "It lists no base model."
        token = next(self._serials) % TOKENS_KNOWN
        body = {"model": name, "prompt": [token] * PROMPT_TOKENS, "max_tokens": 1, "temperature": 0}
        # vLLM 0.32 on a CPU with AMX crashes if the first prompt of an engine uses fetched KV.
        for asked, one, transfer in (
            (second, body | {"prompt": [token] * FIRST_TOKENS}, None),
            (first, body, connector.asks),
        ):
            status, answer = await self._ask(asked, one, transfer)
            if status != 200:
                return f"{asked} answered {status}: {answer.decode(errors='replace')}"
        try:
            value = connector.parameters(answer).value
        except NotHandedOver as error:
            return error.message
        status, answer = await self._ask(second, body, value)
        return None if status == 200 else f"{second} answered {status}: {answer.decode(errors='replace')}"

    async def _ask(self, name: str, body: dict[str, Any], transfer: bytes | None) -> tuple[int, bytes]:
        config = self._config()
        backend = self._backends.get(name)
        if backend is None:
            return 0, b"it was removed"
        if transfer is not None:
            body = body | {"kv_transfer_params": Raw(transfer)}
        return await post(
            self._upstream, backend, config.backend_api_key, PATH, body, config.timeouts.connect_s, ANSWER_BYTES_MAX
        )


def _connector(config: Config) -> KvConnector:
    return connectors.get(config.scheduling.kv_connector)(config.scheduling.kv_lease_s)
