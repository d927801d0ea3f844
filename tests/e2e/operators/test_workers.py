"""Relay workers as processes: one queue for all, and only its own requests end when one of them dies."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from llmproxy.lab.simulator.replica import Replica
from tests.e2e.processes import START_MAX_S, Served, served
from tests.e2e.proxies import CHAT, ENDLESS, FAST, HELLO, samples, until
from tests.e2e.scripted import STREAM_END, STREAM_HEAD, answering, chunk, scripted, whole
from tests.upstream.raw_server import Peer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300, method="thread")]

MANY = 24
"""So many connections that, given the kernel's hash, each of two workers gets one (but once in eight million)."""


def workers(process: Served) -> list[int]:
    """The workers' processes, oldest first."""
    pid = process.process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def metric(url: str, name: str, **labels: str) -> float:
    """The sum of the samples of one metric that have these labels."""
    async with aiohttp.ClientSession() as session, session.get(url + "/metrics") as page:
        return sum(one.value for one in samples(await page.text(), name, labels))


async def reached(url: str, name: str, value: float, **labels: str) -> None:
    """Wait until a metric has this value."""
    seen = -1.0
    try:
        async with asyncio.timeout(START_MAX_S):
            while seen != value:
                seen = await metric(url, name, **labels)
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"{name} is {seen:g}, not {value:g}") from None


async def alone(url: str, body: Any = HELLO) -> int:
    """The status of one request on a connection of its own, which may lead to any worker."""
    async with aiohttp.ClientSession() as session, session.post(url + CHAT, json=body) as answer:
        await answer.read()
        return answer.status


class Stream:
    """A stream on a connection of its own. `broken` is set when it has ended, which it should not."""

    def __init__(self, session: aiohttp.ClientSession, answer: aiohttp.ClientResponse) -> None:
        self.broken = False
        self._session = session
        self._answer = answer
        self._reading = asyncio.create_task(self._read())
        self.read_bytes = 0

    async def _read(self) -> None:
        try:
            while data := await self._answer.content.readany():
                self.read_bytes += len(data)
            self.broken = True
        except aiohttp.ClientError:
            self.broken = True

    async def close(self) -> None:
        self._reading.cancel()
        self._answer.close()
        await self._session.close()
        await asyncio.gather(self._reading, return_exceptions=True)


@asynccontextmanager
async def streams(url: str, count: int) -> AsyncIterator[Sequence[Stream]]:
    """So many endless streams that have begun."""
    async with AsyncExitStack() as stack:
        opened: list[Stream] = []
        for _ in range(count):
            session = aiohttp.ClientSession()
            opened.append(Stream(session, await session.post(url + CHAT, json=ENDLESS)))
            stack.push_async_callback(opened[-1].close)
        await until(lambda: all(one.read_bytes for one in opened), START_MAX_S)
        yield opened


@pytest.fixture
async def backend() -> AsyncIterator[Replica]:
    # Slow enough that no endless stream ends within a test, on whatever machine.
    async with Replica(replace(FAST, speed=0.2)) as replica:
        yield replica


TWO = ("--port", "0", "--workers", "2")


async def test_all_workers_are_one_proxy(backend: Replica, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"backends: [{{url: '{backend.url}'}}]\n")
    async with served(tmp_path / "log", *TWO, "--config", str(file), "--reload", "signal") as process:
        url = await process.url()
        assert len(workers(process)) == 2
        async with streams(url, MANY):
            # Each is in the one count of the one scheduler, whichever worker has it and whichever is asked.
            await reached(url, "llmproxy_in_flight_requests", MANY)
        await reached(url, "llmproxy_in_flight_requests", 0)
        await reached(url, "llmproxy_requests_total", MANY, outcome="cancelled")
        assert Counter([await alone(url) for _ in range(MANY)]) == {200: MANY}
        await reached(url, "llmproxy_requests_total", MANY, outcome="completed")
        assert await metric(url, "llmproxy_attempts_total", verdict="served") == MANY
        await until(lambda: len(process.events("request")) == 2 * MANY)
        async with aiohttp.ClientSession() as http:
            async with http.get(url + "/v1/models") as page:
                assert [entry["id"] for entry in (await page.json())["data"]][:1] == ["base"]
            async with http.get(url + "/debug/queue") as page:
                assert (page.status, page.headers["cache-control"]) == (200, "no-store")
            async with http.get(url + "/debug/queue", headers={"x-forwarded-for": "10.0.0.1"}) as page:
                assert page.status == 404, "it is as if the client itself had asked"
            async with http.post(url + "/metrics") as page:
                assert (page.status, page.headers["allow"]) == (405, "GET, HEAD")
        # All of them learn an unknown name at once.
        assert await alone(url, HELLO | {"model": "other"}) == 404
        file.write_text(file.read_text() + "models: [{name: other, target: base}]\n")
        process.process.send_signal(signal.SIGHUP)
        await process.event("reloaded")
        assert Counter([await alone(url, HELLO | {"model": "other"}) for _ in range(MANY)]) == {200: MANY}
        process.process.send_signal(signal.SIGTERM)
        assert await process.ended() == 0
        assert process.events("stopped")[0]["all_requests_finished"]


