"""A client sees the same with and without workers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from llmproxy.config import hash_of
from llmproxy.lab.simulator.replica import Replica
from tests.e2e.processes import START_MAX_S, served
from tests.e2e.proxies import FAST, HELLO
from tests.strictness.wire import connected

pytestmark = pytest.mark.slow

# --- the same with and without workers --------------------------------------------------------------------------------

HEAD_MAX, FIELDS_MAX = 4000, 20
BOTH = f"""
clients: {{head_bytes_max: {HEAD_MAX}, head_fields_max: {FIELDS_MAX}, body_idle_timeout_s: 0.3}}
admin_key: {hash_of("boss")}
tenants: [{{name: one, keys: ["{hash_of("mine")}"]}}]
"""
BOSS, MINE = b"authorization: Bearer boss\r\n", b"authorization: Bearer mine\r\n"
PATHS = (
    "/health", "/ready", "/version", "/v1/models", "/v1/models/base", "/v1/models/%62ase", "/v1/models/x%20y",
    "/v1/models/%0d%0aX:%20y", "/metrics", "/admin/backends", "/admin/nothing", "/debug/nothing", "/debug", "/nothing",
    "/", "/ping", "/tokenizer_info", "//health", "/health/", "/health;a", "/health?x=%ff", "/v1/messages/nothing",
    "/v1/responses/resp_1", "/v1/chat/completions",
)  # fmt: skip


def said(first: bytes, fields: bytes = b"host: localhost\r\n", body: bytes = b"") -> bytes:
    return first + b"\r\n" + fields + b"\r\n" + body


def of_length(size: int, fields: bytes = b"") -> bytes:
    return b"host: localhost\r\n" + fields + b"content-length: %d\r\n" % size


def one_chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


CHUNKS = b"host: localhost\r\ntransfer-encoding: chunked\r\n"
JSON = b"content-type: application/json\r\n"
HOST = b"host: localhost\r\n"
FORMS: dict[str, Callable[[bytes], bytes]] = {
    "GET": lambda path: said(b"GET " + path + b" HTTP/1.1", HOST + MINE),
    "as the boss": lambda path: said(b"GET " + path + b" HTTP/1.1", HOST + BOSS),
    "without a key": lambda path: said(b"GET " + path + b" HTTP/1.1"),
    "HEAD": lambda path: said(b"HEAD " + path + b" HTTP/1.1", HOST + MINE),
    "OPTIONS": lambda path: said(b"OPTIONS " + path + b" HTTP/1.1"),
    "DELETE": lambda path: said(b"DELETE " + path + b" HTTP/1.1", HOST + BOSS),
    "POST without a body": lambda path: said(b"POST " + path + b" HTTP/1.1", HOST + MINE),
    "HTTP/1.0 without a host": lambda path: said(b"GET " + path + b" HTTP/1.0", MINE),
    "HTTP/1.0, kept": lambda path: said(b"GET " + path + b" HTTP/1.0", MINE + b"connection: keep-alive\r\n"),
    "Connection: close": lambda path: said(b"GET " + path + b" HTTP/1.1", HOST + MINE + b"connection: close\r\n"),
    "absolute": lambda path: said(b"GET http://elsewhere" + path + b" HTTP/1.1", HOST + MINE),
    "an id": lambda path: said(b"GET " + path + b" HTTP/1.1", HOST + b"x-request-id: mine-7\r\n"),
    "a body": lambda path: said(b"GET " + path + b" HTTP/1.1", of_length(17_000, MINE), b"x" * 17_000),
    "a body in chunks": lambda path: said(b"GET " + path + b" HTTP/1.1", CHUNKS + MINE, one_chunk(b"x" * 17_000)),
}
"""Requests of every path of `PATHS`."""

LOAD, UNLOAD = b"POST /v1/load_lora_adapter HTTP/1.1", b"POST /v1/unload_lora_adapter HTTP/1.1"
NEW = json.dumps({"lora_name": "new", "lora_path": "/adapters/new"}).encode()
REQUESTS: dict[str, bytes] = {
    f"{name} {path}": form(path.encode()) for name, form in FORMS.items() for path in PATHS
} | {
    "as many fields as there may be": said(b"GET /health HTTP/1.1", HOST + b"a: b\r\n" * (FIELDS_MAX - 1)),
    "one field too many": said(b"GET /health HTTP/1.1", HOST + b"a: b\r\n" * FIELDS_MAX),
    "the largest head": said(b"GET /health HTTP/1.1", HOST + b"x: " + b"v" * (HEAD_MAX - 7 - 13 - 1) + b"\r\n"),
    "a head too large by a byte": said(b"GET /health HTTP/1.1", HOST + b"x: " + b"v" * (HEAD_MAX - 7 - 13) + b"\r\n"),
    "the longest target": said(b"GET /v1/models/" + b"m" * (HEAD_MAX - 11 - 13) + b" HTTP/1.1", HOST),
    "a target too long": said(b"GET /v1/models/" + b"m" * (HEAD_MAX - 11 - 13 + 1) + b" HTTP/1.1", HOST),
    "no UTF-8 in a field": said(b"GET /health HTTP/1.1", HOST + b"x: \xe9\r\n"),
    "no UTF-8 in a target": said("GET /v1/models/\u00e9 HTTP/1.1".encode(), HOST),
    "a fragment": said(b"GET /health#x HTTP/1.1"),
    "models, as Anthropic's": said(b"GET /v1/models HTTP/1.1", HOST + MINE + b"anthropic-version: 2023-06-01\r\n"),
    "a WebSocket": said(b"GET /v1/responses HTTP/1.1", HOST + b"connection: upgrade\r\nupgrade: websocket\r\n"),
    "an upgrade": said(b"GET /health HTTP/1.1", HOST + b"connection: upgrade\r\nupgrade: websocket\r\n"),
    "Expect and a body, of a page": said(b"GET /health HTTP/1.1", of_length(2, b"expect: 100-continue\r\n"), b"{}"),
    "another expectation": said(b"GET /health HTTP/1.1", HOST + b"expect: 200-ok\r\n"),
    "two hosts": said(b"GET /health HTTP/1.1", HOST + HOST),
    "no host": said(b"GET /health HTTP/1.1", b""),
    "CONNECT": said(b"CONNECT /health HTTP/1.1"),
    "an unknown method": said(b"SEARCH /health HTTP/1.1"),
    "a compressed body": said(b"GET /health HTTP/1.1", of_length(3, b"content-encoding: gzip\r\n"), b"abc"),
    "from elsewhere": said(b"GET /debug/queue HTTP/1.1", HOST + b"x-forwarded-for: 9.9.9.9\r\n"),
    "of another host": said(b"GET /debug/queue HTTP/1.1", b"host: elsewhere\r\n"),
    "of another origin": said(b"GET /debug/queue HTTP/1.1", HOST + b"origin: http://elsewhere\r\n"),
    "the queue": said(b"GET /debug/queue?request=nobody HTTP/1.1"),
    "the queue, of HTTP/1.0": said(b"GET /debug/queue?request=nobody HTTP/1.0", b""),
    "the adapters": said(b"GET /debug/adapters HTTP/1.1"),
    "an explanation": said(b"GET /debug/explain?request=nobody HTTP/1.1"),
    "a limit that is none": said(b"GET /debug/explain?limit=x HTTP/1.1"),
    "POST of a page for people": said(b"POST /debug/queue HTTP/1.1", of_length(2, BOSS), b"{}"),
    "a drain": said(b"POST /admin/backends/b0/drain HTTP/1.1", HOST + BOSS),
    "the end of a drain": said(b"POST /admin/backends/b0/undrain HTTP/1.1", HOST + BOSS),
    "a drain with a body": said(b"POST /admin/backends/nobody/drain HTTP/1.1", of_length(3, BOSS), b"abc"),
    "a drain without the key": said(b"POST /admin/backends/b0/drain HTTP/1.1", of_length(3), b"abc"),
    "a reload by GET": said(b"GET /admin/reload HTTP/1.1", HOST + BOSS),
    "an adapter": said(LOAD, of_length(len(NEW), BOSS + JSON), NEW),
    "an adapter in chunks": said(UNLOAD, CHUNKS + BOSS + JSON, one_chunk(NEW)),
    "an adapter that is expected": said(LOAD, of_length(len(NEW), BOSS + JSON + b"expect: 100-continue\r\n"), NEW),
    "an adapter, as many fields as there may be": said(
        LOAD, of_length(len(NEW), BOSS + JSON) + b"a: b\r\n" * (FIELDS_MAX - 4), NEW
    ),
    "an adapter, and no key": said(LOAD, of_length(17_000, JSON), b"x" * 17_000),
    "an adapter, no key, and the body does not come": said(LOAD, of_length(9, JSON)),
    "an adapter, no key, expected": said(LOAD, of_length(9, JSON + b"expect: 100-continue\r\n")),
    "an adapter that is large": said(LOAD, of_length(17_000, BOSS + JSON), b"x" * 17_000),
    "an adapter that is large, in chunks": said(LOAD, CHUNKS + BOSS + JSON, one_chunk(b"x" * 17_000)),
    "an adapter whose body does not come": said(LOAD, of_length(9, BOSS + JSON), b"{"),
    "an adapter whose chunks break": said(LOAD, CHUNKS + BOSS + JSON, b"zz\r\n"),
    "an adapter of another type": said(LOAD, of_length(17_000, BOSS), b"x" * 17_000),
    "an adapter by GET": said(LOAD.replace(b"POST", b"GET"), of_length(2, BOSS), b"{}"),
    "an adapter of nothing": said(LOAD, of_length(0, BOSS + JSON)),
    "an adapter that is no JSON": said(LOAD, of_length(3, BOSS + JSON), b"abc"),
    "a chat": said(
        b"POST /v1/chat/completions HTTP/1.1",
        of_length(len(json.dumps(HELLO)), MINE + JSON + b"x-request-id: mine-8\r\n"),
        json.dumps(HELLO).encode(),
    ),
    "a chat without a key": said(b"POST /v1/chat/completions HTTP/1.1", of_length(2, JSON), b"{}"),
    "no chat": said(b"POST /v1/chat/completions HTTP/1.1", of_length(3, MINE + JSON), b"abc"),
    "no message": said(b"POST /v1/messages HTTP/1.1", of_length(3, MINE + JSON), b"abc"),
    "a chat with nobody": said(b"POST /v1/chat/completions HTTP/1.1", of_length(13, MINE + JSON), b'{"model":"x"}'),
}
LAST = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
OF_THE_MOMENT = (b"/metrics", b"/admin/backends")
"""Paths of pages whose numbers are of the moment, and their lengths with them."""
_MOMENT = rb"(?mi)^(date|x-llmproxy-queue-ms): .*\r$|^x-request-id: [0-9a-f]{32}\r$|(?<=\"created\":)\d+|(?<=\"created_at\":)\"[^\"]+|modelperm-\w+|http://127[0-9.:]+"
_NUMBERS = rb"(?msi)^content-length: \d+\r$|(?<=\"since_s\": )[0-9.]+|^# HELP .*?\n(?=HTTP/|\Z)"


async def answered(url: str, sent: bytes) -> bytes:
    """Returns all bytes that answer `sent` and one more request, without ids, dates and ports."""
    async with asyncio.timeout(START_MAX_S), connected(url) as wire:
        wire.write(sent)
        got = re.sub(_MOMENT, b"?", await wire.all_of(LAST))
    return re.sub(_NUMBERS, b"?", got) if any(path in sent for path in OF_THE_MOMENT) else got


@pytest.mark.parametrize("admin", ["", "admin: {port: 0}\n"], ids=["one port", "an admin port"])
async def test_a_client_sees_the_same_from_proxy_and_workers(admin: str, tmp_path: Path) -> None:
    """Each row is asked of a proxy without workers and of one with two; all that comes back is compared."""
    async with AsyncExitStack() as stack:
        urls = []
        for count in "12":
            replica = await stack.enter_async_context(Replica(FAST))
            file = tmp_path / f"{count}.yaml"
            file.write_text(BOTH + admin + f"backends: [{{name: b0, url: '{replica.url}'}}]\n")
            arguments = ("--port", "0", "--config", str(file), "--reload", "signal", "--workers", count)
            process = await stack.enter_async_context(served(tmp_path / count, *arguments))
            urls.append(await process.url())
        differ = {}
        for name, sent in REQUESTS.items():
            if admin and not name.startswith("as the boss"):
                continue
            alone, forwarded = [await answered(url, sent) for url in urls]
            assert alone.startswith(b"HTTP/1."), f"{name}: no answer"
            if alone != forwarded:
                differ[name] = alone, forwarded
        assert not differ, "\n".join(f"{name}:\n  {a!r}\n  {b!r}" for name, (a, b) in differ.items())
