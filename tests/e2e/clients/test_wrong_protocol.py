"""Clients that speak another protocol than the port: they and the log get a hint what to do."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import trustme
from structlog.testing import capture_logs

from llmproxy.gateway.http.wrong_protocol import HTTP2_PREFACE, wrong_protocol
from tests.e2e.proxies import serving
from tests.strictness.wire import connected

GREETING = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(505)
SETTINGS = b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x64"
HEADERS = b"\x00\x00\x03\x01\x05\x00\x00\x00\x01\x82\x84\x86"
ACKNOWLEDGED = b"\x00\x00\x00\x04\x01\x00\x00\x00\x00"


async def answered(url: str, *sent: bytes) -> bytes:
    async with connected(url) as wire:
        for piece in sent:
            wire.write(piece)
            await asyncio.sleep(0.01)
        return await wire.all()


def frames(data: bytes) -> list[tuple[int, int, int, bytes]]:
    """(Kind, flags, stream, payload) of each frame."""
    found = []
    while data:
        end = 9 + int.from_bytes(data[:3], "big")
        found.append((data[3], data[4], int.from_bytes(data[5:9], "big"), data[9:end]))
        data = data[end:]
    return found


def message_of(body: bytes) -> str:
    return str(json.loads(body)["error"]["message"])


async def test_a_client_that_expects_tls_gets_a_hint() -> None:
    async with serving() as proxy:
        with capture_logs() as logs:
            for _ in range(3):
                head, _, body = (await answered(proxy.url, GREETING)).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 400 ")
                assert "begin with http://" in message_of(body)
    [line] = logs
    assert (line["event"], line["log_level"]) == ("wrong_protocol", "warning")
    assert "set tls.cert" in line["hint"]


async def test_http2_with_prior_knowledge_is_answered_in_http2() -> None:
    async with serving() as proxy:
        with capture_logs() as logs:
            # A client that sends more before it reads must get the answer too.
            got = await answered(proxy.url, HTTP2_PREFACE + SETTINGS + HEADERS, ACKNOWLEDGED)
    settings, head, data, goaway = frames(got)
    assert settings == (4, 0, 0, b"")
    assert head[:3] == (1, 4, 1)
    assert b"\x08\x03505" in head[3]
    assert data[:3] == (0, 1, 1)
    assert "speaks HTTP/1.1" in message_of(data[3])
    assert goaway == (7, 0, 0, b"\x00\x00\x00\x01\x00\x00\x00\x0d")
    assert [line["event"] for line in logs] == ["wrong_protocol"]


async def test_http2_that_has_asked_nothing_yet_is_answered_in_http1() -> None:
    async with serving() as proxy:
        got = await answered(proxy.url, HTTP2_PREFACE + SETTINGS)
    assert got.startswith(b"HTTP/1.1 505 ")


async def test_http2_gets_a_hint_in_any_pieces() -> None:
    async with serving() as proxy:
        for cut in (1, 3, 15):
            got = await answered(proxy.url, HTTP2_PREFACE[:cut], HTTP2_PREFACE[cut:])
            assert "began with HTTP/2" in message_of(got.partition(b"\r\n\r\n")[2])


@pytest.mark.parametrize(
    "broken",
    [
        b"PRINT / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /PRIVATE\x00 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nX-PRI\x01ORITY: 1\r\n\r\n",
    ],
)
async def test_a_broken_request_that_names_http2_gets_its_error(broken: bytes) -> None:
    async with serving() as proxy:
        head, _, body = (await answered(proxy.url, broken)).partition(b"\r\n\r\n")
    assert b" 400 " in head.partition(b"\r\n")[0]
    assert "This is no HTTP/1.1 request" in message_of(body)


def test_similar_bytes_may_be_a_request() -> None:
    for begun in (b"", b"\x16", b"PRI", b"PRI /v1/models HTTP/1.1\r\n", b"GET / HTTP/1.1\r\n", b"\r\n"):
        assert wrong_protocol(begun) is None


async def test_plain_http_at_a_port_of_tls_gets_a_hint(tmp_path: Path) -> None:
    made = trustme.CA().issue_cert("127.0.0.1")
    made.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "cert.pem"))
    async with serving(tls={"cert": str(tmp_path / "cert.pem")}) as proxy:
        with capture_logs() as logs:
            for method in (b"GET", b"POST", b"POST"):
                got = await answered(proxy.url, method + b" /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
                head, _, body = got.partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 400 ")
                assert "begin with https://" in message_of(body)
            # Garbage is none of it.
            assert await answered(proxy.url, b"\x00" * 64) != got
    assert [line["event"] for line in logs] == ["wrong_protocol"]
    assert "https://" in logs[0]["hint"]