async def test_a_worker_that_is_killed_takes_only_its_own_requests_along(backend: Replica, tmp_path: Path) -> None:
    async with served(tmp_path / "log", *TWO, backend.url) as process:
        url = await process.url()
        victim, witness = workers(process)
        async with streams(url, MANY) as opened:
            os.kill(victim, signal.SIGKILL)
            lost = await process.event("worker_lost")
            assert (lost["pid"], lost["exit_code"]) == (victim, -signal.SIGKILL)
            cut = lost["requests"]
            assert 0 < cut < MANY
            await until(lambda: sum(one.broken for one in opened) == cut)
            # The engine computes nothing for clients that are gone.
            await until(lambda: backend.in_flight == MANY - cut, START_MAX_S)
            await reached(url, "llmproxy_in_flight_requests", MANY - cut)
            await reached(url, "llmproxy_requests_total", cut, outcome="internal")
            assert await metric(url, "llmproxy_workers_lost_total") == 1
            others = [(one, one.read_bytes) for one in opened if not one.broken]
            await until(lambda: all(one.read_bytes > before for one, before in others), START_MAX_S)
            await until(lambda: len(workers(process)) == 2, START_MAX_S)
            assert witness in workers(process)
            # Clients on the socket of the dead one wait in it for the new one.
            assert Counter([await alone(url) for _ in range(MANY)]) == {200: MANY}
            assert not any(one.broken for one, _ in others)
        process.process.send_signal(signal.SIGTERM)
        assert await process.ended() == 0


async def test_a_drain_waits_for_the_streams_of_all_workers(backend: Replica, tmp_path: Path) -> None:
    async with served(tmp_path / "log", *TWO, "--drain-timeout-s", "200", backend.url) as process:
        url = await process.url()
        async with streams(url, MANY) as opened, aiohttp.ClientSession() as http:
            process.process.send_signal(signal.SIGTERM)
            await process.event("draining")
            async with asyncio.timeout(START_MAX_S):
                # Workers learn of it one by one, a moment later.
                while {await alone(url) for _ in range(MANY)} != {503}:
                    pass
            async with http.get(url + "/ready") as ready, http.get(url + "/health") as health:
                assert (ready.status, health.status) == (503, 200)
            read = [one.read_bytes for one in opened]
            await until(lambda: all(one.read_bytes > some for one, some in zip(opened, read, strict=True)), START_MAX_S)
            assert not any(one.broken for one in opened)
            assert not process.events("stopped")
        assert await process.ended() == 0
        assert process.events("stopped")[0]["all_requests_finished"]
        outcomes = Counter(ended["outcome"] for ended in process.events("request"))
        assert (outcomes["cancelled"], outcomes.keys() <= {"completed", "cancelled", "draining"}) == (MANY, True)


