"""Loads or unloads an adapter on backends, and repeats the change on a backend that lost it in a restart.

Each backend gets one load or unload request at a time. The model list of the backend is read after each answer, so that
requests for the adapter work as soon as the load is reported.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

import orjson
import structlog

from llmproxy.backends.events import BackendObserver
from llmproxy.config import BackendConfig, TimeoutsConfig
from llmproxy.core.adapters import AdapterChange, AdapterPlan, Adapters, Reply, Report
from llmproxy.core.domain import Listing
from llmproxy.core.pools import Pools
from llmproxy.upstream.own_requests import post
from llmproxy.upstream.port import ConnectFailed, Upstream, UpstreamBroken

PATHS = {"load": "/v1/load_lora_adapter", "unload": "/v1/unload_lora_adapter"}
ANSWER_BYTES_MAX = 64 << 10
MESSAGE_CHARS_MAX = 500

T = TypeVar("T")
_log = structlog.get_logger()


class Lister(Protocol):
    """Reads the model list of one backend on demand. `Poller` implements it."""

    async def list_now(self) -> None:
        """Reads the model list of the backend now. Raises nothing."""


class AdapterKeeper(BackendObserver):
    """Changes the adapters of backends, and repeats the changes on backends that lack them, until `close`.

    The mappings `backends` and `listers` may change at any time. `on_order` gets each backend of a change, even if it
    was down, the kind of change ("load" or "unload"), and whether the change succeeded.
    """

    def __init__(
        self,
        adapters: Adapters,
        pools: Pools,
        backends: Mapping[str, BackendConfig],
        backend_api_key: str | None,
        upstream: Upstream,
        listers: Mapping[str, Lister],
        timeouts: TimeoutsConfig,
        on_order: Callable[[str, str, bool], None],
    ) -> None:
        self._adapters = adapters
        self._pools = pools
        self._backends = backends
        self._backend_api_key = backend_api_key
        self._upstream = upstream
        self._listers = listers
        self._timeouts = timeouts
        self._on_order = on_order
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._catching_up: set[str] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def carry_out(self, plan: AdapterPlan) -> Report:
        """Sends the load or unload requests of a plan to its backends that are up, and returns all replies.

        If the caller is cancelled, the requests are sent all the same.
        """
        return await asyncio.shield(self._spawn(self._carry_out(plan)))

    def listed(self, backend: str, listing: Listing) -> None:
        """Repeats the adapter changes that are missing in a backend's new model list."""
        del listing
        if backend not in self._catching_up and self._adapters.due(backend, _now()):
            self._catching_up.add(backend)
            self._spawn(self._catch_up(backend))

    def reconfigure(self, backend_api_key: str | None, timeouts: TimeoutsConfig) -> None:
        """Sets the key and the timeouts for later load and unload requests."""
        self._backend_api_key, self._timeouts = backend_api_key, timeouts

    def removed(self, backend: str) -> None:
        self._turns.pop(backend, None)
        self._adapters.forget(backend)

    async def close(self) -> None:
        """Cancels all running changes, and waits for the end of their tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _carry_out(self, plan: AdapterPlan) -> Report:
        try:
            orders = (self._order_if_up(plan.change, backend) for backend in plan.backends)
            replies = await asyncio.gather(*orders)
        except BaseException:
            self._adapters.abandon(plan)
            raise
        report = self._adapters.end(plan, tuple(replies), _now())
        for reply in report.replies:
            self._log_reply(plan.change, reply, repeated=False)
        return report

    async def _order_if_up(self, change: AdapterChange, backend: str) -> Reply:
        known = self._pools.backends.get(backend)
        if known is None or known.health.down:
            return Reply(backend, None, taken=False, message="The backend is down.")
        async with self._turns[backend]:
            return await self._order(change, backend)

    async def _catch_up(self, backend: str) -> None:
        """Sends a backend the adapter changes that it lacks.

        After a failed request, a later model list of the backend starts this again.
        """
        try:
            for change in self._adapters.due(backend, _now()):
                async with self._turns[backend]:
                    if change not in self._adapters.due(backend, _now()):
                        continue
                    reply = await self._order(change, backend)
                    self._adapters.replied(change, reply, _now())
                self._log_reply(change, reply, repeated=True)
                if not reply.taken:
                    return
        finally:
            self._catching_up.discard(backend)

    def _log_reply(self, change: AdapterChange, reply: Reply, *, repeated: bool) -> None:
        self._on_order(reply.backend, change.kind, reply.taken)
        facts = {"adapter": change.name, "backend": reply.backend, "change": change.kind, "repeated": repeated}
        if reply.taken:
            _log.info("adapter_changed", **facts)
        else:
            _log.warning("adapter_not_changed", **facts, status=reply.status, why=reply.message)

    # --- one backend --------------------------------------------------------------------------------------------------

    async def _order(self, change: AdapterChange, backend: str) -> Reply:
        config = self._backends.get(backend)
        if config is None:
            return Reply(backend, None, taken=False, message="The backend was removed.")
        try:
            async with asyncio.timeout(self._timeouts.adapter_s):
                status, body = await post(
                    self._upstream, config, self._backend_api_key, PATHS[change.kind], change.fields,
                    self._timeouts.connect_s, ANSWER_BYTES_MAX,
                )  # fmt: skip
        except (ConnectFailed, UpstreamBroken) as error:
            return Reply(backend, None, taken=False, message=str(error)[:MESSAGE_CHARS_MAX])
        except TimeoutError:
            message = f"No answer within {self._timeouts.adapter_s:g} s (timeouts.adapter_s)."
            return Reply(backend, None, taken=False, message=message)
        if backend in self._listers:
            await self._listers[backend].list_now()
        # A backend refuses to load a present adapter, and to unload a missing one. Then its model list decides.
        taken = 200 <= status < 300 or self._adapters.is_met(change, backend)
        return Reply(backend, status, taken, _message(status, body))


def _message(status: int, body: bytes) -> str:
    """Returns the message in a backend's answer. vLLM answers with plain text on success and with JSON on errors."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        text = body.decode("utf-8", "replace").strip()
        return text[:MESSAGE_CHARS_MAX] or f"status {status}"
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return str(error["message"])[:MESSAGE_CHARS_MAX]
    if status == 404:
        return "Not Found: is VLLM_ALLOW_RUNTIME_LORA_UPDATING=True set for the engine?"
    return body.decode("utf-8", "replace")[:MESSAGE_CHARS_MAX]


def _now() -> float:
    return asyncio.get_running_loop().time()
