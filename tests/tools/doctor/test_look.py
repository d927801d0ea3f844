"""The findings about servers, and the text of `llmproxy doctor`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp.test_utils import TestServer

from llmproxy.config import BackendConfig
from llmproxy.tools.doctor import look
from llmproxy.tools.doctor.look import Replica, look_at
from llmproxy.tools.doctor.report import report
from tests.tools.doctor.servers import METRICS, card, engine, llama_cpp, web_page


async def seen(*servers: TestServer, key: str | None = None) -> list[Replica]:
    for server in servers:
        await server.start_server()
    try:
        urls = [str(server.make_url("")).rstrip("/") for server in servers]
        return await look_at([BackendConfig(url=url) for url in urls], key)
    finally:
        for server in servers:
            await server.close()


def info(sequences: int, timeout_s: int = 300) -> Any:
    return {"vllm_config": {"scheduler_config": {"max_num_seqs": sequences}, "shutdown_timeout": timeout_s}}


async def test_a_good_replica_has_facts_and_no_problems() -> None:
    [replica] = await seen(engine(card(), card("sql", parent="m"), info=info(256)))
    assert replica.problems == []
    text = report([replica])
    for part in ("vLLM 0.32.0", "m, 4,096 tokens", "adapters  sql", "batch     256", "ranks     2", "16,384 tokens"):
        assert part in text


@pytest.mark.parametrize(
    ("server", "found", "fatal"),
    [
        (engine(info=info(8)), "it runs 4 requests at once", False),
        (engine(info=info(256, 0)), "its streams end when it is stopped", False),
        (engine(metrics=METRICS.replace("True", "False")), "prefix caching is off", False),
        (engine(metrics="python_gc_objects_collected_total 1.0\n"), "without --disable-log-stats", False),
        (engine(metrics=404), "/metrics answers 404\n            The proxy must be able to read it. Up to 256", False),
        (engine(card(owner="sglang"), metrics=404), "Start SGLang with --enable-metrics. Up to 256", False),
        (engine(metrics=404, info=info(64)), "The proxy must be able to read it.\n", False),
        (engine(version="0.11.0rc2.dev3+gabc"), "vLLM before 0.18 ends its streams", False),
        (engine(date="Fri, 01 Jan 2021 00:00:00 GMT"), "s behind", False),
        (engine(date="yesterday"), "", False),
        (engine(key="secret"), "Set LLMPROXY_BACKEND_API_KEY.", True),
        (engine(card(parent="base")), "/v1/models lists no base model", True),
        (llama_cpp(), "its own requests. Up to 256 requests are sent to it at once: set its max_in_flight.", False),
        (llama_cpp(4), "The metrics of llama.cpp are not read: the proxy counts its own requests.\n", False),
        (web_page(), "/v1/models answers 404 (server: nginx/1.28.0)", True),
        (web_page(200), "the model list is not JSON", True),
        (web_page(503), "/v1/models answers 503", True),
    ],
)
async def test_problems_in_words(server: TestServer, found: str, fatal: bool) -> None:
    [replica] = await seen(server)
    assert replica.usable is not fatal
    assert found in f"{report([replica])}\n"
    assert len(replica.problems) == bool(found)


@pytest.mark.parametrize(
    ("server", "batch"),
    [
        (engine(), "not published: the proxy learns its limit"),
        (engine(metrics=404), "not published"),
        (llama_cpp(), "not published"),
        (llama_cpp(True), "not published"),
        (llama_cpp(4), "4: set max_in_flight to it, as `llmproxy init` does"),
    ],
)
async def test_the_batch_limit_in_words(server: TestServer, batch: str) -> None:
    [replica] = await seen(server)
    assert f"  batch     {batch}\n" in f"{report([replica])}\n"
    replica.backend = BackendConfig(url=replica.backend.url, max_in_flight=9)
    assert "  batch     9 (max_in_flight)" in report([replica])


async def test_a_key_is_sent() -> None:
    [replica] = await seen(engine(key="secret"), key="secret")
    assert replica.usable
    [replica] = await seen(engine(key="secret"), key="wrong")
    assert "Correct LLMPROXY_BACKEND_API_KEY, or its api_key." in report([replica])


async def test_servers_that_do_not_answer(monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int) -> None:
    monkeypatch.setattr(look, "TIMEOUT_S", 0.2)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def other(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")
        writer.close()

    async with (
        await asyncio.start_server(silent, "127.0.0.1", 0) as first,
        await asyncio.start_server(other, "127.0.0.1", 0) as second,
    ):
        ports = [one.sockets[0].getsockname()[1] for one in (first, second)]
        urls = [f"http://127.0.0.1:{port}" for port in (*ports, unused_tcp_port)]
        urls += [f"https://127.0.0.1:{ports[1]}", "http://gpu.invalid:8000"]
        replicas = await look_at([BackendConfig(url=url) for url in urls])
    texts = [replica.problems[0].text for replica in replicas]
    assert texts[0] == "no answer within 0.2 s"
    assert texts[2] == "Connection refused"
    assert "gpu.invalid does not resolve" in texts[4]
    assert not any(replica.usable for replica in replicas)
    assert not any("ssl" in text.lower() for text in texts)


async def test_an_engine_that_hangs_is_not_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its API server lists models, and `/health` waits for the engine."""
    monkeypatch.setattr(look, "TIMEOUT_S", 0.2)
    [replica] = await seen(engine(hangs="/health"))
    assert (replica.usable, replica.engine, replica.foreign) == (False, "vLLM", "")
    assert "ERROR     /health: no answer within 0.2 s" in report([replica])


async def test_differences_between_replicas() -> None:
    replicas = await seen(engine(), engine(card(length=8192), version="0.31.0"), web_page())
    text = report(replicas, ["dns+http://vllm:8000"])
    assert "m has different context lengths: 4096, 8192" in text
    assert "different engines: vLLM 0.31.0, vLLM 0.32.0" in text
    assert "dns+http://vllm:8000  not looked at" in text


async def test_names_cannot_control_the_terminal() -> None:
    [replica] = await seen(engine(card("\x1b[2Jm"), version="\x1b]0;x\x07"))
    assert "\x1b" not in report([replica])
