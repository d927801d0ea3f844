"""`llmproxy shadow` from its start to its end, in front of a small router."""

from __future__ import annotations

import asyncio
import json
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from aiohttp import web
from aiohttp.test_utils import BaseTestServer, TestServer
from typer.testing import CliRunner

from llmproxy.cli import commands as cli
from llmproxy.config import BackendTlsConfig, Config
from llmproxy.tools.shadow import ShadowError, ShadowOptions, command, run
from tests.tools.doctor.servers import METRICS, engine

WAIT_S = 10.0


def options(router: str, replica: str, out: Path, **config: Any) -> ShadowOptions:
    config = {"backends": [replica]} | config
    return ShadowOptions("127.0.0.1", 0, router, Config.model_validate(config), out, 1 << 20)


async def test_an_external_backend_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.headers.get("authorization", ""))
        return web.json_response({})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    monkeypatch.setenv("PAID_KEY", "paid")
    external = {"api_key_env": "PAID_KEY", "models": {"m": "n"}, "max_per_day": 1}
    external |= {"price_per_million_input": 1, "price_per_million_output": 1}
    stop = asyncio.Event()
    stop.set()
    async with TestServer(app) as paid, engine() as replica, asyncio.timeout(WAIT_S):
        backends = [str(replica.make_url("/")), {"url": str(paid.make_url("/")), "external": external}]
        chosen = options("http://127.0.0.1:9", "", tmp_path / "out", backends=backends, backend_api_key="fleet")
        await run(chosen, lambda _: None, stop)
    assert asked == []


@pytest.mark.parametrize("tls", [False, True])
async def test_from_start_to_end(tmp_path: Path, tls: bool) -> None:
    authority, of_router = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(of_router)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    arrived, held, stop = asyncio.Event(), asyncio.Event(), asyncio.Event()
    counters = 'vllm:request_success_total{finished_reason="stop"} 3.0\nvllm:prefix_cache_queries_total 8.0\n'

    async def answer(request: web.Request) -> web.Response:
        arrived.set()
        await held.wait()
        return web.json_response({"usage": {"prompt_tokens": 9, "completion_tokens": 2}, "of": request.path})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    said: list[str] = []
    router = TestServer(app)
    await router.start_server(ssl=of_router if tls else None)
    async with router, engine(metrics=METRICS + counters) as replica, asyncio.timeout(WAIT_S):
        secure = BackendTlsConfig(ca=tmp_path / "ca.pem") if tls else command.OF_THE_SYSTEM
        shadow, port = await served(router, replica, tmp_path / "out", said, stop, secure)
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{port}/v1/completions"
            asked = asyncio.create_task(session.post(url, json={"prompt": "hello", "model": "m"}))
            await arrived.wait()
            stop.set()
            await asyncio.sleep(0.05)
            assert not shadow.done()
            held.set()
            assert (await (await asked).json())["of"] == "/v1/completions"
        await shadow
    lines = (tmp_path / "out" / "requests.jsonl").read_text().splitlines()
    assert json.loads(lines[1])["prompt_tokens"] == 9
    (fact,) = json.loads((tmp_path / "out" / "replicas.json").read_text())
    assert (fact["kv_tokens"], fact["requests"]) == (16384, 0.0)
    assert any("1  requests" in text for text in said)


async def served(
    router: BaseTestServer,
    replica: BaseTestServer,
    out: Path,
    said: list[str],
    stop: asyncio.Event,
    tls: BackendTlsConfig = command.OF_THE_SYSTEM,
) -> tuple[asyncio.Task[None], int]:
    """Starts a shadow, and returns its task and its port."""
    chosen = replace(options(str(router.make_url("/")), str(replica.make_url("/")), out), tls=tls)
    shadow = asyncio.create_task(run(chosen, said.append, stop))
    while not any("Passes" in text for text in said):  # noqa: ASYNC110 - the text is the only sign
        await asyncio.sleep(0.01)
    return shadow, int(said[-1].split()[1].rpartition(":")[2])


async def test_the_address_and_the_router_are_said_before_the_replicas_are_looked_at(tmp_path: Path) -> None:
    said: list[str] = []
    shadow = asyncio.create_task(run(options("http://router:8000", "http://127.0.0.1:9", tmp_path), said.append))
    await asyncio.sleep(0)
    assert said == ["Looks at the replicas first. Then 127.0.0.1:0 is passed on to http://router:8000."]
    shadow.cancel()


@pytest.mark.parametrize("limit_s", [command.END_S, 0.1])
async def test_clients_that_go_on_do_not_hold_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_s: float
) -> None:
    """Clients send their next request at once, or wait for an answer that is later than the limit."""
    monkeypatch.setattr(command, "END_S", limit_s)
    late, stop, said = limit_s < 1.0, asyncio.Event(), list[str]()

    async def answer(_: web.Request) -> web.Response:
        if late:
            await asyncio.Event().wait()
        return web.json_response({})

    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while True:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
            if late:
                stop.set()
            if not await reader.read(1 << 16):
                break
            stop.set()
        writer.close()

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as router, engine() as replica, asyncio.timeout(WAIT_S):
        shadow, port = await served(router, replica, tmp_path / "out", said, stop)
        await client(port)
        await shadow
    assert any(f"after {limit_s:g} s at the latest" in text for text in said)


@pytest.mark.parametrize("url", ["router:8000", "http://router:8000/v1", "ftp://router", "http://", "http://a:99999"])
async def test_addresses_that_are_no_router(tmp_path: Path, url: str) -> None:
    async with engine() as replica:
        with pytest.raises(ShadowError, match="--to"):
            await run(options(url, str(replica.make_url("/")), tmp_path), print)


@pytest.mark.parametrize(
    ("url", "tls", "says"),
    [
        ("http://router:8000", {"insecure_skip_verify": True}, "need an https:// router"),
        ("https://router", {"ca": __file__}, "--to-ca: .*test_command.py holds no certificate"),
        ("https://router", {"ca": __file__, "insecure_skip_verify": True}, "leave it out, or --to-ca"),
    ],
)
async def test_wrong_ways_to_verify_the_router(tmp_path: Path, url: str, tls: dict[str, Any], says: str) -> None:
    chosen = replace(options(url, "http://127.0.0.1:1", tmp_path), tls=BackendTlsConfig.model_validate(tls))
    with pytest.raises(ShadowError, match=says):
        await run(chosen, print)


async def test_a_record_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text("a day\n")
    async with engine() as replica:
        with pytest.raises(ShadowError, match="has a record"):
            await run(options("http://127.0.0.1:1", str(replica.make_url("/")), tmp_path), print)
    assert (tmp_path / "requests.jsonl").read_text() == "a day\n"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "give --to URL"),
        (("--to", "http://a"), "give --to URL"),
        (("--to", "http://a", "--backend", "http://b", "--listen", "8080"), "--listen HOST:PORT"),
        (("--policy", "nonsense"), "unknown policy"),
        (("--report", "--out", "nowhere"), "nothing to report on"),
    ],
)
def test_wrong_flags(flags: tuple[str, ...], says: str) -> None:
    result = CliRunner().invoke(cli.app, ["shadow", *flags])
    assert result.exit_code == 2
    assert says in result.output
