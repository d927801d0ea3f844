"""A small fleet of real processes on loopback: simulated replicas and the proxy before them, and its log to read.

Shared by the benchmarks that need a whole system. Every process started here is ended here, by its id.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

READY_S = 30.0


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(slots=True)
class Process:
    """One child; `log` holds what it wrote to stderr."""

    child: asyncio.subprocess.Process
    log: Path

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it and return its exit code; one that does not end within ten seconds is killed."""
        if self.child.returncode is None:
            self.child.send_signal(number)
        try:
            return await asyncio.wait_for(self.child.wait(), 10.0)
        except TimeoutError:
            self.child.kill()
            return await self.child.wait()


@dataclass(slots=True)
class Fleet:
    """Where everything listens. `replicas` and `proxy` may be stopped and started again by their owner."""

    url: str
    replica_urls: list[str]
    replicas: list[Process]
    proxy: Process
    replica_flags: Sequence[Sequence[str]]
    folder: Path
    _starts: int = field(default=0)

    def name(self, index: int) -> str:
        """The name of a replica in the proxy's logs and pages."""
        return self.replica_urls[index].removeprefix("http://")

    async def restart_replica(self, index: int) -> None:
        """Start replica `index` anew on its old port, with a cold cache."""
        self._starts += 1
        port = self.replica_urls[index].rpartition(":")[2]
        log = self.folder / f"replica-{index}-again-{self._starts}.log"
        self.replicas[index] = await start(["replica", "--port", port, *self.replica_flags[index]], log)

    def events(self, name: str) -> list[dict[str, Any]]:
        """The proxy's log lines of one kind so far; a line that is still being written is not one yet."""
        lines = self.proxy.log.read_text(errors="replace").splitlines(keepends=True)
        entries = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]
        return [entry for entry in entries if entry.get("event") == name]

    def exits(self) -> list[dict[str, Any]]:
        """The proxy's request lines so far, in order of exit."""
        return self.events("request")


@asynccontextmanager
async def fleet(
    replica_flags: Sequence[Sequence[str]],
    proxy_flags: Sequence[str] = (),
    *,
    metrics: str | None = None,
    tree: Path | None = None,
) -> AsyncIterator[Fleet]:
    """Start a simulated replica for each of `replica_flags` and a proxy that logs JSON, and wait until it is ready.

    `metrics` is the URL of its metrics, None for the port of clients. `tree` is the checkout of the proxy.
    """
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llmproxy-bench-")))
        children: list[Process] = []
        urls = []
        for index, flags in enumerate(replica_flags):
            port = str(free_port())
            process = await start(["replica", "--port", port, *flags], folder / f"replica-{index}.log")
            children.append(process)
            urls.append(f"http://127.0.0.1:{port}")
        url = f"http://127.0.0.1:{free_port()}"
        argv = ["serve", "--host", "127.0.0.1", "--port", url.rpartition(":")[2], "--log-format", "json"]
        # What an earlier fleet taught is not to count here.
        argv += ["--state-file", "none", *proxy_flags]
        proxy = await start([*argv, *urls], folder / "proxy.log", tree=tree)
        running = Fleet(url, urls, children, proxy, replica_flags, folder)
        try:
            await ready(metrics or url, proxy)
            yield running
        finally:
            for process in [running.proxy, *running.replicas]:
                await process.stop()


async def start(arguments: Sequence[str], log: Path, *, own_group: bool = False, tree: Path | None = None) -> Process:
    """Start one `llmproxy` command whose output goes to `log`; it is the caller's to stop. One with a group of its own
    does not hear the Ctrl-C that is meant for the caller. `tree` is the checkout whose program it is; this one if None.
    """
    # Without the first, Python would look into the working directory before.
    env = None if tree is None else {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(tree)}
    with log.open("wb") as output:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "llmproxy", *arguments),
            stdout=output,
            stderr=output,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=own_group,
            env=env,
        )
    return Process(child, log)


def is_whole(body: bytes, *, stream: bool) -> bool:
    """Whether the answer of a simulated replica came to its end and has no error in it."""
    return body.endswith(b"data: [DONE]\n\n" if stream else b"}") and b'"error"' not in body


def value_of(metrics: str, series: str) -> float | None:
    """The value of one series, named with its labels, on a page of metrics; None where it is not there."""
    found = re.search(rf"^{re.escape(series)} (\S+)$", metrics, re.MULTILINE)
    return None if found is None else float(found[1])


def total_of(metrics: str, name: str) -> float:
    """The sum of all series of one name that has labels."""
    lines = (line for line in metrics.splitlines() if line.startswith(name + "{"))
    return sum(float(line.rpartition(" ")[2]) for line in lines)


async def ready(url: str, proxy: Process) -> None:
    """Wait until the proxy at `url` finds all its backends up. Raises RuntimeError when its process ends instead."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(READY_S):
        while True:
            try:
                async with session.get(url + "/metrics") as answer:
                    up = (await answer.text()).count("llmproxy_backend_available{") and answer.status == 200
                    states = [line for line in (await answer.text()).splitlines() if "backend_available{" in line]
                    if up and all(line.endswith(" 1.0") for line in states):
                        return
            except aiohttp.ClientError:
                if proxy.child.returncode is not None:
                    raise RuntimeError(proxy.log.read_text()) from None
            await asyncio.sleep(0.1)
