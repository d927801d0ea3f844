"""A small fleet of real processes on loopback: simulated replicas, a proxy in front of them, its pages and its log.

All benchmarks of the whole system use this module. Every process that it starts is ended by its process id.
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
UP_S = 60.0  # The longest wait for a metric to change.
_ADMIN_KEY = "for-drains"
WITH_ADMIN = {"admin_key": hash_of(_ADMIN_KEY), "admin": {"public_metrics": True}}
"""The settings of a fleet whose backends a benchmark drains."""


def free_port() -> int:
    """Returns a TCP port that was free a moment ago."""
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
    """A child process. Its standard output and standard error go to the file `log`."""

    child: asyncio.subprocess.Process
    log: Path

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ends the process with a signal, and returns its exit code.

        A process that has not ended after ten seconds is killed.
        """
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
    """Starts an `llmproxy` command from the checkout `tree`; None for this checkout. The caller must stop it.

    The process has its own session, so that Ctrl-C reaches only the caller. On Linux, it is killed when the caller
    dies.
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
    """Starts a simulated replica at `url`. Returns before the replica is ready."""
    return await start(["replica", "--port", port_in(url), *flags], log)


@dataclass(slots=True)
class Fleet:
    """The processes of a fleet and their addresses. A benchmark may stop and start the processes."""

    url: str
    replica_urls: list[str]
    replica_flags: Sequence[Sequence[str]]
    folder: Path
    session: aiohttp.ClientSession
    """The HTTP session for requests of clients."""
    control: aiohttp.ClientSession
    """The HTTP session for pages and faults.

    Each request has a new connection, because a POST would be lost if an idle connection closed.
    """
    settings: Mapping[str, Any]
    replicas: list[Process] = field(default_factory=list)
    proxies: list[Process] = field(default_factory=list)
    """All processes of the proxy so far. The last is the current process."""
    _starts: int = 0

    # --- processes ----------------------------------------------------------------------------------------------------

    @property
    def proxy(self) -> Process:
        return self.proxies[-1]

    def name(self, index: int) -> str:
        """Returns the name of a replica in the proxy's logs and pages."""
        return self.replica_urls[index].removeprefix("http://")

    async def start_replica(self, index: int) -> None:
        """Starts replica `index` on its port, with a cold cache."""
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
        """Replaces the configuration file.

        The file has all replicas except `without`, and the sections `other` in place of those in `settings`.
        """
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
        """Returns the proxy's log lines of one event so far, without a line that is not complete yet."""
        lines = self.proxy.log.read_text(errors="replace").splitlines(keepends=True)
        entries = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]
        return [entry for entry in entries if entry.get("event") == name]

    def exits(self) -> list[dict[str, Any]]:
        """Returns the log lines of requests that ended so far, in the order in which they ended."""
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
        """Returns the value of one series; None if the page has no such series."""
        return value_of(await self.metrics(), series)

    async def becomes(self, series: str, value: float | None) -> None:
        """Waits until a series has this value; None: until it is gone. Raises TimeoutError after UP_S."""

        async def is_so() -> bool:
            return await self.metric(series) == value

        await until(is_so)

    async def fault(self, index: int, kind: str | None, **how: Any) -> None:
        """Switches a fault of a simulated replica on; a `kind` of None switches it off."""
        url = self.replica_urls[index] + "/sim/fault"
        async with self.control.post(url, json={"kind": kind, **how}, raise_for_status=True):
            pass

    async def admin(self, index: int, verb: str) -> None:
        """Drains or undrains a backend (`verb`, with its query). The fleet must have the settings WITH_ADMIN."""
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
    """Runs simulated replicas and a proxy that logs JSON during the block, which begins when all backends are up.

    Args:
        replica_flags: The flags of each replica.
        proxy_flags: Further flags of `llmproxy serve`.
        settings: Sections of the configuration. `backends` in it replaces the list of all replicas.
        tree: The checkout with the code of the proxy; None for this checkout.
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
    """Waits until `condition`, which is called again and again, is true. Raises TimeoutError after `within_s`."""
    async with asyncio.timeout(within_s):
        while True:
            met = condition()
            if await met if isawaitable(met) else met:
                return
            await asyncio.sleep(every_s)


async def ready(url: str, proxy: Process) -> None:
    """Waits until all backends of the proxy at `url` are up.

    Raises RuntimeError if the process of the proxy ends instead.
    """
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
    """Returns whether the answer of a simulated replica is complete and contains no error."""
    return body.endswith(b"data: [DONE]\n\n" if stream else b"}") and b'"error"' not in body


def value_of(metrics: str, series: str) -> float | None:
    """Returns the value of a series, named with its labels, on a metrics page; None if the page does not have it."""
    found = re.search(rf"^{re.escape(series)} (\S+)$", metrics, re.MULTILINE)
    return None if found is None else float(found[1])


def total_of(metrics: str, name: str) -> float:
    """Returns the sum of all series of a metric that has labels."""
    lines = (line for line in metrics.splitlines() if line.startswith(name + "{"))
    return sum(float(line.rpartition(" ")[2]) for line in lines)
