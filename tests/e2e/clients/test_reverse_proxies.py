"""nginx and HAProxy in front, configured as docs/how-to/reverse-proxy.md says."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from llmproxy.config import Config, hash_of
from tests import ROOT
from tests.docs.pages import blocks
from tests.e2e.proxies import CHAT, FAST, HELLO, STREAM, ProxyUnderTest, serving
from tests.e2e.scripted import STREAM_END, STREAM_HEAD, chunk, serving_script
from tests.tools.export.beside import free_port
from tests.upstream.raw_server import Peer

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "how-to" / "reverse-proxy.md"
CLIENT = "127.0.0.5"
"""The address of the client. The reverse proxy has 127.0.0.1."""
KEYS: dict[str, Any] = {
    "admin_key": hash_of("for-admins"),
    "tenants": [{"name": name, "keys": [hash_of(name)]} for name in ("research", "batch")],
}
BATCH = {"authorization": "Bearer batch"}
FORGED = [
    {"x-forwarded-for": "127.0.0.1"},
    {"x-forwarded-for": "10.0.0.7, 127.0.0.1"},
    {"x-real-ip": "127.0.0.1", "forwarded": "for=127.0.0.1", "host": "localhost"},
    {"host": "127.0.0.1"},
]
WAIT_MAX_S = 60.0


def block(title: str) -> str:
    (found,) = (one.text for one in blocks(PAGE) if one.title == title)
    return found


def nginx(folder: Path, text: str) -> list[str]:
    # When root starts it, nginx serves as a user who may not enter the folder.
    user = "user root root;" if os.geteuid() == 0 else ""
    places = "".join(f"{kind}_temp_path {kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    head = f"daemon off; {user} pid nginx.pid; error_log stderr warn; events {{}}"
    (folder / "nginx.conf").write_text(f"{head}\nhttp {{ access_log off; {places}\n{text}\n}}\n")
    return ["-p", str(folder), "-e", "stderr", "-c", "nginx.conf"]


def haproxy(folder: Path, text: str) -> list[str]:
    (folder / "haproxy.cfg").write_text(text)
    return ["-db", "-f", str(folder / "haproxy.cfg")]


FRONTS: dict[str, tuple[str, str, Callable[[Path, str], list[str]]]] = {
    "nginx": ("llmproxy.conf", "listen 80;", nginx),
    "haproxy": ("haproxy.cfg", "bind :80", haproxy),
}
PLAIN = {
    "nginx": "server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://{to}; }} }}",
    "haproxy": (
        "defaults\n mode http\n timeout connect 5s\n timeout client 60s\n timeout server 60s\n"
        "listen llm\n bind 127.0.0.1:{port}\n server llmproxy {to}\n"
    ),
}
"""The shortest configuration: no field names the client."""


@pytest.fixture(params=list(FRONTS))
def front(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if shutil.which(name) is None and not Path(f"/usr/sbin/{name}").exists():
        pytest.skip(f"{name} is not installed")
    return name


@asynccontextmanager
async def before(front: str, proxy: ProxyUnderTest, folder: Path, text: str | None = None) -> AsyncIterator[str]:
    """The base URL of a reverse proxy before `proxy`, with the block of the page, or with `text`."""
    title, listens, launch = FRONTS[front]
    port, to = free_port(), "{}:{}".format(*proxy.address)
    if text is None:
        text = block(title)
        assert listens in text
        assert "127.0.0.1:8080" in text
        text = text.replace(listens, listens.replace(":80", "80").replace("80", f"127.0.0.1:{port}"))
        text = text.replace("127.0.0.1:8080", to)
    else:
        text = text.format(port=port, to=to)
    program = shutil.which(front) or f"/usr/sbin/{front}"
    process = await asyncio.create_subprocess_exec(
        program, *launch(folder, text), cwd=folder, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(WAIT_MAX_S), aiohttp.ClientSession() as session:
            while True:
                try:
                    async with session.get(f"http://127.0.0.1:{port}/health") as answer:
                        if answer.status == 200:
                            break
                except aiohttp.ClientError:
                    assert process.returncode is None, (await process.communicate())[1].decode()
                    await asyncio.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


@asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(local_addr=(CLIENT, 0))
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=WAIT_MAX_S)) as session:
        yield session


async def test_each_event_of_a_stream_arrives_before_the_next_one_is_sent(front: str, tmp_path: Path) -> None:
    read = asyncio.Event()
    event = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'

    async def one_by_one(peer: Peer, _: bytes) -> None:
        await peer.send(STREAM_HEAD)
        for _turn in range(3):
            await peer.send(chunk(event))
            # A proxy that buffers would wait here for ever.
            await read.wait()
            read.clear()
        await peer.send(chunk(b"data: [DONE]\n\n") + STREAM_END)

    async with (
        serving_script(one_by_one, clients={"trusted_proxies": "127.0.0.1"}) as (proxy, _),
        before(front, proxy, tmp_path) as url,
        client() as session,
        session.post(url + CHAT, json=STREAM) as answer,
    ):
        for _ in range(3):
            assert await answer.content.readuntil(b"\n\n") == event
            read.set()
        assert b"[DONE]" in await answer.read()


async def test_a_large_body_passes(front: str, tmp_path: Path) -> None:
    prompt = "word " * (3 << 20)
    body = json.dumps({"model": "base", "prompt": prompt, "max_tokens": 1}).encode()
    async with (
        serving(FAST) as proxy,
        before(front, proxy, tmp_path) as url,
        client() as session,
        session.post(f"{url}/tokenize", data=BytesIO(body), headers={"content-type": "application/json"}) as answer,
    ):
        assert answer.status == 200


async def test_limits_count_the_client_that_the_proxy_names(front: str, tmp_path: Path) -> None:
    limits = {"trusted_proxies": "127.0.0.1", "address_requests_per_s": 0.001, "address_connections_max": 1}
    async with serving(FAST, clients=limits) as proxy, before(front, proxy, tmp_path) as url, client() as session:
        statuses = []
        for forged in ({}, *FORGED):
            async with session.post(url + CHAT, json=HELLO, headers=forged) as answer:
                statuses.append(answer.status)
        assert statuses == [200, 429, 429, 429, 429], "another address in a field is no other client"
        async with aiohttp.ClientSession() as other, other.post(url + CHAT, json=HELLO) as answer:
            assert answer.status == 200, "the client at 127.0.0.1"


@pytest.mark.parametrize("trusted", ["none", "127.0.0.1", "loopback"])
async def test_a_key_gets_neither_anothers_band_nor_its_flow(front: str, tmp_path: Path, trusted: str) -> None:
    """Also not through a proxy whose clients look like processes of this machine."""
    asks = {"x-llm-d-inference-objective": "critical", "x-gateway-inference-fairness-id": "research"}
    config: dict[str, Any] = KEYS | {"clients": {"trusted_proxies": trusted}, "scheduling": {"flow": "tenant"}}
    for text in (None, PLAIN[front]):
        log = tmp_path / f"{text is None}.jsonl"
        async with (
            serving(FAST, **config, decision_log=str(log)) as proxy,
            before(front, proxy, tmp_path, text) as url,
            client() as session,
        ):
            for forged in ({}, *FORGED):
                async with session.post(url + CHAT, json=HELLO, headers=BATCH | asks | forged) as answer:
                    assert answer.status == 200
                    assert "x-llmproxy-backend" not in answer.headers
                assert "x-llm-d-inference-objective" not in proxy.sent().headers
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert {(line["band"], line["flow"]) for line in lines if line.get("tenant") == "batch"} == {
            ("default", "batch")
        }


async def test_pages_are_closed(front: str, tmp_path: Path) -> None:
    paths = ("/debug/live", "/debug/queue", "/admin/backends", "/scale", "/metrics")
    for text in (None, PLAIN[front]):
        for trusted in ("none", "127.0.0.1", "loopback"):
            config: dict[str, Any] = KEYS | {"clients": {"trusted_proxies": trusted}}
            async with (
                serving(FAST, **config) as proxy,
                before(front, proxy, tmp_path, text) as url,
                client() as session,
            ):
                for path in paths:
                    for forged in ({}, *FORGED):
                        async with session.get(url + path, headers=forged) as answer:
                            assert answer.status in (401, 404), (path, forged)
                    async with session.get(url + path, headers={"authorization": "Bearer for-admins"}) as answer:
                        assert answer.status == 200


def test_the_page_names_limits_that_are_in_force() -> None:
    assert f"client_max_body_size {Config().body_bytes_max >> 20}m;" in block("llmproxy.conf")
    assert f"below clients.idle_timeout_s ({Config().clients.idle_timeout_s:g} s)" in block("llmproxy.conf")
