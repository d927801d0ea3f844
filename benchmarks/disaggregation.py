"""What the proxy adds to a request whose prompt and answer are computed by two replicas, beside asking the two oneself.

    .venv/bin/python -m benchmarks.disaggregation [--rounds 300] [--prompt-bytes 4000] [--json]

Two simulated replicas compute next to nothing and hand over KV at once. One client asks, in turn: both replicas, as the
connector does (*two hops*); a proxy that splits every request (*split*); one replica (*one hop*); and a proxy before
that replica alone (*whole*). What is compared is measured within milliseconds of each other. The client, the replicas
and both proxies share the cores. *Added* is the difference within a round, whose order is drawn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.fleet import free_port, is_whole, ready, start, total_of
from llmproxy.core.kv_connectors.nixl import Nixl

REPLICA = (
    "--profile", "tiny", "--speed", "10", "--kv-transfer", "nixl", "--kv-latency-s", "0", "--kv-handshake-s", "0",
)  # fmt: skip
PATH = "/v1/chat/completions"
WARM_UP = 30
ASKS = json.loads(Nixl.asks)

Ask = Callable[[dict[str, Any]], Awaitable[None]]


class Client:
    """One client over kept connections. Raises RuntimeError for an answer that is not whole."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def ask(self, url: str, body: dict[str, Any]) -> bytes:
        async with self._session.post(url + PATH, json=body) as answer:
            read = await answer.read()
        if answer.status != 200 or not is_whole(read, stream=bool(body.get("stream"))):
            raise RuntimeError(f"{url}: {answer.status} {read[-300:]!r}")
        return read

    async def both(self, prefill: str, decode: str, body: dict[str, Any]) -> None:
        first = await self.ask(prefill, body | {"stream": False, "max_tokens": 1, "kv_transfer_params": ASKS})
        await self.ask(decode, body | {"kv_transfer_params": json.loads(first)["kv_transfer_params"]})


def body_of(number: int, size_bytes: int, *, stream: bool) -> dict[str, Any]:
    """No two have a common beginning, so no prompt is found in a cache."""
    text = f"{number} {random.random()} " + "load balancers know the way " * (size_bytes // 28)
    return {"model": "base", "messages": [{"role": "user", "content": text}], "max_tokens": 8, "stream": stream}


async def proxy_over(stack: AsyncExitStack, folder: Path, backends: list[dict[str, str]]) -> str:
    url = f"http://127.0.0.1:{free_port()}"
    config = {
        "host": "127.0.0.1", "port": int(url.rpartition(":")[2]), "state_file": "none", "backends": backends,
        "scheduling": {"disaggregation": "always"} if len(backends) > 1 else {},
    }  # fmt: skip
    file = folder / f"{len(backends)}.json"
    file.write_text(json.dumps(config))
    process = await start(["serve", "--config", str(file)], folder / f"{len(backends)}.log")
    stack.push_async_callback(process.stop)
    await ready(url, process)
    return url


async def measure(rounds: int, size_bytes: int, *, stream: bool) -> dict[str, list[float]]:
    """Seconds of each request by how it was asked, in the order of the rounds."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llmproxy-bench-")))
        replicas = []
        for name in ("prefill", "decode"):
            url = f"http://127.0.0.1:{free_port()}"
            port = url.rpartition(":")[2]
            process = await start(["replica", "--port", port, "--model", "base", *REPLICA], folder / f"{name}.log")
            stack.push_async_callback(process.stop)
            replicas.append(url)
        prefill, decode = replicas
        roles = [{"url": prefill, "role": "prefill"}, {"url": decode, "role": "decode"}]
        apart = await proxy_over(stack, folder, roles)
        whole = await proxy_over(stack, folder, [{"url": decode}])
        session = await stack.enter_async_context(aiohttp.ClientSession())
        client = Client(session)
        ways: dict[str, Ask] = {
            "two hops": lambda body: client.both(prefill, decode, body),
            "split": lambda body: _ask(client, apart, body),
            "one hop": lambda body: _ask(client, decode, body),
            "whole": lambda body: _ask(client, whole, body),
        }
        found: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(WARM_UP + rounds):
            for way in random.sample(list(ways), len(ways)):
                body = body_of(number, size_bytes, stream=stream)
                begun_s = time.perf_counter()
                await ways[way](body)
                if number >= WARM_UP:
                    found[way].append(time.perf_counter() - begun_s)
        async with session.get(apart + "/metrics") as answer:
            page = await answer.text()
        split = sum(
            float(line.rpartition(" ")[2]) for line in page.splitlines() if 'disaggregation_total{mode="split"' in line
        )
        if split != total_of(page, "llmproxy_disaggregation_total") or split != WARM_UP + rounds:
            raise RuntimeError(f"only {split:.0f} of {WARM_UP + rounds} requests were split")
        return found


async def _ask(client: Client, url: str, body: dict[str, Any]) -> None:
    await client.ask(url, body)


def shown(found: dict[str, list[float]]) -> None:
    print("| | p50 ms | p90 ms |\n| --- | --: | --: |")
    added = {
        "added to two hops": [b - a for a, b in zip(found["two hops"], found["split"], strict=True)],
        "added to one hop": [b - a for a, b in zip(found["one hop"], found["whole"], strict=True)],
    }
    for name, seconds in (found | added).items():
        p90 = statistics.quantiles(seconds, n=10)[-1]
        print(f"| {name} | {statistics.median(seconds) * 1e3:.2f} | {p90 * 1e3:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--prompt-bytes", type=int, default=4_000)
    parser.add_argument("--json", action="store_true", help="answers in one piece instead of streams")
    options = parser.parse_args()
    shown(asyncio.run(measure(options.rounds, options.prompt_bytes, stream=not options.json)))


if __name__ == "__main__":
    main()
