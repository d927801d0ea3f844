"""The configuration is rewritten every second under load: does any request notice?

Real processes: four simulated replicas, the proxy with a configuration file, and an open loop of streams and plain
requests. Every second the file is written anew: a backend goes or comes back, weights, limits and retries change, now
and then the file is one that nobody could go by, and sometimes it is written in two halves. The proxy finds out by
itself (`--by watch`), or gets a signal (`--by signal`). Run `python -m benchmarks.reload --seconds 300`.

Exits with 1 when a request failed, a stream broke, or a reload did not do what the file asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import tempfile
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.fleet import Process, free_port, is_whole, ready, start, value_of

MODEL = "sim"
REPLICAS = 4
REPLICA_FLAGS = ("--model", MODEL, "--profile", "llama-8b-h100", "--max-num-seqs", "32", "--speed", "1")
BAD_FILES = (
    "backends: [http://127.0.0.1:1\n",
    "backends: [http://127.0.0.1:1]\nquue: {max_wait_s: 1}\n",
    "backends: []\n",
    "port: many\n",
    "",
)


class Writer:
    """Writes one configuration after the other, and remembers the last that could be gone by."""

    def __init__(self, file: Path, port: int, urls: list[str], rng: random.Random) -> None:
        self.file = file
        self.good = self.bad = 0
        self.wanted = list(urls)
        self._port = port
        self._urls = urls
        self._rng = rng

    def settings(self) -> dict[str, Any]:
        rng = self._rng
        self.wanted = sorted(rng.sample(self._urls, rng.randint(1, len(self._urls))))
        return {
            "host": "127.0.0.1",
            "port": self._port,
            "log_format": "json",
            "backends": [{"url": url, "max_in_flight": rng.choice((None, 24, 32))} for url in self.wanted],
            "tenants": [],
            "scheduling": {"weights": {MODEL: rng.choice((1.0, 2.0, 5.0))}},
            "retry": {"extra_attempts": rng.choice((1, 2, 3))},
            "queue": {"max_wait_s": rng.choice((60.0, 120.0)), "requests_max": rng.choice((5_000, 20_000))},
        }

    async def write(self) -> None:
        if self._rng.random() < 0.2:
            self.bad += 1
            self._replace(self._rng.choice(BAD_FILES))
            return
        self.good += 1
        text = json.dumps(self.settings(), indent=1)
        if self._rng.random() < 0.3:
            # As an editor does that writes in place.
            self.file.write_text(text[: len(text) // 2])
            await asyncio.sleep(0.05)
            self.file.write_text(text)
        else:
            self._replace(text)

    def _replace(self, text: str) -> None:
        aside = self.file.with_suffix(".new")
        aside.write_text(text)
        aside.replace(self.file)


async def one_request(session: aiohttp.ClientSession, url: str, stream: bool, tokens: int, ends: Counter[str]) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Tell me {tokens} things that change."}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": stream,
    }
    try:
        async with session.post(url + "/v1/chat/completions", json=body) as answer:
            data = await answer.read()
            if answer.status != 200:
                ends[f"status {answer.status}: {data[:150].decode(errors='replace')}"] += 1
            elif not is_whole(data, stream=stream):
                ends["an answer broke"] += 1
            else:
                ends["served"] += 1
    except (aiohttp.ClientError, TimeoutError) as error:
        ends[f"{type(error).__name__}: {error}"] += 1


async def page(session: aiohttp.ClientSession, url: str, path: str) -> str:
    async with session.get(url + path) as answer:
        return await answer.text()


async def run(options: argparse.Namespace) -> int:
    """Play it all; prints one table and answers the exit code."""
    rng, ends = random.Random(options.seed), Counter[str]()
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llmproxy-bench-")))
        children: list[Process] = []

        async def stop_all() -> None:
            for process in reversed(children):
                await process.stop()

        stack.push_async_callback(stop_all)
        ports = [free_port() for _ in range(REPLICAS)]
        for one in map(str, ports):
            process = await start(["replica", "--port", one, *REPLICA_FLAGS], folder / f"{one}.log")
            children.append(process)
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        writer = Writer(folder / "config.yaml", port, [f"http://127.0.0.1:{one}" for one in ports], rng)
        writer.file.write_text(json.dumps(writer.settings()))
        proxy = await start(["serve", "--config", str(writer.file), "--reload", options.by], folder / "proxy.log")
        children.append(proxy)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        await ready(url, proxy)
        requests: set[asyncio.Task[None]] = set()
        began_s = next_write_s = loop.time()
        while loop.time() < began_s + options.seconds:
            if loop.time() >= next_write_s:
                next_write_s += 1.0
                await writer.write()
                if options.by == "signal":
                    proxy.child.send_signal(signal.SIGHUP)
            job = one_request(session, url, rng.random() < 0.6, rng.choice((4, 16, 64, 256)), ends)
            task = asyncio.create_task(job)
            requests.add(task)
            task.add_done_callback(requests.discard)
            await asyncio.sleep(rng.expovariate(options.rate))
        writer.good += 1
        writer.file.write_text(json.dumps(writer.settings()))
        if options.by == "signal":
            proxy.child.send_signal(signal.SIGHUP)
        while requests:
            await asyncio.wait(requests)
        await asyncio.sleep(1.5)
        metrics = await page(session, url, "/metrics")
        shown = json.loads(await page(session, url, "/admin/backends"))["backends"]
        ended = [(name, count) for name, count in ends.most_common() if name != "served"]
        name, results = "llmproxy_config_reloads_total", ("success", "failure")
        reloads = {result: value_of(metrics, f'{name}{{result="{result}"}}') or 0.0 for result in results}
        log = proxy.log.read_text()
        left, removed = log.count('"backend_leaves"'), log.count('"backend_removed"')
    print("| requests | failed | files written | of them bad | reloads | refused | backends left | of them gone |")
    print("| --: " * 8 + "|")
    print(
        f"| {sum(ends.values())} | {sum(count for _, count in ended)} | {writer.good + writer.bad} | {writer.bad} "
        f"| {reloads['success']:.0f} | {reloads['failure']:.0f} | {left} | {removed} |"
    )
    for name, count in ended:
        print(f"{count} x {name}")
    as_wanted = sorted(one["url"] for one in shown) == writer.wanted
    if not as_wanted:
        print(f"wanted {writer.wanted}, and the proxy has {shown}")
    return int(bool(ended) or not as_wanted or not reloads["success"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=25.0, help="requests per second")
    parser.add_argument("--by", choices=("watch", "signal"), default="watch", help="how the proxy learns of a change")
    parser.add_argument("--seed", type=int, default=7)
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    raise SystemExit(main())
