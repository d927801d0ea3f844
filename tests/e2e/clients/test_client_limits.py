"""Clients that are slow, many or large: each limit of `clients` has a time or a number at which the proxy says no."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from llmproxy.config import ClientsConfig
from llmproxy.gateway.http.connection import ClientConnection, ClientServer
from llmproxy.gateway.listener import LocalFrontend
from llmproxy.lab.simulator.replica import Replica
from tests.e2e.processes import START_MAX_S, served
from tests.e2e.proxies import CHAT, ENDLESS, FAST, HELLO, ProxyUnderTest, raw_post, serving, until
from tests.e2e.scripted import answering, serving_script, whole
from tests.strictness.wire import connected

HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n".encode()


async def refusal(reader: asyncio.StreamReader) -> tuple[int, str]:
    """The status and the message of an answer that ends its connection."""
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in head.lower() or head.startswith(b"HTTP/1.0 ")
    assert b"\r\ncontent-length: %d" % len(body) in head.lower()
    error = json.loads(body)["error"]
    status = int(head.split(b" ")[1])
    assert error["code"] == status
    return status, error["message"]


@pytest.mark.parametrize("begun", [b"P", b"\r\nP", HEAD, HEAD + b"x-a: b"])
async def test_a_head_that_does_not_end(begun: bytes) -> None:
    async with serving(FAST, clients={"head_timeout_s": 0.05}) as proxy, proxy.wire(begun) as (reader, _):
        assert await refusal(reader) == (408, "The header fields did not end within 0.05 s (clients.head_timeout_s).")
        assert proxy.outcomes() == {"bad_request": 1}


async def test_a_head_that_begins_before_its_connection_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ClientConnection.connection_made

    def with_first_bytes(connection: ClientConnection, transport: asyncio.BaseTransport) -> None:
        made(connection, transport)
        connection.data_received(HEAD)

    monkeypatch.setattr(ClientConnection, "connection_made", with_first_bytes)
    async with serving(FAST, clients={"head_timeout_s": 0.05}) as proxy, proxy.wire(b"") as (reader, _):
        async with asyncio.timeout(5.0):
            assert (await refusal(reader))[0] == 408


@pytest.mark.parametrize(
    ("begun", "key", "message"),
    [
        (HEAD + b"x-a: ", "head_timeout_s", "The header fields did not end"),
        (HEAD + b"content-length: 100000\r\n\r\n", "body_timeout_s", "The request body took more than 0.2 s"),
    ],
)
async def test_dripping_request_has_no_more_time(begun: bytes, key: str, message: str) -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        for _ in range(100_000):
            writer.write(b" ")
            await asyncio.sleep(0.005)

    async with serving(FAST, clients={key: 0.2}) as proxy, proxy.wire(begun) as (reader, writer):
        dripping = asyncio.create_task(drip(writer))
        assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
        assert message.encode() in await reader.readuntil(b"}")
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)
    assert proxy.outcomes() == {"bad_request": 1}


async def test_a_head_in_pieces_is_a_head() -> None:
    async with serving(FAST, clients={"head_timeout_s": 30.0}) as proxy, connected(proxy.url) as wire:
        for _ in range(2):
            request = raw_post(HELLO)
            for start in range(0, len(request), 20):
                wire.write(request[start : start + 20])
                await asyncio.sleep(0)
            answer = await wire.answer()
            assert answer is not None
            assert answer[0] == 200


async def test_the_time_of_a_head_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ClientConnection] = []
    make = ClientServer.__call__

    def making(server: ClientServer) -> ClientConnection:
        made.append(make(server))
        return made[-1]

    monkeypatch.setattr(ClientServer, "__call__", making)
    async with serving(FAST) as proxy:
        request = raw_post(HELLO)
        async with proxy.wire(request[:40]) as (reader, writer):
            await until(lambda: made and made[-1]._head_timer is not None)
            writer.write(request[40:-10])
            await until(lambda: proxy.app.handler.open_requests)
            assert made[-1]._head_timer is None, "the body may take its own time"
            writer.write(request[-10:])
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")


async def test_an_idle_connection_is_closed_in_silence() -> None:
    async with serving(FAST, clients={"idle_timeout_s": 0.1, "head_timeout_s": 0.01}) as proxy:
        for nothing in (b"", b"\r\n"):
            async with proxy.wire(nothing) as (reader, _):
                assert await reader.read() == b""
        assert not proxy.outcomes()


async def test_answers_that_are_not_read_keep_no_connection() -> None:
    refused = raw_post(HELLO | {"model": "nobody"})
    async with serving(FAST, clients={"idle_timeout_s": 0.2}) as proxy, proxy.wire(b"") as (_, writer):
        connection = await the_connection(proxy)
        with socket.socket(fileno=os.dup(connection.transport.get_extra_info("socket").fileno())) as twin:
            # The kernel buffers as few unread bytes as possible.
            twin.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        writer.write(refused * 2000)
        await until(lambda: proxy.outcomes()["unknown_model"])
        await until(lambda: not connections(proxy))


async def test_an_unread_end_of_an_answer_keeps_no_connection() -> None:
    async with serving_script(answering(whole(b"x" * 60_000))) as (proxy, backend), proxy.wire(b"") as (_, writer):
        connection = await the_connection(proxy)
        asked = 0
        while not connection.transport.get_write_buffer_size():
            writer.write(raw_post(HELLO))
            asked += 1
            await until(lambda: len(backend.requests) == asked and not proxy.app.handler.open_requests)  # noqa: B023
        connection._limits = ClientsConfig(idle_timeout_s=0.05)
        connection.force_close()
        await until(lambda: not connections(proxy))


async def the_connection(proxy: ProxyUnderTest) -> Any:
    """Returns the proxy's side of the only connection."""
    await until(lambda: connections(proxy))
    assert isinstance(proxy.app.front, LocalFrontend)
    (connection,) = proxy.app.front.listener.server.connections
    return connection


