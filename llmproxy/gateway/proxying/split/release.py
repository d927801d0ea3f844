"""Frees the computed prompt of a split request that will have no decode stage, for example because the client left.

The prefill engine keeps the KV blocks of the prompt. The decode engine frees the blocks when the request finishes or is
rejected. Otherwise they stay until the KV lease expires.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog
from msgspec import Raw

from llmproxy.config import BackendConfig, Config
from llmproxy.core.kv_connectors import KvConnector
from llmproxy.gateway.proxying.split.stages import WARNINGS_MAX, Handover
from llmproxy.upstream.own_requests import post
from llmproxy.upstream.port import ConnectFailed, Upstream, UpstreamBroken

PREFILL_GRACE_S = 1.0
"""How long the proxy still reads the answer to a prefill whose client left.

An engine notices a disconnect after its current step. If that step was the last, the engine keeps the blocks, and only
its answer says how to free them.
"""
DECODE_GRACE_S = 0.25
"""How long a decode stage runs at least, also if the client leaves.

An engine that has not read the request yet does not free the blocks.
"""
RELEASE_S = 1.0
"""How long the request of a release may take. If it fails, the blocks are freed when their KV lease expires."""
PATH = "/v1/completions"
ANSWER_BYTES_MAX = 64 << 10

_log = structlog.get_logger()


async def shield_for(work: Coroutine[Any, Any, None], left_s: Callable[[], float]) -> None:
    """Runs `work`. If the caller is cancelled, `work` may run for another `left_s()` seconds, and is then cancelled.

    A second cancellation ends `work` at once. Raises the error of `work`, or CancelledError.
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
            # Marks the exception as retrieved: it was raised above, or the caller was cancelled.
            task.exception()
        # An error refers to this frame. Without the cycle, both are freed at once.
        del task


class Releaser:
    """Asks engines to free computed prompts. Logs one warning for each pair of backends for which this fails."""

    def __init__(self, upstream: Upstream, config: Config, connector: KvConnector) -> None:
        self._upstream = upstream
        self._frees_refused = connector.frees_refused
        self._key, self._connect_s = config.backend_api_key, config.timeouts.connect_s
        self._warned: set[tuple[str, str]] = set()

    async def release(self, handover: Handover, backend: BackendConfig | None, model: str) -> None:
        """Frees the prompt of `handover` on its prefill engine. Raises nothing.

        `backend` is the engine for the decode stage (None: do nothing). It gets a request for zero tokens with the
        transfer parameters, rejects it at once, and frees the blocks as for any rejected request. Nothing is sent if
        the decode engine cannot reach the prefill engine, or if the blocks may already belong to another prompt.
        """
        value = handover.parameters.value
        if backend is None or value is None or not self._frees_refused:
            return
        if handover.unreachable_from(backend.url) or handover.too_late(asyncio.get_running_loop().time()):
            # The decode engine cannot reach the prefill engine, or the blocks may belong to another prompt by now.
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
