"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`: vLLM's interface, for all replicas of a model at once."""

from __future__ import annotations

from typing import Any, Protocol

import orjson
from aiohttp import web

from llmproxy.config import ClientsConfig
from llmproxy.core.adapters import AdapterPlan, Adapters, Report
from llmproxy.core.backends.catalogue import NAME_CHARS_MAX
from llmproxy.core.domain import Outcome, Refused
from llmproxy.gateway.admin.explained import page_fields
from llmproxy.gateway.http.errors import Failure, error_fields
from llmproxy.gateway.http.routes import LOAD_ADAPTER
from llmproxy.gateway.proxying.rules import Rulebook
from llmproxy.gateway.request.body import read_body
from llmproxy.scheduling.dispatcher import Dispatcher

BODY_BYTES_MAX = 16 << 10  # The maximum size of a request body, enough for the name and path of an adapter.
PATH_CHARS_MAX = 4_096
DRAIN_RETRY_S = 1.0


class AdapterPlanRunner(Protocol):
    """Loads and unloads adapters on backends."""

    async def carry_out(self, plan: AdapterPlan) -> Report:
        """Sends the requests of a plan to its backends, and returns the reply of each backend."""


class AdapterRoutes:
    """Serves the adapter routes. The caller must check first that the client may use them."""

    def __init__(
        self, adapters: Adapters, runner: AdapterPlanRunner, dispatcher: Dispatcher, rulebook: Rulebook
    ) -> None:
        self._adapters = adapters
        self._runner = runner
        self._dispatcher = dispatcher
        self._rulebook = rulebook

    async def serve(self, path: str, request: web.BaseRequest) -> web.Response:
        """Loads or unloads one adapter, and returns the reply of each backend as JSON.

        Raises Failure if the request is wrong, another change of this adapter is under way, or the proxy drains. Then
        no backend gets a request.
        """
        if self._dispatcher.draining:
            raise Failure(Outcome.DRAINING, "The proxy is shutting down. Try again.", retry_after_s=DRAIN_RETRY_S)
        fields = await _fields(request, self._rulebook.current.config.clients)
        name = _text(fields, "lora_name", NAME_CHARS_MAX)
        replicas, model = _replicas(fields.pop("replicas", "all")), fields.pop("model", None)
        if model is not None and not isinstance(model, str):
            raise _bad("`model` should be the name of a base model.", "model")
        if self._adapters.is_changing(name):
            message = f"Another change of '{name}' is under way. Try again when it has ended."
            raise Failure(Outcome.BAD_REQUEST, message, status=409, retry_after_s=DRAIN_RETRY_S)
        try:
            if path == LOAD_ADAPTER:
                lora_path, in_place = _text(fields, "lora_path", PATH_CHARS_MAX), fields.get("load_inplace", False)
                if not isinstance(in_place, bool):
                    raise _bad("`load_inplace` should be true or false.", "load_inplace")
                plan = self._adapters.load(name, lora_path, fields, model, replicas, in_place)
            else:
                plan = self._adapters.unload(name, fields, model, replicas)
        except Refused as refused:
            raise Failure.from_refused(refused) from None
        return _answer(await self._runner.carry_out(plan))


def _answer(report: Report) -> web.Response:
    """Returns the report as JSON.

    The status is 200 if all replicas accepted. It is 4xx if all replicas that answered refused with this status and the
    proxy does not ask them again. Otherwise it is 502.
    """
    failed = [reply for reply in report.replies if not reply.taken]
    shown: dict[str, Any] = {
        "adapter": report.change.name,
        "model": report.change.pool,
        "ok": len(report.replies) - len(failed),
        "failed": len(failed),
        "remembered": report.remembered,
        "replicas": [page_fields(reply, 0, taken="ok") for reply in report.replies],
    }
    status = 200
    if failed:
        statuses = {reply.status for reply in report.replies if reply.status is not None}
        alike = statuses.pop() if not report.remembered and len(statuses) == 1 else 502
        status = alike if 400 <= alike < 500 else 502
        replies = "; ".join(f"{reply.backend}: {reply.message}" for reply in failed[:5])
        later = " The proxy asks the other replicas again." if report.remembered else ""
        message = f"{len(failed)} of {len(report.replies)} replicas did not {report.change.kind} it: {replies}{later}"
        shown["error"] = error_fields(status, message)
    return web.Response(status=status, body=orjson.dumps(shown), content_type="application/json")


async def _fields(request: web.BaseRequest, limits: ClientsConfig) -> dict[str, Any]:
    if request.content_type != "application/json":
        raise _bad("Unsupported media type: the content type of this route is application/json.", None)
    body = await read_body(request, BODY_BYTES_MAX, limits)
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _bad(f"The body is not JSON: {error}.", None) from None
    if not isinstance(fields, dict):
        raise _bad("The body should be a JSON object.", None)
    return fields


def _text(fields: dict[str, Any], key: str, chars_max: int) -> str:
    value = fields.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= chars_max:
        raise _bad(f"`{key}` should be a text of 1 to {chars_max} characters.", key)
    return value


def _replicas(value: object) -> int | None:
    """Returns the number of replicas; None for "all". Raises Failure (400)."""
    if value == "all":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _bad('`replicas` should be "all" or an integer from 1.', "replicas")
    return value


def _bad(message: str, param: str | None) -> Failure:
    return Failure(Outcome.BAD_REQUEST, message, param=param)