async def test_a_head_that_is_too_large_before_its_end() -> None:
    begun = HEAD + b"".join(b"x-%d: %b\r\n" % (number, b"b" * 400) for number in range(6))
    async with serving(FAST, clients={"head_bytes_max": 2000}) as proxy, proxy.wire(begun) as (reader, _):
        assert (await refusal(reader))[0] == 431


async def test_many_fields_that_are_too_large_together() -> None:
    async with serving(FAST, clients={"head_bytes_max": 2000, "head_fields_max": 10}) as proxy:
        large = "".join(f"x-{i}: {'b' * 400}\r\n" for i in range(5))
        many = "".join(f"x-{i}: b\r\n" for i in range(10))
        for extra, reason in ((large, "clients.head_bytes_max"), (many, "too many header fields")):
            async with proxy.wire(raw_post(HELLO, extra=extra)) as (reader, _):
                status, message = await refusal(reader)
                assert (status, reason in message) == (431, True)
        async with proxy.wire(raw_post(HELLO)) as (reader, _):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("key", ["body_idle_timeout_s", "body_timeout_s"])
async def test_a_body_that_stops_arriving(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmproxy.gateway.http.connection.LINGER_S", 0.05)
    async with serving(FAST, clients={key: 0.05}) as proxy:
        async with proxy.wire(HEAD + b"content-length: 99\r\n\r\n{") as (reader, _):
            status, message = await refusal(reader)
            assert (status, f"clients.{key}" in message) == (408, True)
        assert proxy.outcomes() == {"bad_request": 1}


# --- bodies in sum ----------------------------------------------------------------------------------------------------

BODIES: dict[str, Any] = {"body_bytes_max": 60_000, "body_bytes_total_max": 100_000}


def filled(size: int) -> bytes:
    """A request with a body of so many bytes."""
    data = json.dumps(HELLO | {"user": ""}).encode()
    data = data[:-2] + b"x" * (size - len(data)) + data[-2:]
    return HEAD + b"content-length: %d\r\n\r\n" % size + data


def held(proxy: ProxyUnderTest) -> int:
    return proxy.app.handler.bodies.buffered_bytes


@pytest.mark.slow
async def test_the_largest_body_that_arrives_makes_room_and_small_ones_pass() -> None:
    large, other = filled(55_000), filled(50_000)
    async with (
        serving(FAST, **BODIES) as proxy,
        proxy.wire(large[:-5_000]) as (refused, _),
        proxy.wire(other[:-20_000]) as (reader, writer),
    ):
        await until(lambda: held(proxy) > 75_000)
        assert proxy.metric("llmproxy_buffered_body_bytes") == held(proxy)
        assert (await proxy.chat()).status == 200
        writer.write(other[-20_000:-5_000])
        status, message = await refusal(refused)
        assert (status, "body_bytes_total_max" in message) == (429, True)
        writer.write(other[-5_000:])
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        assert proxy.outcomes()["rejected_capacity"] == 1


async def test_a_large_announced_length_takes_no_room() -> None:
    idle = filled(60_000)[:500]
    whole_body = filled(60_000)
    async with serving(FAST, **BODIES) as proxy, proxy.wire(idle), proxy.wire(idle), proxy.wire(idle), proxy.wire(idle):
        await until(lambda: proxy.app.handler.open_requests == 4)
        async with proxy.wire(whole_body) as (reader, _):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        assert proxy.outcomes() == {"completed": 1}


async def test_sent_bodies_are_counted_and_small_ones_keep_room() -> None:
    long = {"user": "x" * 55_000}
    async with serving(FAST, **BODIES) as proxy, proxy.stream(ENDLESS | long) as running:
        await running.content.readany()
        assert 55_000 < held(proxy) < 56_000
        large = await proxy.chat(HELLO | long)
        assert (large.status, large.json["error"]["type"]) == (429, "RateLimitError")
        assert large.headers["retry-after"] == "1"
        assert (await proxy.chat(HELLO | {"user": "x" * 30_000})).status == 200
        running.close()
        await until(lambda: not held(proxy))
        assert (await proxy.chat(HELLO | long)).status == 200


async def leaves(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def goes_silent(_: asyncio.StreamWriter) -> None:
    """Sends nothing more."""


async def breaks_its_framing(writer: asyncio.StreamWriter) -> None:
    writer.write(b"garbage\r\n")


async def sends_too_much(writer: asyncio.StreamWriter) -> None:
    writer.write(b"%x\r\n" % 70_000 + b"x" * 70_000)


async def is_no_json(writer: asyncio.StreamWriter) -> None:
    writer.write(b"0\r\n\r\n")


@pytest.mark.parametrize("ends", [leaves, goes_silent, breaks_its_framing, sends_too_much, is_no_json])
async def test_a_body_that_ends_in_any_way_is_held_no_more(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmproxy.gateway.http.connection.LINGER_S", 0.05)
    begun = HEAD + b"transfer-encoding: chunked\r\n\r\n3e8\r\n" + b"x" * 1_000 + b"\r\n"
    limits = BODIES | ({"clients": {"body_idle_timeout_s": 0.2}} if ends is goes_silent else {})
    async with serving(FAST, **limits) as proxy, proxy.wire(begun) as (_, writer):
        await until(lambda: held(proxy) == 1_000)
        await ends(writer)
        await until(lambda: not proxy.app.handler.open_requests)
        assert held(proxy) == 0


async def test_reload_changes_the_body_budget(tmp_path: Path) -> None:
    async with serving(FAST, file=tmp_path / "config.json", **BODIES) as proxy:
        (tmp_path / "config.json").write_text(json.dumps({**proxy.config_data, "body_bytes_total_max": 200_000}))
        await until(lambda: proxy.app.handler.bodies.bytes_max == 200_000)


# --- requests and connections -----------------------------------------------------------------------------------------


async def test_more_requests_than_an_address_may_send() -> None:
    async with serving(FAST, clients={"address_requests_per_s": 0.001}) as proxy:
        assert (await proxy.chat(headers={"x-forwarded-for": "10.0.0.1"})).status == 200
        refused = await proxy.chat(headers={"x-forwarded-for": "10.0.0.2"})
        assert (refused.status, refused.json["error"]["type"]) == (429, "RateLimitError")
        assert int(refused.headers["retry-after"]) == 1000
        assert (await proxy.get("/nothing")).status == 429
        for page in ("/health", "/ready", "/metrics", "/v1/models"):
            assert (await proxy.get(page)).status == 200
        assert proxy.outcomes() == {"completed": 1, "rate_limited": 2}


@pytest.mark.parametrize(("key", "status"), [("connections_max", 503), ("address_connections_max", 429)])
async def test_more_connections_than_may_be_open(key: str, status: int) -> None:
    limits: dict[str, Any] = {key: 2}
    async with serving(FAST, clients=limits) as proxy, proxy.wire(b"") as first, proxy.wire(b"") as second:
        await until(lambda: connections(proxy) == 2)
        async with proxy.wire(b"") as (reader, _):
            got, message = await refusal(reader)
            assert (got, f"clients.{key}" in message) == (status, True)
        first[1].close()
        await until(lambda: connections(proxy) == 1)
        async with proxy.wire(raw_post(HELLO)) as (reader, _):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        second[1].close()
        await until(lambda: connections(proxy) == 0)


def connections(proxy: ProxyUnderTest) -> int:
    return proxy.app.clients.open


# --- descriptors ------------------------------------------------------------------------------------------------------

WITH_FILES = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
os.execv(sys.argv[3], sys.argv[3:])
"""


@pytest.mark.slow
@pytest.mark.timeout(300, method="thread")
@pytest.mark.parametrize(
    ("workers", "flags", "expected"),
    [(1, (), ("info", "default", 65_536)), (2, ("--clients-connections-max", "900"), ("warning", "configured", 900))],
)
async def test_clients_leave_enough_descriptors_for_the_backends(
    workers: int, flags: Sequence[str], expected: tuple[str, str, int], tmp_path: Path
) -> None:
    soft, hard, allowed = 48, 96, 32
    before = (sys.executable, "-c", WITH_FILES, str(soft), str(hard))
    async with Replica(FAST) as one, Replica(FAST) as two, AsyncExitStack() as stack:
        arguments = ("--port", "0", "--workers", str(workers), *flags, one.url, two.url)
        process = await stack.enter_async_context(served(tmp_path / "log", *arguments, before=before))
        url = await process.url()
        await process.event("backend_up", 2)
        assert (await process.event("listening"))["open_files"] == hard
        limited = await process.event("connections_limited")
        assert (limited["connections_max"], limited["open_files"]) == (allowed * workers, hard)
        level, word, wanted = expected
        assert (limited["level"], limited[word], len({"default", "configured"} & limited.keys())) == (level, wanted, 1)
        port = int(url.rpartition(":")[2])
        wires = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * hard * workers)]
        for _, writer in wires:
            stack.callback(writer.transport.abort)
        first = {asyncio.create_task(reader.readline()): writer for reader, writer in wires}
        # A refused client learns it at once. The kernel chooses a worker by a hash, so that each gets enough of them.
        await until(lambda: sum(one.done() for one in first) == len(wires) - allowed * workers, START_MAX_S)
        assert {one.result()[9:12] for one in first if one.done()} == {b"503"}
        inside = {one: writer for one, writer in first.items() if not one.done()}
        for writer in inside.values():
            writer.write(raw_post(HELLO))
        assert {head[9:12] for head in await asyncio.gather(*inside)} == {b"200"}
        assert {end["outcome"] for end in process.events("request")} == {"completed", "rejected_capacity"}
        assert not process.events("backend_ejected")
        assert not process.events("backend_down")
