"""A small fleet of real processes on loopback: simulated replicas, the proxy in front of them, and its pages and log.

All benchmarks of whole systems use it. Every process that is started here is ended here, by its process id.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from inspect import isawaitable
from pathlib import Path
from typing import Any

import aiohttp

from llmproxy.config.value_types import hash_of

READY_S = 60.0
_PR_SET_PDEATHSIG = 1
UP_S = 60.0
"""Longest wait for a metric to change."""
_ADMIN_KEY = "for-drains"
WITH_ADMIN = {"admin_key": hash_of(_ADMIN_KEY), "admin": {"public_metrics": True}}
"""Settings of a fleet whose backends are drained."""


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def free_url() -> str:
    return f"http://127.0.0.1:{free_port()}"


def port_in(url: str) -> str:
    return url.rpartition(":")[2]


@dataclass(slots=True)
class Process:
    """A child process. `log` has its standard output and standard error."""

    child: asyncio.subprocess.Process
    log: Path

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End the process and return its exit code. A process that has not ended after ten seconds is killed."""
        if self.child.returncode is None:
            self.child.send_signal(number)
        try:
            return await asyncio.wait_for(self.child.wait(), 10.0)
        except TimeoutError:
            self.child.kill()
            return await self.child.wait()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


async def start(arguments: Sequence[str], log: Path, *, tree: Path | None = None) -> Process:
    """Start an `llmproxy` command from the checkout `tree` (this one if None). The caller has to stop it.

    The process has a session of its own, so that Ctrl-C reaches the caller alone. On Linux, it is killed when the
    caller dies.
    """
    # Without PYTHONSAFEPATH, Python would look into the working directory before PYTHONPATH.
    env = None if tree is None else {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(tree)}
    with log.open("wb") as output:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "llmproxy", *arguments),
            stdout=output,
            stderr=output,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            env=env,
        )
    return Process(child, log)


async def start_replica(url: str, flags: Sequence[str], log: Path) -> Process:
    """Start a simulated replica at `url`. Returns before the replica is ready."""
    return await start(["replica", "--port", port_in(url), *flags], log)