async def test_workers_cut_their_requests_and_end_without_a_scheduler(backend: Replica, tmp_path: Path) -> None:
    async with served(tmp_path / "log", *TWO, backend.url) as process:
        url = await process.url()
        left = workers(process)
        async with streams(url, MANY) as opened:
            process.process.send_signal(signal.SIGKILL)
            await until(lambda: all(one.broken for one in opened), START_MAX_S)
        await until(lambda: not any(alive(pid) for pid in left), START_MAX_S)
        assert len(process.events("scheduler_lost")) == 2
        await until(lambda: not backend.engine.busy)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def test_a_successor_with_workers_takes_over_without_an_error(backend: Replica, tmp_path: Path) -> None:
    async with served(tmp_path / "log", *TWO, backend.url) as process, aiohttp.ClientSession() as http:
        url = await process.url()
        async with http.post(url + CHAT, json=ENDLESS) as stream:
            await stream.content.readany()
            process.process.send_signal(signal.SIGUSR2)
            replaced = await process.event("replaced")
            assert Counter([await alone(url) for _ in range(MANY)]) == {200: MANY}
            assert process.process.returncode is None, "the old process still has the stream"
            await stream.content.readany()
            stream.close()
        assert await process.ended() == 0
        assert Counter([await alone(url) for _ in range(MANY)]) == {200: MANY}
        os.kill(replaced["by_pid"], signal.SIGTERM)
        await process.event("stopped", 2)
        assert all(stopped["all_requests_finished"] for stopped in process.events("stopped"))


async def test_a_stored_stream_is_in_flight_on_any_worker(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def ask(peer: Peer, _: bytes) -> None:
        await peer.send(STREAM_HEAD + chunk(b"data: {}\n\n"))
        await go_on.wait()
        await peer.send(STREAM_END)

    async with (
        scripted(answering(whole(b'{"id":"resp_1"}'))) as replica,
        served(tmp_path / "log", *TWO, replica.url) as process,
    ):
        replica.polls[b"/v1/responses/resp_1"] = ask
        url = await process.url()
        async with aiohttp.ClientSession() as http:
            async with http.post(url + "/v1/responses", json={"model": "base", "input": "a"}) as made:
                assert made.status == 200
            async with http.get(url + "/v1/responses/resp_1?stream=true") as stream:
                await stream.content.readany()
                await reached(url, "llmproxy_in_flight_requests", 1)
                process.process.send_signal(signal.SIGTERM)
                assert (await process.event("draining"))["requests"] == 1
                assert not process.events("stopped")
                go_on.set()
                await stream.content.read()
        assert await process.ended() == 0
        assert process.events("stopped")[0]["all_requests_finished"]


async def test_a_taken_port_is_not_shared(backend: Replica, tmp_path: Path) -> None:
    async with served(tmp_path / "1", *TWO, backend.url) as process:
        url = await process.url()
        port = url.rpartition(":")[2]
        async with served(tmp_path / "2", "--port", port, "--workers", "2", backend.url) as second:
            assert await second.ended() == 1
            assert (await second.event("cannot_listen"))["host"] == "127.0.0.1"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="a system without IPv6")
@pytest.mark.parametrize("count", ["1", "2"])
async def test_both_address_families_are_served_and_logged(count: str, backend: Replica, tmp_path: Path) -> None:
    arguments = ("--host", "::", "--port", "0", "--workers", count, backend.url)
    async with served(tmp_path / "log", *arguments) as process, aiohttp.ClientSession() as http:
        port = (await process.url()).rpartition(":")[2]
        assert (await process.event("listening"))["addresses"] == [f"[::]:{port}", f"0.0.0.0:{port}"]
        for host in ("127.0.0.1", "[::1]"):
            assert await alone(f"http://{host}:{port}") == 200
            async with http.get(f"http://{host}:{port}/debug/queue") as page:
                assert page.status == 200, "both are this machine"


async def test_an_error_of_all_workers_at_the_start_is_logged_once(backend: Replica, tmp_path: Path) -> None:
    tls = ("--tls-cert", str(tmp_path / "missing.pem"))
    async with served(tmp_path / "log", *TWO, *tls, backend.url) as process:
        assert await process.ended() == 2
        [error] = process.events("cannot_start")
        assert "missing.pem" in error["problem"]


async def test_workers_share_a_socket_that_the_service_manager_holds(backend: Replica, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        async with served(tmp_path / "log", "--workers", "2", backend.url, held=held.fileno()) as process:
            assert await process.url() == url
            async with streams(url, 4) as opened:
                await reached(url, "llmproxy_in_flight_requests", 4)
                process.process.send_signal(signal.SIGTERM)
                await process.event("draining")
                read = [one.read_bytes for one in opened]
                await until(lambda: all(one.read_bytes > some for one, some in zip(opened, read, strict=True)))
            assert await process.ended() == 0
            assert process.events("stopped")[0]["all_requests_finished"]
