"""`llmproxy serve` as a process of its own, and its successors."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import ClientSession

from tests.e2e.proxies import CHAT, ENDLESS, HELLO, until

QUICK = ("--host", "127.0.0.1", "--log-format", "json", "--poll-interval-s", "0.05", "--poll-page-interval-s", "0.05")

# Each test starts up to three processes, whose imports take long on a machine that is busy with other tests.
START_MAX_S = 90.0
QUEUED = "llmproxy_queued_requests{"
AS_SYSTEMD = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.execve(sys.argv[2], sys.argv[2:], os.environ | {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"})
"""


class Served:
    """A `llmproxy serve` and its successors: they share one process group and one log."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self._log = log

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = self._log.read_text().splitlines(keepends=True)
        entries = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]
        return [entry for entry in entries if entry["event"] == name]

    async def event(self, name: str, number: int = 1) -> dict[str, Any]:
        """Event `name` number `number`, as soon as it happens."""
        try:
            await until(lambda: len(self.events(name)) >= number, START_MAX_S)
        except TimeoutError:
            raise AssertionError(f"no {name}: {self._log.read_text()[-2000:]}") from None
        return self.events(name)[number - 1]

    async def url(self) -> str:
        """Where it listens, once its backends are known."""
        url = str((await self.event("listening"))["url"])
        await self.event("backend_up")
        return url

    def has_children(self) -> bool:
        """Whether it has started a successor that is still there."""
        return bool(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text())

    async def queued(self, session: ClientSession, url: str, requests: int) -> None:
        """Wait until so many requests wait."""
        seen = 0.0
        while seen < requests:
            async with session.get(url + "/metrics") as page:
                lines = [line for line in (await page.text()).splitlines() if line.startswith(QUEUED)]
                seen = sum(float(line.rpartition(" ")[2]) for line in lines)

    async def ended(self) -> int:
        return await asyncio.wait_for(self.process.wait(), START_MAX_S)


@asynccontextmanager
async def served(
    log: Path, *arguments: str, before: Sequence[str] = (), held: int | None = None, **variables: str
) -> AsyncIterator[Served]:
    """Run `llmproxy serve`; `before` are words put before the command, which has to `exec` it.

    `held` is a descriptor of a listening socket, which it gets as from systemd.
    """
    if held is not None:
        # As the manager does it: descriptor 3, and a variable with the very process that is to have it.
        before = (sys.executable, "-c", AS_SYSTEMD, str(held))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LLMPROXY_")}
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *before, sys.executable, "-m", "llmproxy", "serve", *QUICK, *arguments,
            stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            pass_fds=() if held is None else (held,), env=environment | {"LLMPROXY_STATE_FILE": "none"} | variables,
        )  # fmt: skip
    try:
        yield Served(process, log)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


@asynccontextmanager
async def endless(session: ClientSession, url: str, **fields: Any) -> AsyncIterator[aiohttp.ClientResponse]:
    """A long stream whose first bytes were read."""
    async with session.post(url + CHAT, json=ENDLESS | fields) as stream:
        await stream.content.readany()
        yield stream


async def asked(session: ClientSession, url: str, **fields: Any) -> tuple[int, str]:
    """Returns the status of a small request and the `Connection` field of its answer."""
    async with session.post(url + CHAT, json=HELLO | fields) as answer:
        await answer.read()
        return answer.status, answer.headers.get("connection", "")
