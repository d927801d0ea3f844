"""What is left in real vLLM replicas by clients that leave, and in clients by replicas that die.

    python -m benchmarks.validation.abuse --backend http://127.0.0.1:18001=PID --backend http://127.0.0.1:18002=PID

PID is the replica's process, which leads a group of its own. First a thousand streams are left at random moments: how
long until no engine runs or holds anything for them? Then many streams run, and one replica gets SIGTERM, or with
`--signal KILL` its whole group SIGKILL: which requests are lost before their first byte, and how do the others end?
The second part ends that replica for good.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Sequence
from typing import Any

import aiohttp

from benchmarks.validation.vllm_replica import proxied
from llmproxy.app import Proxy
from llmproxy.observe import logs

CLEAR_S = 30.0
LOOK_S = 0.05
TIMEOUT_S = 120.0


def body(tokens: int, number: int) -> dict[str, Any]:
    """A stream of so many tokens."""
    message = {"role": "user", "content": f"{number} say something long"}
    return {"messages": [message], "stream": True, "max_tokens": tokens, "ignore_eos": True}


async def leave(http: aiohttp.ClientSession, url: str, number: int, turn: asyncio.Semaphore) -> str:
    """ListedRequest, read for a random while, and go; answers whether anything was read by then."""
    rng = random.Random(number)
    async with turn:
        try:
            async with asyncio.timeout(rng.choice((0.02, 0.1, 0.5, 1.5)) * rng.random() * 2):
                async with http.post(f"{url}/v1/chat/completions", json=body(400, number)) as response:
                    await response.content.readany()
                    await asyncio.sleep(60.0)
        except TimeoutError:
            return "left"
        return "ended"


def busy(proxy: Proxy, since_s: float) -> tuple[int, float]:
    """Sequences that run or wait in the engines, and the largest share of a cache that is held, by polls since then."""
    backends = proxy.pools.backends.values()
    readings = [b.reading for b in backends if b.reading is not None and b.reading.taken_at_s >= since_s]
    if len(readings) < len(backends):
        return -1, 1.0
    return (
        sum(reading.running + reading.waiting for reading in readings),
        max(reading.kv_used or 0.0 for reading in readings),
    )


async def disconnects(backends: Sequence[str], count: int, at_a_time: int) -> None:
    """Part one."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http, proxied(backends) as proxy:
        turn = asyncio.Semaphore(at_a_time)
        ends = Counter(await asyncio.gather(*(leave(http, proxy.url, number, turn) for number in range(count))))
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while (found := busy(proxy, began_s)) != (0, 0.0) and loop.time() < began_s + CLEAR_S:  # noqa: ASYNC110 - as above
            await asyncio.sleep(LOOK_S)
        in_flight = sum(len(backend.bookings) for backend in proxy.pools.backends.values())
    print(
        f"{count:,} streams, {ends['left']:,} left: {found[0]} sequences and {found[1]:.1%} of a cache held"
        f" {loop.time() - began_s:.2f} s later; in flight in the proxy {in_flight}"
    )


async def consume(http: aiohttp.ClientSession, url: str, number: int, tokens: int) -> str:
    """One stream to its end, and how that was."""
    text = b""
    try:
        async with http.post(f"{url}/v1/chat/completions", json=body(tokens, number)) as response:
            if response.status != 200:
                return f"lost before its first byte ({response.status})"
            async for piece in response.content.iter_any():
                text += piece
    except aiohttp.ClientError as error:
        errors = text.count(b'data: {"error"')
        if not errors:
            return f"broken without an error event ({type(error).__name__})"
        return "broken, one error event" if errors == 1 else f"broken, {errors} error events"
    return "complete" if text.rstrip().endswith(b"data: [DONE]") else "cut short"


async def death(backends: Sequence[str], pid: int, number: signal.Signals, streams: int) -> None:
    """Part two: the first replica gets a signal while `streams` run or wait."""
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
        proxied(backends) as proxy,
        asyncio.timeout(TIMEOUT_S * 3),
    ):
        tasks = [asyncio.create_task(consume(http, proxy.url, i, 60)) for i in range(streams)]
        await asyncio.sleep(3.0)
        done = sum(task.done() for task in tasks)
        if number is signal.SIGKILL:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        name = next(iter(proxy.pools.backends))
        while proxy.pools.views(loop.time())[name].available and loop.time() < began_s + CLEAR_S:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
        detected_s = loop.time() - began_s
        ends = Counter(await asyncio.gather(*tasks))
    print(f"{number.name} with {streams - done} of {streams} streams under way: detected after {detected_s:.2f} s;"
          f" {dict(ends.most_common())}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", required=True, metavar="URL=PID")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--disconnects", type=int, default=1_000)
    parser.add_argument("--signal", choices=("TERM", "KILL"), default="TERM")
    given = parser.parse_args()
    logs.configure("text", "error")
    backends = [one.rpartition("=")[0] for one in given.backend]
    pid = int(given.backend[0].rpartition("=")[2])
    if given.disconnects:
        asyncio.run(disconnects(backends, given.disconnects, 48))
    if given.streams:
        asyncio.run(death(backends, pid, signal.Signals[f"SIG{given.signal}"], given.streams))


if __name__ == "__main__":
    main()
