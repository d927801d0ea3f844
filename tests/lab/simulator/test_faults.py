"""Clients that disconnect, idle connections, and every injected fault."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from dataclasses import replace

import aiohttp
import pytest

from llmproxy.lab.simulator.replica import Replica, ReplicaOptions, serve_replica
from llmproxy.lab.simulator.server.faults import FaultKind
from tests.lab.simulator.conftest import CHAT, CHAT_PATH, ENDLESS, FAST, chunks_of, post, until
from tests.lab.simulator.engine.invariants import check_engine

STREAM = CHAT | {"stream": True}
ENGINE_ERROR = (
    b'data: {"error": {"message": "EngineCore encountered an issue. See stack trace (above) for the root cause.", '
    b'"type": "InternalServerError", "param": null, "code": 500}}\n\n'
)


async def gauge(client: aiohttp.ClientSession, name: str) -> float:
    async with client.get("/metrics/", params={"name[]": f"vllm:{name}"}) as answer:
        return float((await answer.text()).split()[-1])


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_seat_and_the_gauge_says_so(
    replica: Replica, client: aiohttp.ClientSession, stream: bool
) -> None:
    leaving = asyncio.create_task(client.post(CHAT_PATH, json=ENDLESS | {"stream": stream}))
    await until(lambda: replica.engine.counters.generation > 10)
    assert await gauge(client, "num_requests_running") == 1.0
    if leaving.done():
        leaving.result().close()
    leaving.cancel()
    await asyncio.wait([leaving])
    await replica.idle()
    assert not replica.engine.busy
    while await gauge(client, "num_requests_running"):  # noqa: ASYNC110 - it comes with the next step
        await asyncio.sleep(0.001)
    assert await gauge(client, "kv_cache_usage_perc") == 0.0
    check_engine(replica.engine)


async def test_lying_gauges_show_an_idle_engine_until_cleared(replica: Replica, client: aiohttp.ClientSession) -> None:
    async with client.post(CHAT_PATH, json=ENDLESS | {"stream": True}) as running:
        await until(lambda: replica.engine.counters.generation > 10)
        replica.faults.set(FaultKind.LIES)
        assert await gauge(client, "num_requests_running") == 0.0
        assert await gauge(client, "kv_cache_usage_perc") == 0.0
        replica.faults.clear()
        assert await gauge(client, "num_requests_running") == 1.0
        running.close()


async def test_a_queued_client_that_leaves_is_forgotten(client: aiohttp.ClientSession) -> None:
    async with Replica(replace(FAST, max_num_seqs=1)) as replica:
        async with (
            client.post(replica.url + CHAT_PATH, json=ENDLESS) as running,
            client.post(replica.url + CHAT_PATH, json=ENDLESS) as queued,
        ):
            await until(lambda: replica.engine.gauges().waiting == 1)
            queued.close()
            await until(lambda: replica.engine.gauges().waiting == 0)
            assert replica.engine.gauges().running == 1
            running.close()
        await replica.idle()


async def test_idle_connections_are_closed_after_the_keep_alive_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("llmproxy.lab.simulator.replica.KEEP_ALIVE_S", 0.02)
    async with Replica(FAST) as replica:
        used, used_writer = await asyncio.open_connection(replica.host, replica.port)
        fresh, fresh_writer = await asyncio.open_connection(replica.host, replica.port)
        used_writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await used.read()).startswith(b"HTTP/1.1 200 OK\r\n"), "the read ends with the connection"
        assert not fresh.at_eof(), "a connection that never asked is kept"
        for writer in (used_writer, fresh_writer):
            writer.close()


async def test_draining_lets_streams_end_and_refuses_new_work(replica: Replica, client: aiohttp.ClientSession) -> None:
    async with client.post(CHAT_PATH, json=STREAM | {"max_tokens": 200}) as running:
        await running.content.readany()
        replica.faults.set(FaultKind.DRAINING_500)
        status, answer = await post(client, CHAT_PATH, STREAM)
        assert (status, answer["error"]["message"]) == (500, "cannot schedule new futures after shutdown")
        async with client.get("/health") as health:
            assert health.status == 200
        assert (await running.content.read()).endswith(b"data: [DONE]\n\n")


async def test_hang_refuses_connections_and_never_ends_streams(client: aiohttp.ClientSession) -> None:
    async with Replica(FAST) as replica:
        idle, idle_writer = await asyncio.open_connection(replica.host, replica.port)
        async with client.post(replica.url + CHAT_PATH, json=ENDLESS) as running:
            await running.content.readany()
            await until(lambda: bool(replica.engine.counters.generation))
            replica.faults.set("hang")
            with pytest.raises(aiohttp.ClientConnectorError):
                await client.get(f"{replica.url}/health")
            assert await idle.read() == b"", "a connection without a request is closed"
            while not running.content.is_eof() and running.content.total_bytes:
                try:
                    await asyncio.wait_for(running.content.readany(), 0.05)
                except TimeoutError:
                    break
            generated = replica.engine.counters.generation
            await asyncio.sleep(0.05)
            assert replica.engine.counters.generation == generated
            assert not running.content.at_eof(), "no byte and no end"
            with pytest.raises(RuntimeError, match="restart"):
                replica.faults.clear()
        idle_writer.close()
        await replica.restart()
        assert (await post(client, replica.url + CHAT_PATH, CHAT))[0] == 200


async def test_an_error_as_the_first_event_of_a_stream(replica: Replica, client: aiohttp.ClientSession) -> None:
    replica.faults.set("stream_error", times=2)
    async with client.post(CHAT_PATH, json=STREAM) as answer:
        assert answer.status == 200
        assert await chunks_of(answer) == [ENGINE_ERROR, b"data: [DONE]\n\n"]
    assert (await post(client, CHAT_PATH, CHAT))[0] == 500
    assert (await post(client, CHAT_PATH, CHAT))[0] == 200


async def test_a_dead_engine_ends_streams_with_an_error_and_fails_the_rest(
    replica: Replica, client: aiohttp.ClientSession
) -> None:
    whole = asyncio.create_task(post(client, CHAT_PATH, ENDLESS | {"stream": False}))
    async with client.post(CHAT_PATH, json=ENDLESS) as running:
        await until(lambda: replica.engine.gauges().running == 2)
        replica.faults.set("engine_dead")
        assert (await chunks_of(running))[-2:] == [ENGINE_ERROR, b"data: [DONE]\n\n"]
    status, answer = await whole
    assert (status, answer["error"]["type"]) == (500, "InternalServerError")
    assert (await post(client, CHAT_PATH, STREAM))[0] == 500
    async with client.get("/health") as health:
        assert health.status == 200
    await replica.idle()
    assert not replica.engine.busy


async def test_frozen_gauges_lie_and_everything_goes_on_afterwards(
    replica: Replica, client: aiohttp.ClientSession
) -> None:
    async with client.post(CHAT_PATH, json=ENDLESS) as running:
        await running.content.readany()
        replica.faults.set("frozen")
        async with client.post(CHAT_PATH, json=STREAM) as queued:
            assert queued.status == 200
            await until(lambda: replica.engine.gauges().waiting == 1)
            assert await gauge(client, "num_requests_waiting") == 0.0
            assert await gauge(client, "num_requests_running") == 1.0
            async with client.get("/health") as health:
                assert health.status == 200
            replica.faults.clear()
            assert (await queued.content.read()).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("body", [CHAT, STREAM])
@pytest.mark.parametrize("after_bytes", [0, 10, 300])
async def test_a_reset_comes_after_exactly_so_many_bytes(
    replica: Replica, body: dict[str, object], after_bytes: int
) -> None:
    replica.faults.set("reset", after_bytes=after_bytes)
    reader, writer = await asyncio.open_connection(replica.host, replica.port)
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
    writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + data)
    received = bytearray()
    with pytest.raises(ConnectionResetError):
        await read_into(received, reader)
    _, _, payload = bytes(received).partition(b"\r\n\r\n")
    if body is STREAM:
        payload = dechunked(payload)
    assert received.startswith(b"HTTP/1.1 200 OK")
    assert len(payload) == after_bytes
    writer.close()
    await replica.idle()
    assert not replica.engine.busy


async def read_into(received: bytearray, reader: asyncio.StreamReader) -> None:
    while True:
        received += await reader.readexactly(1)


def dechunked(data: bytes) -> bytes:
    """The content of HTTP chunks, the last of which may be missing."""
    content = b""
    while data:
        size, _, rest = data.partition(b"\r\n")
        content += rest[: int(size, 16)]
        data = rest[int(size, 16) + 2 :]
    return content


async def test_refuse_cuts_everything_until_a_restart_on_the_same_port(
    replica: Replica, client: aiohttp.ClientSession
) -> None:
    port = replica.port
    async with client.post(CHAT_PATH, json=ENDLESS) as running:
        await running.content.readany()
        replica.faults.set("refuse")
        with pytest.raises(aiohttp.ClientPayloadError):
            await running.content.read()
    with pytest.raises(aiohttp.ClientConnectorError):
        await client.get("/health")
    await replica.restart()
    assert replica.port == port
    assert replica.faults.kind is None
    assert replica.engine.counters.prompt == 0, "a restarted replica is cold"
    assert (await post(client, CHAT_PATH, CHAT))[0] == 200


async def test_faults_can_be_switched_over_http(replica: Replica, client: aiohttp.ClientSession) -> None:
    url = "/sim/fault"
    assert await post(client, url, {"kind": "busy_503", "times": 5}) == (200, {"kind": "busy_503"})
    await until(lambda: replica.faults.kind is FaultKind.BUSY_503)
    assert (await post(client, CHAT_PATH, CHAT))[0] == 503
    assert await post(client, url, {"kind": None}) == (200, {"kind": None})
    assert (await post(client, CHAT_PATH, CHAT))[0] == 200
    status, answer = await post(client, url, {"kind": "tired"})
    assert status == 400
    assert "known: busy_503, draining_500, hang" in answer["error"]["message"]
    with pytest.raises(ValueError, match="tired"):
        replica.faults.set("tired")


@pytest.mark.parametrize(("kind", "status"), [("unauthorized", 401), ("rate_limited", 429)])
async def test_refusals_hit_generation_alone(
    replica: Replica, client: aiohttp.ClientSession, kind: str, status: int
) -> None:
    replica.faults.set(kind)
    assert (await post(client, CHAT_PATH, CHAT))[0] == status
    for path in ("/health", "/metrics", "/v1/models"):
        async with client.get(path) as answer:
            assert answer.status == 200


async def test_error_rate_hits_its_share(replica: Replica, client: aiohttp.ClientSession) -> None:
    assert (await post(client, "/sim/fault", {"kind": "error_rate", "share": 0.25}))[0] == 200
    await until(lambda: replica.faults.kind is FaultKind.ERROR_RATE)
    statuses = [(await post(client, CHAT_PATH, CHAT))[0] for _ in range(12)]
    assert (statuses.count(500), statuses.count(200)) == (3, 9)
    assert (await post(client, "/sim/fault", {"kind": "error_rate", "share": 2}))[0] == 400


async def test_slow_fault_multiplies_each_step_until_cleared(replica: Replica, client: aiohttp.ClientSession) -> None:
    url = "/sim/fault"
    pacer = replica._service.pacer
    fast = pacer.speed
    assert (await post(client, url, {"kind": "slow", "factor": 4}))[0] == 200
    await until(lambda: pacer.speed == fast / 4)
    assert (await post(client, CHAT_PATH, CHAT))[0] == 200
    assert (await post(client, url, {"kind": None}))[0] == 200
    assert pacer.speed == fast
    assert (await post(client, url, {"kind": "slow", "factor": -1}))[0] == 400
    with pytest.raises(ValueError, match="factor"):
        replica.faults.set("slow", factor=0)


async def serving(options: ReplicaOptions, printed: pytest.CaptureFixture[str]) -> tuple[asyncio.Task[None], str]:
    task = asyncio.create_task(serve_replica(options, "127.0.0.1", 0))
    line = ""
    while not line:
        await asyncio.sleep(0.001)
        line = printed.readouterr().out
    assert line.startswith("simulated vLLM replica of base on http://127.0.0.1:")
    return task, line.split()[-1]


async def refusing(port: int) -> None:
    """Wait until nobody listens on a port."""
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            return
        writer.close()


async def test_a_served_replica_stops_at_once_on_sigterm(
    client: aiohttp.ClientSession, capsys: pytest.CaptureFixture[str]
) -> None:
    task, url = await serving(FAST, capsys)
    async with client.post(f"{url}/v1/chat/completions", json=ENDLESS) as running:
        await running.content.readany()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(aiohttp.ClientPayloadError):
            await running.content.read()
        await task


async def test_a_served_replica_can_hang_on_sigterm_as_vllm_does(
    client: aiohttp.ClientSession, capsys: pytest.CaptureFixture[str]
) -> None:
    task, url = await serving(replace(FAST, shutdown="hang"), capsys)
    async with client.post(f"{url}/v1/chat/completions", json=ENDLESS) as running:
        await running.content.readany()
        os.kill(os.getpid(), signal.SIGTERM)
        await refusing(int(url.rpartition(":")[2]))
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.02)
        assert not task.done()
        assert not running.content.at_eof()
    await task


async def test_a_served_replica_can_abort_its_streams_on_sigterm(
    client: aiohttp.ClientSession, capsys: pytest.CaptureFixture[str]
) -> None:
    task, url = await serving(replace(FAST, shutdown="abort"), capsys)
    async with client.post(f"{url}/v1/chat/completions", json=ENDLESS) as running:
        await running.content.readany()
        os.kill(os.getpid(), signal.SIGTERM)
        *_, last, done = await chunks_of(running)
    await task
    assert b'"finish_reason":"abort"' in last
    assert done == b"data: [DONE]\n\n"


async def test_cancelling_stops_a_served_replica(capsys: pytest.CaptureFixture[str]) -> None:
    task, _ = await serving(FAST, capsys)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_replica_that_refuses_connections_keeps_its_port() -> None:
    """Its clients must not reach another process there."""
    async with Replica(FAST) as replica:
        replica.faults.set(FaultKind.REFUSE)
        await until(lambda: not is_open(replica.port))
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((replica.host, replica.port))
        await replica.restart()
        assert is_open(replica.port)


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
