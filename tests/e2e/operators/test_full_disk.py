"""Logs that nobody reads and files that no disk takes: requests go on, and lost lines are counted."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from select import PIPE_BUF

import aiohttp
import pytest

from llmproxy.lab.simulator.replica import Replica
from tests.e2e.processes import asked, served
from tests.e2e.proxies import FAST, until

pytestmark = pytest.mark.slow

REQUESTS = 30
FULL = Path("/dev/full")
LIMIT_S = 90.0


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        yield opened


def url_of(listening: socket.socket) -> str:
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


async def count(session: aiohttp.ClientSession, url: str, name: str) -> float:
    async with session.get(f"{url}/metrics") as page:
        found = re.search(rf"^{name} (\S+)$", await page.text(), re.MULTILINE)
    return 0.0 if found is None else float(found[1])


async def ready(session: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        while True:
            async with session.get(f"{url}/ready") as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(0.01)


async def test_a_full_disk_costs_lines_that_are_counted_and_no_request(
    listening: socket.socket, tmp_path: Path
) -> None:
    url, decisions = url_of(listening), tmp_path / "decisions"
    async with (
        Replica(FAST) as replica,
        aiohttp.ClientSession() as session,
        served(FULL, "--backend", replica.url, "--decision-log", str(decisions), held=listening.fileno()) as process,
    ):
        await ready(session, url)
        size = decisions.stat().st_size
        resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, (size, size))
        assert {(await asked(session, url))[0] for _ in range(REQUESTS)} == {200}
        for name in ("llmproxy_log_lines_lost_total", "llmproxy_decision_log_lines_lost_total"):
            async with asyncio.timeout(LIMIT_S):
                while await count(session, url, name) < REQUESTS:
                    pass
        process.process.send_signal(signal.SIGTERM)
        assert await process.ended() == 0


async def test_a_log_that_nobody_reads_delays_no_request(listening: socket.socket, tmp_path: Path) -> None:
    url, pipe = url_of(listening), tmp_path / "pipe"
    os.mkfifo(pipe)
    # Without a reader, the process could not open the pipe.
    reads = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    async with (
        Replica(FAST) as replica,
        aiohttp.ClientSession() as session,
        served(pipe, "--backend", replica.url, held=listening.fileno()),
    ):
        await ready(session, url)
        with suppress(BlockingIOError):
            while True:
                os.write(reads, b"\n" * PIPE_BUF)
        assert {(await asked(session, url))[0] for _ in range(REQUESTS)} == {200}
        assert await count(session, url, "llmproxy_log_lines_lost_total") == 0
        text = b""

        def has_all() -> bool:
            nonlocal text
            with suppress(BlockingIOError):
                text += os.read(reads, 65_536)
            return text.count(b'"event":"request"') >= REQUESTS

        await until(has_all, LIMIT_S)
    os.close(reads)


async def test_the_last_records_are_written_at_sigterm(tmp_path: Path) -> None:
    async with (
        Replica(FAST) as replica,
        aiohttp.ClientSession() as session,
        served(tmp_path / "log", "--port", "0", "--backend", replica.url) as process,
    ):
        url = await process.url()
        answers = await asyncio.gather(*(asked(session, url) for _ in range(REQUESTS)))
        process.process.send_signal(signal.SIGTERM)
        assert {status for status, _ in answers} == {200}
        assert await process.ended() == 0
        assert len(process.events("request")) == REQUESTS
