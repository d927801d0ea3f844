"""The routes and errors of a simulated replica, as recorded from vLLM 0.32."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import orjson
from aiohttp import hdrs, web
from prometheus_client import generate_latest
from prometheus_client.exposition import choose_encoder

from llmproxy.lab.simulator.http.answer_events import MessagesAnswer, ResponsesAnswer
from llmproxy.lab.simulator.http.answers import ChatAnswer, CompletionAnswer, error_body, models_body
from llmproxy.lab.simulator.http.generation import AnswerWriterType, generate, headers_of
from llmproxy.lab.simulator.server import nixl
from llmproxy.lab.simulator.server.faults import FaultKind
from llmproxy.lab.simulator.server.requests import (
    ApiError,
    Body,
    chat_tokens,
    invalid,
    messages_request,
    parse_object,
    resolve,
)
from llmproxy.lab.simulator.server.service import Service, engine_dead
from llmproxy.lab.simulator.server.text import text_of, tokens_of

Handler = Callable[[web.BaseRequest, bytes], Awaitable[web.StreamResponse]]
_GUARDED = ("/v1", "/v2", "/inference", "/cohere")
_RESPONSES = "/v1/responses/"
TOKENIZER_INFO: Body = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": None,
    "eos_token": "<|eos|>",
    "pad_token": "<|pad|>",
    "model_max_length": 32768,
    "chat_template": "{% for m in messages %}{{ m['content'] }}\n{% endfor %}",
    "truncation_side": "left",
}
"""The fields that clients look for, with the values that an engine with --enable-tokenizer-info-endpoint returns."""


class Routes:
    """The HTTP routes of a simulated vLLM server, with the paths and methods of vLLM 0.32."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._routes: dict[str, dict[str, Handler]] = {
            "/health": {"GET": self._empty},
            "/ping": {"GET": self._empty, "POST": self._empty},
            "/version": {"GET": self._fixed({"version": "0.32.0"})},
            "/load": {"GET": self._fixed({"server_load": 0})},
            "/metrics": {"GET": self._metrics, "POST": self._metrics_app, "HEAD": self._metrics_app},
            "/metrics/": {"GET": self._metrics_app, "POST": self._metrics_app, "HEAD": self._metrics_app},
            "/v1/models": {"GET": self._models},
            "/v1/chat/completions": {"POST": self._generation(ChatAnswer)},
            "/v1/completions": {"POST": self._generation(CompletionAnswer)},
            "/v1/responses": {"POST": self._generation(ResponsesAnswer)},
            "/v1/messages": {"POST": self._generation(MessagesAnswer)},
            "/v1/messages/count_tokens": {"POST": self._count_tokens},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/tokenizer_info": {"GET": self._fixed(TOKENIZER_INFO)},
            "/v1/load_lora_adapter": {"POST": self._load_adapter},
            "/v1/unload_lora_adapter": {"POST": self._unload_adapter},
            "/sim/fault": {"POST": self._fault},
        }
        if service.nixl is not None:
            self._routes[nixl.PATH] = {"POST": self._kv_transfer}

    async def answer(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        """Answers a request with this body. Every error becomes a response."""
        path = request.path
        handler_path, response = "none", None
        try:
            handler_path, methods = self._find(path)
            response = await self._dispatch(request, body, methods)
        except ApiError as error:
            shown = error_body(error, anthropic=path.startswith("/v1/messages"))
            response = _json(shown, error.status)
        finally:
            status = 499 if response is None else response.status
            # Any word can be a method, and each label value would be a new series.
            method = request.method if request.method in hdrs.METH_ALL else "OTHER"
            self._service.metrics.requests[(handler_path, method, f"{status // 100}xx")] += 1
        return response

    def _find(self, path: str) -> tuple[str, dict[str, Handler]]:
        """Returns the path as a metric label, and its handlers, keyed by method; no handlers for an unknown path."""
        if path in self._routes:
            return path, self._routes[path]
        if path.startswith(_RESPONSES):
            rest = path.removeprefix(_RESPONSES).split("/")
            if len(rest) == 1 and rest[0]:
                return _RESPONSES + "{response_id}", {"GET": self._response}
            if rest[1:] == ["cancel"]:
                return _RESPONSES + "{response_id}/cancel", {"POST": self._cancel_response}
        return "none", {}

    async def _dispatch(self, request: web.BaseRequest, body: bytes, methods: dict[str, Handler]) -> web.StreamResponse:
        path = request.path
        key = self._service.options.api_key
        if key is not None and path.startswith(_GUARDED):
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or token != key:
                refused = _json({"error": "Unauthorized"}, 401)
                del refused.headers["vary"]
                return refused
        if not methods and path.endswith("/") and self._find(path.rstrip("/"))[1]:
            location = f"http://{request.headers.get('host', '')}{path.rstrip('/')}"
            return _plain(b"", None, 307, {"location": location})
        if not methods:
            return _json({"detail": "Not Found"}, 404)
        handler = methods.get(request.method)
        if handler is None:
            allowed = ", ".join(methods)
            return _json({"detail": "Method Not Allowed"}, 405, {"allow": allowed})
        if request.headers.get("content-encoding", "identity") != "identity":
            return _json({"detail": "There was an error parsing the body"}, 400)
        return await handler(request, body)

    # --- generation ---------------------------------------------------------------------------------------------------

    def _generation(self, writer_type: AnswerWriterType) -> Handler:
        async def handler(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
            return await generate(self._service, request, writer_type, _object(request, body))

        return handler

    async def _response(self, request: web.BaseRequest, _: bytes) -> web.StreamResponse:
        return _json(self._service.response(request.path.removeprefix(_RESPONSES)))

    async def _cancel_response(self, request: web.BaseRequest, _: bytes) -> web.StreamResponse:
        self._service.response(request.path.removeprefix(_RESPONSES).removesuffix("/cancel"))
        raise ApiError(400, "Cannot cancel a synchronous response.", "invalid_request_error", "response_id")

    # --- names and tokens ---------------------------------------------------------------------------------------------

    async def _models(self, _: web.BaseRequest, __: bytes) -> web.StreamResponse:
        return _json(models_body(self._service.limits, self._service.models))

    async def _count_tokens(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        tokens = messages_request(_object(request, body), self._service.limits, counting=True).prompt_tokens
        shown = {"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}}
        return _json(shown)

    async def _tokenize(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        fields = _object(request, body)
        resolve(fields, self._service.limits)
        messages, prompt = fields.get("messages"), fields.get("prompt")
        if not isinstance(messages, list) and not isinstance(prompt, str):
            raise invalid("missing", "body.prompt", "Field required", f"<dict of {len(fields)} items>")
        tokens = chat_tokens(messages) if isinstance(messages, list) else tokens_of(str(prompt))
        strings = [text_of([token]) for token in tokens] if fields.get("return_token_strs") else None
        shown = {"count": len(tokens), "max_model_len": self._service.max_model_len, "tokens": tokens}
        return _json({**shown, "token_strs": strings})

    async def _detokenize(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        fields = _object(request, body)
        resolve(fields, self._service.limits)
        tokens = fields.get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise invalid("missing", "body.tokens", "Field required", f"<dict of {len(fields)} items>")
        return _json({"prompt": text_of(tokens)})

    async def _load_adapter(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        fields = _object(request, body)
        name, path = (_text_field(fields, field) for field in ("lora_name", "lora_path"))
        if not name or not path:
            raise ApiError(400, "Both 'lora_name' and 'lora_path' must be provided.", "InvalidUserInput")
        if name == self._service.options.model:
            raise ApiError(400, f"The lora adapter '{name}' conflicts with a served base model.", "InvalidUserInput")
        if name in self._service.models and not fields.get("load_inplace"):
            message = f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, "
            raise ApiError(400, message + "set 'load_inplace' to True.", "InvalidUserInput")
        if not self._service.options.max_loras:
            message = "Call to add_lora method failed: Worker failed with error 'LoRA is not enabled. Use "
            message += "--enable-lora to enable LoRA.', please check the stack trace above for the root cause"
            raise ApiError(500, message, "InternalServerError")
        self._service.models[name] = path
        return _plain(f"Success: LoRA adapter '{name}' added successfully.".encode(), None)

    async def _unload_adapter(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        name = _text_field(_object(request, body), "lora_name")
        if name not in self._service.limits.adapters:
            raise ApiError(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        del self._service.models[name]
        return _plain(f"Success: LoRA adapter '{name}' removed successfully.".encode(), None)

    # --- operation ----------------------------------------------------------------------------------------------------

    async def _empty(self, _: web.BaseRequest, __: bytes) -> web.StreamResponse:
        return _plain(b"", None)

    def _fixed(self, shown: Body) -> Handler:
        async def handler(_: web.BaseRequest, __: bytes) -> web.StreamResponse:
            return _json(shown)

        return handler

    async def _metrics(self, _: web.BaseRequest, __: bytes) -> web.StreamResponse:
        page = generate_latest(self._service.metrics.registry)
        return _plain(page, "text/plain; version=1.0.0; charset=utf-8")

    async def _metrics_app(self, request: web.BaseRequest, _: bytes) -> web.StreamResponse:
        """Serves vLLM's second metrics page, which filters by `name[]`, supports OpenMetrics and compresses."""
        registry = self._service.metrics.registry
        accept = request.headers.get("accept", "")
        names = request.query.getall("name[]", [])
        encode, content_type = choose_encoder(accept)
        if "openmetrics" not in accept:
            content_type = "text/plain; version=0.0.4; charset=utf-8"
        page = encode(registry.restricted_registry(names) if names else registry)
        response = web.StreamResponse(headers=headers_of(content_type))
        if "gzip" in request.headers.get("accept-encoding", ""):
            response.enable_compression(web.ContentCoding.gzip)
        await response.prepare(request)
        await response.write(page)
        return response

    async def _fault(self, _: web.BaseRequest, body: bytes) -> web.StreamResponse:
        """Sets or clears a fault. vLLM has no such route.

        The body is `{"kind": ..., "factor": 10, ...}` as for `FaultSwitch.set`. Without a kind, it clears the fault.
        """
        fields = parse_object(body, "application/json")
        kind = fields.get("kind")
        if kind is not None and kind not in list(FaultKind):
            raise ApiError(400, f"there is no fault {kind!r}; known: {', '.join(FaultKind)}", param="kind")
        if kind is None:
            self._service.faults.clear()
        else:
            factor, share = fields.get("factor") or 10.0, fields.get("share") or 1.0
            word = fields.get("word") or "POISON"
            if not isinstance(factor, int | float) or factor <= 0:
                raise ApiError(400, f"factor must be a number above 0, got {factor!r}", param="factor")
            if not isinstance(share, int | float) or not 0 < share <= 1:
                raise ApiError(400, f"share must be a number within 0..1, got {share!r}", param="share")
            if not isinstance(word, str):
                raise ApiError(400, f"word must be text, got {word!r}", param="word")
            switch_on = partial(
                self._service.faults.set,
                kind,
                after_bytes=fields.get("after_bytes") or 0,
                after_tokens=fields.get("after_tokens") or 0,
                factor=factor,
                share=share,
                word=word,
                times=fields.get("times"),
            )
            # Send the response before the fault closes its connection.
            asyncio.get_running_loop().call_later(0.01, switch_on)
        return _json({"kind": kind})

    async def _kv_transfer(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        """Handles another replica's notice about a KV transfer. vLLM has no such route."""
        connector = self._service.nixl
        if connector is None or self._service.faults.kind is FaultKind.ENGINE_DEAD:
            raise engine_dead()
        fields = _object(request, body)
        notice, engine_id, request_id = (_text_field(fields, name) for name in ("notice", "engine_id", "request_id"))
        if notice not in list(nixl.Notice):
            raise ApiError(400, f"there is no notice {notice!r}; known: {', '.join(nixl.Notice)}", param="notice")
        kept = connector.handle_notice(nixl.Notice(notice), engine_id, request_id)
        return _json({"kept": kept}, 200 if kept else 410)


def _json(shown: Body, status: int = 200, extra: Mapping[str, str] | None = None) -> web.StreamResponse:
    return _plain(orjson.dumps(shown), "application/json", status, extra)


def _plain(
    data: bytes, content_type: str | None, status: int = 200, extra: Mapping[str, str] | None = None
) -> web.StreamResponse:
    headers = {**headers_of(content_type, len(data)), **(extra or {})}
    return web.Response(status=status, body=data or None, headers=headers)


def _object(request: web.BaseRequest, body: bytes) -> Body:
    return parse_object(body, request.headers.get("content-type", ""))


def _text_field(fields: Body, name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise invalid("missing", f"body.{name}", "Field required", f"<dict of {len(fields)} items>")
    return value
