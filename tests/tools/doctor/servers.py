"""Servers that answer like engines, and other servers at the address of an engine."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

METRICS = """\
vllm:num_requests_running{engine="0",model_name="m"} 0.0
vllm:num_requests_running{engine="1",model_name="m"} 0.0
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",kv_cache_size_tokens="16384"} 1.0
"""


def card(name: str = "m", *, parent: str | None = None, owner: str = "vllm", length: int | None = 4096) -> Any:
    return {"id": name, "object": "model", "owned_by": owner, "parent": parent, "max_model_len": length}


def engine(
    *cards: Any,
    version: str | None = "0.32.0",
    metrics: str | int = METRICS,
    info: Any = None,
    key: str | None = None,
    date: str | None = None,
    hangs: str = "",
) -> TestServer:
    """A vLLM server. `info` is the answer of its development mode, and `hangs` a path that it never answers.

    `metrics` is the answer of `/metrics`, or its status.
    """

    @web.middleware
    async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
        if key is not None and request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        answer: web.StreamResponse = await handler(request)
        if date is not None:
            answer.headers["Date"] = date
        return answer

    answers: dict[str, Any] = {
        "/v1/models": {"object": "list", "data": list(cards or [card()])},
        "/version": version and {"version": version},
        "/server_info": info,
    }

    async def answer(request: web.Request) -> web.Response:
        if request.path == hangs:
            await asyncio.Event().wait()
        if request.path == "/metrics":
            return web.Response(text=metrics) if isinstance(metrics, str) else web.Response(status=metrics)
        found = answers.get(request.path)
        return web.json_response(found) if found else web.Response(status=200 if request.path == "/health" else 404)

    app = web.Application(middlewares=[guard])
    app.router.add_get("/{path:.*}", answer)
    return TestServer(app)


def llama_cpp(slots: Any = None) -> TestServer:
    """llama-server as documented, without --metrics. `slots` is in its `/props`, which it may refuse."""

    async def answer(request: web.Request) -> web.Response:
        meta = {"vocab_type": 2, "n_vocab": 128256, "n_ctx_train": 131072, "n_embd": 4096}
        data = [{"id": "llama-3.1-8b-q4.gguf", "object": "model", "owned_by": "llamacpp", "meta": meta}]
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": data}, headers={"Server": "llama.cpp"})
        if request.path == "/health":
            return web.json_response({"status": "ok"})
        if request.path == "/props" and slots is not None:
            return web.json_response({"total_slots": slots, "default_generation_settings": {"n_ctx": 8192}})
        code = 501 if request.path == "/metrics" else 404
        return web.json_response({"error": {"code": code, "message": "no", "type": "no"}}, status=code)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    return TestServer(app)


def web_page(status: int = 404) -> TestServer:
    """nginx without a rule for these paths."""

    async def answer(_: web.Request) -> web.Response:
        text = "<html><body><h1>Welcome to nginx!</h1></body></html>"
        return web.Response(text=text, status=status, content_type="text/html", headers={"Server": "nginx/1.28.0"})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    return TestServer(app)
