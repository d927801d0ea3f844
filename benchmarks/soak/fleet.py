"""The fleet of the soak: two pools of simulated replicas, tenants in three bands, an adapter and an alias."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.fleet import WITH_ADMIN, Fleet, fleet, total_of
from benchmarks.soak.probe import PATH_VARIABLE
from llmproxy.config.value_types import hash_of

MODELS = ("sim", "sim", "sim", "small", "small")
"""The base model of each replica."""
ADAPTER, ALIAS = "sql", "gpt"
SEQUENCES = 8
FLAGS = (
    *("--profile", "llama-8b-h100", "--speed", "0.25", "--max-num-seqs", str(SEQUENCES)),
    # A small cache, so that the prefix index is full within minutes.
    *("--kv-tokens", "65536"),
)
TENANTS: dict[str, dict[str, Any]] = {
    "desk": {"criticality": "critical", "weight": 2.0},
    "app": {},
    "batch": {"criticality": "sheddable", "limits": {"in_flight": 12}},
}


def key_of(tenant: str) -> str:
    return f"key-of-{tenant}"


SETTINGS = {
    **WITH_ADMIN,
    "plugins": ["benchmarks.soak.probe"],
    "tenants": [{"name": name, "keys": [hash_of(key_of(name))], **more} for name, more in TENANTS.items()],
    "models": [{"name": ALIAS, "target": "sim", "ttft_s": 2.0}],
    "scheduling": {"flow": "tenant+model", "min_shares": {"sheddable": 0.05}},
    "queue": {"max_wait_s": 30.0},
}


@asynccontextmanager
async def soaked() -> AsyncIterator[tuple[Fleet, Path]]:
    """Runs the fleet during the block. Yields the fleet and the path of the socket of its probe."""
    flags = [[*FLAGS, "--model", model, *(["--adapter", ADAPTER] if model == "sim" else [])] for model in MODELS]
    with TemporaryDirectory(prefix="llmproxy-soak-") as folder:
        socket = Path(folder) / "probe"
        os.environ[PATH_VARIABLE] = str(socket)
        async with fleet(flags, settings=SETTINGS) as running:
            yield running, socket


async def all_available(running: Fleet) -> bool:
    """Returns whether all backends are available."""
    return total_of(await running.metrics(), "llmproxy_backend_available") == len(MODELS)


async def counted(running: Fleet) -> Counter[str]:
    """Returns the number of requests by outcome, from the metrics."""
    found = re.findall(r'^llmproxy_requests_total{.*outcome="(\w+)".*} (\S+)$', await running.metrics(), re.MULTILINE)
    counts: Counter[str] = Counter()
    for outcome, count in found:
        counts[outcome] += int(float(count))
    return counts


def usage_of(pid: int) -> tuple[int, int]:
    """Returns the resident bytes and the open descriptors of a process. Raises OSError if it has ended."""
    proc = Path(f"/proc/{pid}")
    pages = int((proc / "statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(list((proc / "fd").iterdir()))


async def probed(running: Fleet, socket: Path) -> dict[str, Any]:
    """Returns the answer of `benchmarks.soak.probe`, and the open descriptors of the proxy."""
    reader, writer = await asyncio.open_unix_connection(socket)
    try:
        answer: dict[str, Any] = json.loads(await reader.read())
    finally:
        writer.close()
    answer["descriptors"] = {"open": usage_of(running.proxy.child.pid)[1]}
    return answer


class Log:
    """Reads the proxy's log piece by piece."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self.strange: list[str] = []
        """Lines that are no JSON: traces, and warnings of the interpreter."""

    def new(self) -> list[dict[str, Any]]:
        """Returns the lines since the last call. A line that is not complete yet comes with the next call."""
        with self._path.open("rb") as log:
            log.seek(self._read)
            text = log.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        lines = whole.splitlines()
        self.strange += [line.decode(errors="replace") for line in lines if line.strip() and not line.startswith(b"{")]
        return [json.loads(line) for line in lines if line.startswith(b"{")]