@dataclass(slots=True)
class Fleet:
    """The processes and where they listen. A benchmark may stop and start them."""

    url: str
    replica_urls: list[str]
    replica_flags: Sequence[Sequence[str]]
    folder: Path
    session: aiohttp.ClientSession
    """For clients."""
    control: aiohttp.ClientSession
    """For pages and faults, with a new connection each time: a POST would be lost if an idle connection closed."""
    settings: Mapping[str, Any]
    replicas: list[Process] = field(default_factory=list)
    proxies: list[Process] = field(default_factory=list)
    """The current process of the proxy is the last."""
    _starts: int = 0

    # --- processes ----------------------------------------------------------------------------------------------------

    @property
    def proxy(self) -> Process:
        return self.proxies[-1]

    def name(self, index: int) -> str:
        """The name of a replica in the proxy's logs and pages."""
        return self.replica_urls[index].removeprefix("http://")

    async def start_replica(self, index: int) -> None:
        """Start replica `index` on its port, with a cold cache."""
        self._starts += 1
        log = self.folder / f"replica-{index}-{self._starts}.log"
        process = await start_replica(self.replica_urls[index], self.replica_flags[index], log)
        self.replicas[index : index + 1] = [process]

    async def start_proxy(self, flags: Sequence[str], tree: Path | None = None) -> None:
        self._starts += 1
        config = ["--config", str(self.write())]
        log = self.folder / f"proxy-{self._starts}.log"
        self.proxies.append(await start(["serve", *config, *flags], log, tree=tree))

    async def stop(self) -> None:
        for process in [*self.proxies, *self.replicas]:
            await process.stop()

    # --- configuration ------------------------------------------------------------------------------------------------

    def write(self, without: Sequence[int] = (), **other: Any) -> Path:
        """Replace the configuration file: without some replicas, and with `other` sections in place of `settings`."""
        backends = [{"url": url} for index, url in enumerate(self.replica_urls) if index not in without]
        address = {"host": "127.0.0.1", "port": int(port_in(self.url))}
        return self.write_text(json.dumps({**address, "backends": backends, **self.settings, **other}))

    def write_text(self, text: str) -> Path:
        file = self.folder / "config.yaml"
        aside = file.with_suffix(".new")
        aside.write_text(text)
        aside.replace(file)
        return file

    # --- the log ------------------------------------------------------------------------------------------------------

    def events(self, name: str) -> list[dict[str, Any]]:
        """The proxy's log lines of one kind so far. A line that is not complete yet is left out."""
        lines = self.proxy.log.read_text(errors="replace").splitlines(keepends=True)
        entries = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]
        return [entry for entry in entries if entry.get("event") == name]

    def exits(self) -> list[dict[str, Any]]:
        """The proxy's request lines so far, in order of exit."""
        return self.events("request")

    # --- pages --------------------------------------------------------------------------------------------------------

    async def text(self, url: str) -> str:
        async with self.control.get(url, raise_for_status=True) as answer:
            return await answer.text()

    async def json(self, path: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(await self.text(self.url + path))
        return document

    async def metrics(self) -> str:
        return await self.text(self.url + "/metrics")

    async def metric(self, series: str) -> float | None:
        """The value of one series, None if the page has no such series."""
        return value_of(await self.metrics(), series)

    async def becomes(self, series: str, value: float | None) -> None:
        """Wait until a series has a value, or ends for None. Raises TimeoutError after `UP_S`."""

        async def is_so() -> bool:
            return await self.metric(series) == value

        await until(is_so)

    async def fault(self, index: int, kind: str | None, **how: Any) -> None:
        """Switch a fault of a replica on, or off with None."""
        url = self.replica_urls[index] + "/sim/fault"
        async with self.control.post(url, json={"kind": kind, **how}, raise_for_status=True):
            pass

    async def admin(self, index: int, verb: str) -> None:
        """`drain` or `undrain` a backend of a fleet with the settings `WITH_ADMIN`."""
        url = f"{self.url}/admin/backends/{self.name(index)}/{verb}"
        headers = {"authorization": f"Bearer {_ADMIN_KEY}"}
        async with self.control.post(url, headers=headers, raise_for_status=True):
            pass


@asynccontextmanager
async def fleet(
    replica_flags: Sequence[Sequence[str]],
    proxy_flags: Sequence[str] = (),
    *,
    settings: Mapping[str, Any] | None = None,
    tree: Path | None = None,
) -> AsyncIterator[Fleet]:
    """Start a simulated replica for each of `replica_flags` and a proxy that logs JSON, and wait until it is ready.

    Args:
        replica_flags: The flags of each replica.
        proxy_flags: Further flags of `llmproxy serve`.
        settings: Sections of the configuration. `backends` in it replaces the list of all replicas.
        tree: The checkout of the proxy, this one if None.
    """
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llmproxy-bench-")))
        connectors = aiohttp.TCPConnector(limit=0), aiohttp.TCPConnector(limit=0, force_close=True)
        session, control = [
            await stack.enter_async_context(aiohttp.ClientSession(connector=connector)) for connector in connectors
        ]
        url, urls = free_url(), [free_url() for _ in replica_flags]
        running = Fleet(url, urls, replica_flags, folder, session, control, settings or {})
        stack.push_async_callback(running.stop)
        for index in range(len(replica_flags)):
            await running.start_replica(index)
        # The state of an earlier fleet must not count here.
        await running.start_proxy(["--log-format", "json", "--state-file", "none", *proxy_flags], tree)
        await ready(url, running.proxy)
        yield running


async def until(condition: Callable[[], Awaitable[bool] | bool], within_s: float = UP_S, every_s: float = 0.05) -> None:
    """Poll a condition that another process brings about. Raises TimeoutError after `within_s`."""
    async with asyncio.timeout(within_s):
        while True:
            met = condition()
            if await met if isawaitable(met) else met:
                return
            await asyncio.sleep(every_s)


async def ready(url: str, proxy: Process) -> None:
    """Wait until all backends of the proxy at `url` are up. Raises RuntimeError when its process ends instead."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(READY_S):
        while True:
            try:
                async with session.get(url + "/metrics") as answer:
                    lines = (await answer.text()).splitlines()
                states = [line for line in lines if line.startswith("llmproxy_backend_available{")]
                if states and all(line.endswith(" 1.0") for line in states):
                    return
            except aiohttp.ClientError:
                if proxy.child.returncode is not None:
                    raise RuntimeError(proxy.log.read_text()) from None
            await asyncio.sleep(0.1)


def is_whole(body: bytes, *, stream: bool) -> bool:
    """Whether the answer of a simulated replica is complete and has no error in it."""
    return body.endswith(b"data: [DONE]\n\n" if stream else b"}") and b'"error"' not in body


def value_of(metrics: str, series: str) -> float | None:
    """The value of a series, named with its labels, on a page of metrics; None if it is not there."""
    found = re.search(rf"^{re.escape(series)} (\S+)$", metrics, re.MULTILINE)
    return None if found is None else float(found[1])


def total_of(metrics: str, name: str) -> float:
    """The sum of all series of a name that has labels."""
    lines = (line for line in metrics.splitlines() if line.startswith(name + "{"))
    return sum(float(line.rpartition(" ")[2]) for line in lines)
