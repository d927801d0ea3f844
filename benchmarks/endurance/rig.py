"""The processes of the timed soak: two pools of simulated replicas, the proxy before them, and what is known of it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.endurance.probe import PATH_VARIABLE
from benchmarks.fleet import Process, free_port, ready, start, value_of
from llmproxy.config.value_types import hash_of

MODELS = ("sim", "sim", "sim", "small", "small")
"""The base model of each replica."""
ADAPTER, ALIAS = "sql", "gpt"
SEQUENCES = 8
REPLICA_FLAGS = (
    *("--profile", "llama-8b-h100", "--speed", "0.25", "--max-num-seqs", str(SEQUENCES)),
    # So small that the prefix index is as full as it will ever be within minutes.
    *("--kv-tokens", "65536"),
)
ADMIN_KEY = "for-drains"
TENANTS: dict[str, dict[str, Any]] = {
    "desk": {"criticality": "critical", "weight": 2.0},
    "app": {},
    "batch": {"criticality": "sheddable", "limits": {"in_flight": 12}},
}
UP_S = 60.0
"""How long something may take that the proxy brings about by itself."""


def key_of(tenant: str) -> str:
    """What clients of a tenant show."""
    return f"key-of-{tenant}"


@dataclass(slots=True)
class Usage:
    """What a process takes at one moment: resident memory, open descriptors, CPU seconds since its start."""

    rss_bytes: int
    descriptors: int
    cpu_s: float


def usage_of(pid: int) -> Usage:
    """Raises OSError where there is no such process."""
    proc = Path(f"/proc/{pid}")
    pages = int((proc / "statm").read_text().split()[1])
    ticks = (proc / "stat").read_text().rpartition(")")[2].split()[11:13]
    return Usage(
        rss_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        descriptors=len(list((proc / "fd").iterdir())),
        cpu_s=sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"),
    )


@dataclass(slots=True)
class Rig:
    """Where everything is. Faults stop and start what stands here, and change what the configuration says."""

    folder: Path
    session: aiohttp.ClientSession
    urls: list[str]
    url: str
    replicas: list[Process] = field(default_factory=list)
    proxy: Process | None = None
    _log_read: int = 0
    _starts: int = 0
    _ended_cpu_s: float = 0.0

    # --- processes ----------------------------------------------------------------------------------------------------

    @property
    def proxy_pid(self) -> int:
        assert self.proxy is not None
        return self.proxy.child.pid

    def name(self, index: int) -> str:
        """What the proxy calls a replica."""
        return self.urls[index].removeprefix("http://")

    async def start_replica(self, index: int) -> Process:
        self._starts += 1
        model = MODELS[index]
        adapters = ["--adapter", ADAPTER] if model == "sim" else []
        flags = ["--port", self.urls[index].rpartition(":")[2], "--model", model, *adapters, *REPLICA_FLAGS]
        return await start(["replica", *flags], self.folder / f"replica-{self._starts}.log", own_group=True)

    async def kill_replica(self, index: int) -> None:
        """End what there is of one at once."""
        old = self.replicas[index]
        if old.child.returncode is None:
            self._ended_cpu_s += usage_of(old.child.pid).cpu_s
        await old.stop(signal.SIGKILL)

    async def restart_replica(self, index: int) -> None:
        """Start one anew, with a cold cache, and wait until it answers; what is left of the old one is killed."""
        await self.kill_replica(index)
        self.replicas[index] = await self.start_replica(index)
        async with asyncio.timeout(UP_S):
            while not await self._answers(index):  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.1)

    async def _answers(self, index: int) -> bool:
        try:
            async with self.session.get(self.urls[index] + "/health") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    def replicas_cpu_s(self) -> float:
        """CPU seconds of all replicas so far; of one that was ended, until then."""
        alive = [replica.child.pid for replica in self.replicas if replica.child.returncode is None]
        return self._ended_cpu_s + sum(usage_of(pid).cpu_s for pid in alive)

    async def stop(self) -> int | None:
        """End everything; the exit code of the proxy."""
        code = await self.proxy.stop() if self.proxy is not None else None
        for replica in self.replicas:
            # One that was stopped cannot end before it goes on.
            if replica.child.returncode is None:
                replica.child.send_signal(signal.SIGCONT)
            await replica.stop(signal.SIGKILL)
        return code

    # --- configuration ------------------------------------------------------------------------------------------------

    @property
    def file(self) -> Path:
        return self.folder / "config.yaml"

    def write(self, without: Sequence[int] = (), **other: Any) -> None:
        """Write the configuration, without some replicas, and with `other` sections over it."""
        port = self.url.rpartition(":")[2]
        backends = [{"url": url} for index, url in enumerate(self.urls) if index not in without]
        tenants = [{"name": name, "keys": [hash_of(key_of(name))], **what} for name, what in TENANTS.items()]
        settings = {
            "host": "127.0.0.1",
            "port": int(port),
            "log_format": "json",
            "plugins": ["benchmarks.endurance.probe"],
            "admin_key": hash_of(ADMIN_KEY),
            "admin": {"public_metrics": True},
            "backends": backends,
            "tenants": tenants,
            "models": [{"name": ALIAS, "target": "sim", "ttft_s": 2.0}],
            "scheduling": {"flow": "tenant+model", "min_shares": {"sheddable": 0.05}},
            "queue": {"max_wait_s": 30.0},
        }
        self.replace_file(json.dumps(settings | other))

    def replace_file(self, text: str) -> None:
        aside = self.file.with_suffix(".new")
        aside.write_text(text)
        aside.replace(self.file)

    # --- what the proxy shows -----------------------------------------------------------------------------------------

    async def metrics(self) -> str:
        async with self.session.get(self.url + "/metrics", raise_for_status=True) as answer:
            return await answer.text()

    async def value(self, series: str) -> float | None:
        return value_of(await self.metrics(), series)

    async def becomes(self, series: str, value: float | None) -> None:
        """Wait until one series has a value, None for its end. Raises TimeoutError when it does not."""
        async with asyncio.timeout(UP_S):
            while await self.value(series) != value:  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.2)

    async def available(self) -> int:
        """How many backends may be given work."""
        return len(re.findall(r"^llmproxy_backend_available{.*} 1\.0$", await self.metrics(), re.MULTILINE))

    async def counted(self) -> Counter[str]:
        """Requests by outcome, as its metrics say."""
        counts: Counter[str] = Counter()
        for outcome, count in re.findall(
            r'^llmproxy_requests_total{.*outcome="(\w+)".*} (\S+)$', await self.metrics(), re.MULTILINE
        ):
            counts[outcome] += int(float(count))
        return counts

    async def admin(self, index: int, verb: str) -> None:
        url = f"{self.url}/admin/backends/{self.name(index)}/{verb}"
        async with self.session.post(url, headers={"authorization": f"Bearer {ADMIN_KEY}"}, raise_for_status=True):
            pass

    async def fault(self, index: int, kind: str | None, **how: Any) -> None:
        async with self.session.post(self.urls[index] + "/sim/fault", json={"kind": kind} | how, raise_for_status=True):
            pass

    def news(self) -> list[dict[str, Any]]:
        """Log lines since the last call; one that is still being written comes with the next."""
        assert self.proxy is not None
        with self.proxy.log.open("rb") as log:
            log.seek(self._log_read)
            text = log.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._log_read += len(whole)
        return [json.loads(line) for line in whole.splitlines() if line.startswith(b"{")]

    def strange(self) -> list[str]:
        """What the proxy wrote that is no line of its log: traces, warnings of the interpreter."""
        assert self.proxy is not None
        with self.proxy.log.open(errors="replace") as log:
            return [line.rstrip() for line in log if line.strip() and not line.startswith("{")]

    async def probe(self) -> dict[str, Any]:
        """See `benchmarks.endurance.probe`, with what the system knows of its descriptors."""
        reader, writer = await asyncio.open_unix_connection(self.folder / "probe")
        try:
            probed: dict[str, Any] = json.loads(await reader.read())
        finally:
            writer.close()
        probed["descriptors"] = {"open": usage_of(self.proxy_pid).descriptors}
        return probed


@asynccontextmanager
async def rig(folder: Path, session: aiohttp.ClientSession) -> AsyncIterator[Rig]:
    """Start all of it, and wait until the proxy knows everybody."""
    opened = Rig(
        folder, session, [f"http://127.0.0.1:{free_port()}" for _ in MODELS], f"http://127.0.0.1:{free_port()}"
    )
    os.environ[PATH_VARIABLE] = str(folder / "probe")
    try:
        for index in range(len(MODELS)):
            opened.replicas.append(await opened.start_replica(index))
        opened.write()
        opened.proxy = await start(["serve", "--config", str(opened.file)], folder / "proxy.log", own_group=True)
        await ready(opened.url, opened.proxy)
        yield opened
    finally:
        await opened.stop()
