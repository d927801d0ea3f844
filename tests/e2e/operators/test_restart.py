"""How the process itself ends, and how it is replaced: signals, exit codes, and sockets that outlive it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
from aiohttp import ClientSession

from llmproxy.config import hash_of
from llmproxy.lab.simulator.replica import Replica
from tests.e2e.processes import START_MAX_S, Served, asked, endless, served
from tests.e2e.proxies import CHAT, FAST, STREAM, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300, method="thread")]


@pytest.fixture
async def backend() -> AsyncIterator[Replica]:
    async with Replica(FAST) as replica:
        yield replica


@pytest.fixture
async def http() -> AsyncIterator[ClientSession]:
    async with ClientSession() as session:
        yield session


async def test_start_is_logged_with_settings(backend: Replica, tmp_path: Path) -> None:
    path = str(tmp_path / "state.json")
    opened = ("--host", "0.0.0.0", "--backend-api-key", "k")
    arguments = ("--port", "0", "--fairness", "slo", "--state-file", path, *opened, backend.url)
    async with served(tmp_path / "log", *arguments) as process:
        listening = await process.event("listening")
        assert (listening["workers"], listening["state_file"]) == (1, path)
        [warning] = process.events("setting_without_effect")
        assert str(warning["setting"]).startswith("scheduling.fairness: slo has no objective to measure")
        [warning] = process.events("no_key_needed")
        assert str(warning["hint"]).startswith("backends get their API key for every client")
        process.process.send_signal(signal.SIGHUP)
        assert "--config" in str((await process.event("nothing_to_reload"))["hint"])


# --- signals before it serves -----------------------------------------------------------------------------------------


@asynccontextmanager
async def starting(tmp_path: Path, text: str) -> AsyncIterator[tuple[Served, Callable[[], None]]]:
    """Starts a process that reads its configuration to the end only after the returned function has written `text`."""
    file, replacement = tmp_path / "config.yaml", tmp_path / "complete.yaml"
    os.mkfifo(file)
    replacement.write_text(text)
    async with served(tmp_path / "log", "--port", "0", "--config", str(file)) as process:
        writer = None
        async with asyncio.timeout(START_MAX_S):
            while writer is None:
                # Refused until the other end is read.
                with suppress(OSError):
                    writer = os.fdopen(os.open(file, os.O_WRONLY | os.O_NONBLOCK), "w")
                await asyncio.sleep(0.01)
        with writer as pipe:

            def complete() -> None:
                # Whoever reads it again reads the same, from a common file.
                replacement.replace(file)
                pipe.write(text)
                pipe.close()

            yield process, complete


@pytest.mark.parametrize(
    ("number", "event", "cause"),
    [
        (signal.SIGHUP, "reloaded", "signal"),
        # The file that is read is another one before its end has come.
        (None, "reloaded", "file"),
        (signal.SIGUSR2, "replaced", None),
    ],
)
async def test_an_early_order_is_carried_out(
    backend: Replica, tmp_path: Path, number: signal.Signals | None, event: str, cause: str | None
) -> None:
    reload = "signal" if cause == "signal" else "watch"
    async with starting(tmp_path, f"backends: [{{url: '{backend.url}'}}]\nreload: {reload}\n") as (process, complete):
        if number is not None:
            process.process.send_signal(number)
        complete()
        assert (await process.event(event)).get("cause") == cause
        if event == "reloaded":
            process.process.terminate()
        assert await process.ended() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_an_early_signal_to_stop_is_no_failure(number: signal.Signals, tmp_path: Path) -> None:
    async with starting(tmp_path, "") as (process, _):
        process.process.send_signal(number)
        assert await process.ended() == 0
        assert not process.events("listening")


async def test_a_signal_to_stop_while_workers_start_is_no_failure(tmp_path: Path) -> None:
    async with served(tmp_path / "log", "--port", "0", "--workers", "2", "http://127.0.0.1:9") as process:
        await until(process.has_children, START_MAX_S)
        process.process.send_signal(signal.SIGTERM)
        assert await process.ended() == 0
        assert not process.events("listening")
        assert not process.events("worker_lost")


# --- the first signal, and the second ---------------------------------------------------------------------------------


async def test_the_first_signal_waits_for_streams(backend: Replica, http: ClientSession, tmp_path: Path) -> None:
    async with served(tmp_path / "log", "--port", "0", backend.url) as process:
        url = await process.url()
        async with endless(http, url, max_tokens=500) as stream:
            process.process.send_signal(signal.SIGTERM)
            await process.event("draining")
            assert await asked(http, url) == (503, "close")
            async with http.get(url + "/ready") as ready, http.get(url + "/health") as health:
                assert (ready.status, health.status) == (503, 200)
            assert (await stream.content.read()).endswith(b"data: [DONE]\n\n")
        assert await process.ended() == 0
        assert sorted(ended["outcome"] for ended in process.events("request")) == ["completed", "draining"]
        assert process.events("stopped")[0]["all_requests_finished"]


@pytest.mark.parametrize(
    ("number", "code", "workers"), [(signal.SIGTERM, 143, "1"), (signal.SIGINT, 130, "1"), (signal.SIGTERM, 143, "2")]
)
async def test_the_second_signal_ends_the_process_at_once(
    number: signal.Signals, code: int, workers: str, backend: Replica, http: ClientSession, tmp_path: Path
) -> None:
    async with served(tmp_path / "log", "--port", "0", "--workers", workers, backend.url) as process:
        url = await process.url()
        async with endless(http, url) as stream:
            process.process.send_signal(number)
            await process.event("draining")
            process.process.send_signal(number)
            with pytest.raises(aiohttp.ClientError):
                await stream.content.read()
        assert await process.ended() == code
        [ended] = process.events("request")
        assert (ended["outcome"], ended["status"], ended["error"][:4]) == ("draining", 200, "cut:")
        await until(lambda: not backend.engine.busy)


async def test_a_drain_delay_keeps_serving_while_not_ready(
    backend: Replica, http: ClientSession, tmp_path: Path
) -> None:
    async with served(tmp_path / "log", "--port", "0", "--drain-delay-s", "600", backend.url) as process:
        url = await process.url()
        assert await asked(http, url) == (200, "")
        process.process.send_signal(signal.SIGTERM)
        await process.event("leaving")
        assert await asked(http, url) == (200, "close"), "served as before, on a connection to be left"
        async with http.post(url + CHAT, json=STREAM) as stream, http.get(url + "/ready") as ready:
            assert (await stream.read()).endswith(b"data: [DONE]\n\n")
            assert (stream.status, stream.headers["connection"]) == (200, "close")
            assert (ready.status, (await ready.json())["reason"]) == (503, "draining")
        process.process.send_signal(signal.SIGTERM)
        assert await process.ended() == 0, "nobody was cut"


async def test_a_second_signal_cuts_nobody_where_workers_have_no_requests(backend: Replica, tmp_path: Path) -> None:
    arguments = ("--port", "0", "--workers", "2", "--drain-delay-s", "600", backend.url)
    async with served(tmp_path / "log", *arguments) as process:
        await process.url()
        process.process.send_signal(signal.SIGTERM)
        await process.event("leaving")
        process.process.send_signal(signal.SIGTERM)
        assert await process.ended() == 0
        [stopped] = process.events("stopped")
        assert (stopped["all_requests_finished"], stopped["cut"]) == (True, 0)


# --- a successor ------------------------------------------------------------------------------------------------------


async def test_a_successor_takes_over_without_an_error(backend: Replica, http: ClientSession, tmp_path: Path) -> None:
    name = f"@llmproxy-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name[1:])
        manager.setblocking(False)
        async with served(tmp_path / "log", "--port", "0", backend.url, NOTIFY_SOCKET=name) as process:
            url = await process.url()
            assert await asked(http, url) == (200, "")
            async with ClientSession() as other, endless(other, url) as stream:
                process.process.send_signal(signal.SIGUSR2)
                replaced = await process.event("replaced")
                assert await asked(http, url) == (200, "close"), "the kept connection still leads to the old process"
                async with http.get(url + "/ready") as ready:
                    assert ready.status == 200
                assert await asked(http, url) == (200, ""), "a new connection leads to the successor"
                assert process.process.returncode is None, "the old process still has the stream"
                stream.close()
            assert await process.ended() == 0
            assert await asked(http, url) == (200, "")
            states = [manager.recv(100) for _ in range(3)]
            assert states == [b"READY=1", b"READY=1", b"MAINPID=%d" % replaced["by_pid"]]
            # The successor is as good a predecessor, and ends as every process does.
            os.kill(replaced["by_pid"], signal.SIGUSR2)
            third = (await process.event("replaced", 2))["by_pid"]
            assert await asked(http, url) == (200, "close")
            assert await asked(http, url) == (200, "")
            os.kill(third, signal.SIGTERM)
            await process.event("stopped", 3)
            assert all(stopped["all_requests_finished"] for stopped in process.events("stopped"))


async def test_a_successor_knows_which_backends_were_drained(
    backend: Replica, http: ClientSession, tmp_path: Path
) -> None:
    key = {"authorization": "Bearer for-admins"}
    file = tmp_path / "config.yaml"
    file.write_text(
        f"backends: [{{url: '{backend.url}', name: kept}}, {{url: 'http://127.0.0.1:1', name: drained}}]\n"
        f"admin_key: '{hash_of('for-admins')}'\n"
    )
    async with served(tmp_path / "log", "--port", "0", "--config", str(file)) as process:
        url = await process.url()
        async with http.post(url + "/admin/backends/drained/drain", headers=key) as answer:
            assert answer.status == 200
        process_id = process.process.pid
        for number in (1, 2):
            os.kill(process_id, signal.SIGUSR2)
            process_id = (await process.event("replaced", number))["by_pid"]
            async with ClientSession() as session, session.get(url + "/admin/backends", headers=key) as page:
                states = {one["backend"]: one["state"] for one in (await page.json())["backends"]}
                assert states == {"kept": "up", "drained": "drained"}


async def test_a_successor_that_fails_changes_nothing(backend: Replica, http: ClientSession, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"backends: [{{url: '{backend.url}'}}]\n")
    secret = ("--backend-api-key", "backend-secret")
    async with served(tmp_path / "log", "--port", "0", "--config", str(file), *secret) as process:
        url = await process.url()
        file.write_text("prot: 1\n")
        process.process.send_signal(signal.SIGUSR2)
        failed = await process.event("restart_failed")
        assert "exit code 2" in failed["why"]
        assert await asked(http, url) == (200, ""), "served, and not even asked to close the connection"
        file.write_text(f"backends: [{{url: '{backend.url}'}}]\n")
        process.process.send_signal(signal.SIGUSR2)
        await process.event("replaced")
        assert await asked(http, url) == (200, "close")
        assert await process.ended() == 0
    assert "backend-secret" not in (tmp_path / "log").read_text()


async def test_a_signal_to_stop_ends_a_successor_that_does_not_serve_yet(
    backend: Replica, http: ClientSession, tmp_path: Path
) -> None:
    async with served(tmp_path / "log", "--port", "0", backend.url) as process:
        url = await process.url()
        async with endless(http, url) as stream:
            process.process.send_signal(signal.SIGUSR2)
            # Long before it has read its own program.
            await until(process.has_children)
            process.process.send_signal(signal.SIGTERM)
            await process.event("draining")
            await until(lambda: not process.has_children())
            assert process.process.returncode is None, "the drain goes on"
            stream.close()
        assert await process.ended() == 0
        assert not process.events("replaced")
        assert len(process.events("listening")) == 1


async def test_being_led_out_has_an_end(backend: Replica, http: ClientSession, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    one_seat = f"backends: [{{url: '{backend.url}', max_in_flight: 1}}]\nscheduling: {{look_ahead: 0}}\n"
    file.write_text(f"{one_seat}drain_timeout_s: 0.3\n")
    async with served(tmp_path / "log", "--port", "0", "--config", str(file)) as process:
        url = await process.url()
        async with endless(http, url) as stream:
            waiting = asyncio.create_task(asked(http, url))
            await process.queued(http, url, 1)
            process.process.send_signal(signal.SIGUSR2)
            assert await waiting == (503, "close")
            with pytest.raises(aiohttp.ClientError):
                await stream.content.read()
        assert await process.ended() == 0
        assert [stopped["all_requests_finished"] for stopped in process.events("stopped")] == [False]


# --- sockets of a service manager -------------------------------------------------------------------------------------


async def test_clients_wait_in_a_socket_that_the_service_manager_holds(
    backend: Replica, http: ClientSession, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        async with served(tmp_path / "1", backend.url, held=held.fileno()) as first:
            assert await first.url() == url, "the socket says where it is, whatever the port is set to"
            assert await asked(http, url) == (200, "")
            async with ClientSession() as other, endless(other, url) as stream:
                first.process.send_signal(signal.SIGTERM)
                await first.event("draining")
                assert await asked(http, url) == (200, "close"), "who is connected is served"
                waiting = asyncio.create_task(asked(http, url))
                stream.close()
            assert await first.ended() == 0
        assert not waiting.done()
        async with served(tmp_path / "2", backend.url, held=held.fileno()):
            assert await waiting == (200, "")


# --- a log that is not read -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_a_stalled_reader_of_the_log_holds_up_nothing(
    backend: Replica, http: ClientSession, tmp_path: Path, workers: str
) -> None:
    log = tmp_path / "log"
    os.mkfifo(log)
    reads = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with log.open("wb", buffering=0) as full, socket.create_server(("127.0.0.1", 0)) as held:
            full.write(b"x" * 65_536)
            url = f"http://127.0.0.1:{held.getsockname()[1]}"
            async with served(log, "--workers", workers, backend.url, held=held.fileno()) as process:
                async with asyncio.timeout(START_MAX_S):
                    assert (await asked(http, url))[0] == 200
                process.process.send_signal(signal.SIGTERM)
                assert await process.ended() == 0
    finally:
        os.close(reads)
