"""Frees what was computed for nobody: the prompt of a split request whose client left before the answer began.

The engine that computed it keeps its blocks for a lease, unless the other engine says that it needs them no more. That
one says so of a request that it has and that ends, and of one that it refuses. What neither has is lost to the lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog
from msgspec import Raw

from llmproxy.config import BackendConfig, Config
from llmproxy.core.kv_connectors import KvConnector
from llmproxy.gateway.proxying.stages import WARNINGS_MAX, Handover
from llmproxy.upstream.own_requests import post
from llmproxy.upstream.port import ConnectFailed, Upstream, UpstreamBroken

PREFILL_GRACE_S = 1.0
"""How long a prompt is still computed when its client has left. An engine hears of that after the step that it is in,
and if that was the last one, it keeps the blocks for a request that nobody can name."""
DECODE_GRACE_S = 0.25
"""How long after its start a second stage is not cut: an engine that has not read the request yet tells nobody."""
RELEASE_S = 1.0
"""How long a release may take; the lease of the blocks ends it too."""
PATH = "/v1/completions"
ANSWER_BYTES_MAX = 64 << 10

_log = structlog.get_logger()


async def shield_for(work: Coroutine[Any, Any, None], left_s: Callable[[], float]) -> None:
    """Do `work`. When the caller is cancelled, it goes on for `left_s`, and is cancelled then.

    A second cancellation ends it at once.
    """
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done() and (seconds := left_s()) > 0.0:
            await asyncio.wait((task,), timeout=seconds)
        raise
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
        if not task.cancelled():
            # It is raised above, or nobody is there to be told.
            task.exception()
        # An error refers to this frame: a cycle would wait for the garbage collector.
        del task


class Releaser:
    """Has computed prompts freed. Writes one warning for each pair of backends where that fails."""

    def __init__(self, upstream: Upstream, config: Config, connector: KvConnector) -> None:
        self._upstream = upstream
        self._frees_refused = connector.frees_refused
        self._key, self._connect_s = config.backend_api_key, config.timeouts.connect_s
        self._warned: set[tuple[str, str]] = set()

    async def release(self, handover: Handover, backend: BackendConfig | None, model: str) -> None:
        """Tell the engine that computed a prompt that nobody fetches it, through the one that was to answer.

        That one is asked for an answer without tokens: it refuses that, and needs no room for it. Raises nothing.
        """
        value = handover.parameters.value
        if backend is None or value is None or not self._frees_refused:
            return
        if handover.unreachable_from(backend.url) or handover.too_late(asyncio.get_running_loop().time()):
            # It cannot tell the other one, or the blocks may be those of another prompt by now.
            return
        body = {"model": model, "prompt": [1], "max_tokens": 0, "kv_transfer_params": Raw(value)}
        try:
            async with asyncio.timeout(RELEASE_S):
                status, answer = await post(
                    self._upstream, backend, self._key, PATH, body, self._connect_s, ANSWER_BYTES_MAX
                )
        except TimeoutError:
            why = f"No answer within {RELEASE_S:g} s."
        except (ConnectFailed, UpstreamBroken) as error:
            why = str(error)
        else:
            if status == 400:
                return
            why = f"It answered {status}: {answer.decode(errors='replace')[:500]}"
        pair = handover.backend, backend.name
        if pair not in self._warned and len(self._warned) < WARNINGS_MAX:
            self._warned.add(pair)
            _log.warning("prompt_not_released", prefill_backend=pair[0], backend=pair[1], why=why)
