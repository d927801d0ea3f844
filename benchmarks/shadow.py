"""A shadow in front of vllm-router: its effect on clients, and its prediction beside the times after the switch.

    python -m benchmarks.shadow --peers-venv DIR [--part bytes|faults|time|prediction]

Two simulated replicas, vllm-router (`power_of_two`), the shadow and then llmproxy are processes of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from benchmarks.fleet import Process, free_url, port_in, ready, start, start_replica, until
from benchmarks.load import Clients, Seen, Work, percentile
from benchmarks.peers.competitors import Site, found_peers
from benchmarks.table import Table
from llmproxy.config.value_types import hash_of

POLICY = "power_of_two"
BATCH = 8
OBJECTIVE_S = 1.0  # The objective for the first token of short prompts in the laboratory.
TENANTS = {"chat": ("critical", Work(tokens=range(64, 193), words=100)), "batch": ("sheddable", Work(words=600))}
VARIES = re.compile(rb'(?im)^(?:date|x-request-id): .*$|"(?:id|created)":(?:"[^"]*"|\d+)|chatcmpl-\w+|cmpl-\w+')
BORDERS = re.compile(rb"(?:^|\r\n)[0-9a-f]+\r\n(?=data: |\{|\r\n)|\r\n(?=data: |0\r\n)")
TIMEOUT_S, QUIET_S = 3.0, 1.0
ENDS = {"shadow": signal.SIGINT, "nginx": signal.SIGTERM}
"""Signals for processes that end others, or write at their end."""


def asked(body: bytes, *fields: str, path: str = "/v1/chat/completions", method: str = "POST") -> bytes:
    length = () if any("ransfer-" in field for field in fields) else (f"Content-Length: {len(body)}",)
    head = (f"{method} {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *length, *fields)
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def chat(**more: Any) -> bytes:
    fields = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8} | more
    return json.dumps(fields).encode()


LONG = asked(chat(max_tokens=400, stream=True, ignore_eos=True))
CASES = {
    "JSON": [asked(chat())],
    "stream": [asked(chat(stream=True))],
    "usage in a stream": [asked(chat(stream=True, stream_options={"include_usage": True}))],
    "two on one connection": [asked(chat()), asked(chat(stream=True))],
    "chunked body": [asked(b"%x\r\n%b\r\n0\r\n\r\n" % (len(chat()), chat()), "Transfer-Encoding: chunked")],
    "100-continue": [asked(chat(), "Expect: 100-continue").removesuffix(chat()), chat()],
    "gzip accepted": [asked(chat(), "Accept-Encoding: gzip")],
    "gzip body": [asked(b"\x1f\x8b\x08no gzip", "Content-Encoding: gzip")],
    "model that is unknown": [asked(chat(model="none"))],
    "no JSON": [asked(b"{no")],
    "404": [asked(b"", path="/nothing", method="GET")],
    "models": [asked(b"", path="/v1/models", method="GET")],
    "HEAD": [asked(b"", path="/v1/models", method="HEAD")],
    "OPTIONS": [asked(b"", "Origin: http://a", path="/v1/chat/completions", method="OPTIONS")],
    "odd method": [asked(b"", path="/v1/models", method="PROPFIND")],
    "no HTTP": [b"hello\r\n\r\n"],
    "bad length": [asked(b"", "Content-Length: -1")],
    "Connection: close": [asked(chat(), "Connection: close")],
}


@dataclass(slots=True)
class Rig:
    folder: Path
    replicas: list[str]
    router: str
    shadow: str
    config: Path
    processes: dict[str, Process]
    speed: float

    async def stop(self, *names: str) -> None:
        for name in names:
            await self.processes.pop(name).stop(ENDS.get(name, signal.SIGKILL))

    async def start_replicas(self) -> None:
        for number, url in enumerate(self.replicas):
            flags = ("--model", "sim", "--max-num-seqs", str(BATCH), "--speed", str(self.speed))
            log = self.folder / f"replica-{number}.log"
            self.processes[f"replica-{number}"] = await start_replica(url, flags, log)
        await up(*self.replicas)

    async def start_router(self, venvs: Sequence[Path]) -> None:
        await self.start_peer("vllm-router", self.router, self.replicas, venvs)

    async def start_peer(self, name: str, url: str, backends: Sequence[str], venvs: Sequence[Path] = ()) -> None:
        peers, missing = found_peers(venvs)
        if name in missing:
            raise SystemExit(f"{name} is not installed: see --peers-venv")
        peer = next(one for one in peers if one.name == name)
        site = Site(self.folder, int(port_in(url)), int(port_in(free_url())), tuple(backends), 1)
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            child = await asyncio.create_subprocess_exec(
                *peer.launch(site).argv, stdout=output, stderr=output, start_new_session=True
            )
        self.processes[name] = Process(child, log)
        await up(url)

    async def start_shadow(self, out: Path) -> None:
        flags = ["--listen", f"127.0.0.1:{port_in(self.shadow)}", "--to", self.router, "--config", str(self.config)]
        log = self.folder / f"{out.name}.log"
        self.processes["shadow"] = await start(["shadow", *flags, "--out", str(out), "--policy", POLICY], log)
        await until(lambda: b"Passes" in log.read_bytes())


async def up(*urls: str) -> None:
    async with aiohttp.ClientSession() as session:

        async def answers(url: str) -> bool:
            try:
                async with session.get(url + "/v1/models") as answer:
                    return answer.status == 200
            except aiohttp.ClientError:
                return False

        for url in urls:
            await until(partial(answers, url))


@asynccontextmanager
async def rig(venvs: Sequence[Path], speed: float) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llmproxy-bench-")))
        urls = [free_url() for _ in range(2)]
        config = folder / "llmproxy.json"
        tenants = [
            {"name": name, "keys": [hash_of(f"key-{name}")], "criticality": band} for name, (band, _) in TENANTS.items()
        ]
        scheduling = {"flow": "tenant"}
        config.write_text(json.dumps({"backends": urls, "tenants": tenants, "scheduling": scheduling}))
        made = Rig(folder, urls, free_url(), free_url(), config, {}, speed)

        async def stop() -> None:
            for process in made.processes.values():
                await process.stop(signal.SIGKILL)

        stack.push_async_callback(stop)
        await made.start_replicas()
        await made.start_router(venvs)
        yield made


# --- bytes and faults -------------------------------------------------------------------------------------------------


async def said(url: str, parts: Sequence[bytes]) -> tuple[bytes, str]:
    """Returns all bytes of the answers to `parts`, each sent after a silence, and the end of the connection."""
    got, ended = b"", "open"
    reader, writer = await asyncio.open_connection("127.0.0.1", int(port_in(url)))
    for part in parts:
        writer.write(part)
        try:
            async with asyncio.timeout(QUIET_S):
                while piece := await reader.read(1 << 16):
                    got += piece
                ended = "closed"
        except TimeoutError:
            pass
        except ConnectionResetError:
            ended = "reset"
    writer.close()
    return got, ended


def without_chance(answer: bytes) -> bytes:
    """Returns an answer without what differs between any two: dates, ids, and the borders of chunks."""
    return BORDERS.sub(b"", VARIES.sub(b"", answer))


async def same_bytes(at: Rig) -> None:
    table = Table("request", "router alone", "ends", "same bytes and end through the shadow", texts=4)
    for name, parts in CASES.items():
        alone, through = [await said(url, parts) for url in (at.router, at.shadow)]
        status = alone[0].partition(b"\r\n")[0].decode(errors="replace") or "(nothing)"
        equal = without_chance(alone[0]) == without_chance(through[0]) and alone[1] == through[1]
        table.row(name, status, alone[1], "yes" if equal else f"NO: {alone} {through}")


async def faults(at: Rig, venvs: Sequence[Path]) -> None:
    table = Table("in mid-stream", "connection", "bytes before", "after", "end", texts=2)

    async def watch(url: str, do: signal.Signals, again: signal.Signals | None) -> list[object]:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port_in(url)))
        writer.write(LONG)
        before = len(await reader.readexactly(20_000))
        at.processes["vllm-router"].child.send_signal(do)
        got, ended = 0, "open"
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while piece := await reader.read(1 << 16):
                    got += len(piece)
                ended = "closed"
        except TimeoutError:
            if again is not None:
                at.processes["vllm-router"].child.send_signal(again)
                async with asyncio.timeout(30.0):
                    while not (piece := await reader.read(1 << 16)).endswith(b"0\r\n\r\n"):
                        got += len(piece)
                ended = "whole after SIGCONT"
        except ConnectionResetError:
            ended = "reset"
        writer.close()
        return [before, got, ended]

    for name, do, again in (
        ("router stopped, then goes on", signal.SIGSTOP, signal.SIGCONT),
        ("router killed", signal.SIGKILL, None),
    ):
        for where, url in (("router alone", at.router), ("shadow", at.shadow)):
            table.row(name, where, *await watch(url, do, again))
            if again is None:
                # Its port is closed at its very end.
                await at.processes["vllm-router"].child.wait()
                gone, ended = await said(at.shadow, [asked(chat())])
                table.row("then a new request", "shadow", 0, gone.partition(b"\r\n")[0].decode(), ended)
                await at.stop("vllm-router")
                await at.start_router(venvs)


# --- time -------------------------------------------------------------------------------------------------------------


async def added_time(at: Rig, count: int) -> None:
    """Compares pairs of requests. nginx as another hop is the control, because each hop costs a wait for a core."""
    nginx = free_url()
    await at.start_peer("nginx", nginx, [at.router])
    table = Table("request", "hop", "router alone, ms", "with the hop, ms", "difference, ms", "ratio", texts=2)
    hops = {"shadow": at.shadow, "nginx": nginx}
    order = [at.router, *hops.values()]
    async with aiohttp.ClientSession() as session:
        for name, body in (("JSON, 1 token", chat(max_tokens=1)), ("stream, 8 tokens", chat(stream=True))):
            taken: dict[str, list[float]] = {url: [] for url in order}
            for number in range(count + 20):
                for url in order if number % 2 else reversed(order):
                    began_s = time.perf_counter()
                    async with session.post(
                        url + "/v1/chat/completions", data=body, headers={"content-type": "application/json"}
                    ) as answer:
                        await answer.read()
                    if number >= 20:
                        taken[url].append(1e3 * (time.perf_counter() - began_s))
            for hop, url in hops.items():
                pairs = list(zip(taken[at.router], taken[url], strict=True))
                difference = median(one - other for other, one in pairs)
                ratio = median(one / other for other, one in pairs)
                alone, through = median(taken[at.router]), median(taken[url])
                table.row(name, hop, f"{alone:.2f}", f"{through:.2f}", f"{difference:.2f}", f"{ratio:.3f}")
    await at.stop("nginx")


# --- the prediction ---------------------------------------------------------------------------------------------------


async def load(url: str, rate: float, seconds: float) -> dict[str, list[Seen]]:
    """Returns the requests of both tenants. Equal arguments give equal arrivals and prompts."""
    found = {}
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        for seed, (name, (_, work)) in enumerate(TENANTS.items()):
            own = Work(tokens=range(64, 193), words=work.words, headers={"authorization": f"Bearer key-{name}"})
            clients = await stack.enter_async_context(Clients(session, own, seed))
            clients.poisson(rate / len(TENANTS), lambda: url)
            found[name] = clients
        await asyncio.sleep(seconds)
        await asyncio.gather(*(clients.ended() for clients in found.values()))
        return {name: clients.seen for name, clients in found.items()}


def figures(seen: Sequence[Seen]) -> list[float]:
    """Returns the share in time, and p50 and p95 of the seconds to the first token."""
    firsts_s = [one.first_s - one.sent_s if one.whole and one.first_s is not None else 1e9 for one in seen]
    in_time = sum(first_s <= OBJECTIVE_S for first_s in firsts_s) / len(seen)
    return [in_time, percentile(firsts_s, 0.5), percentile(firsts_s, 0.95)]


def simulated(result: dict[str, Any], begin: str, tenant: str) -> list[float | None]:
    one = next(run for run in result["runs"] if run["policy"].startswith(begin))["by_tenant"][tenant]
    return [one["goodput"], one["ttft_s"]["p50"], one["ttft_s"]["p95"], one["queue_wait_s"]["p95"] or 0.0]


async def prediction(at: Rig, table: Table, rate: float, seconds: float) -> None:
    out = at.folder / f"out-{rate:g}"
    await at.start_shadow(out)
    before = await load(at.shadow, rate, seconds)
    process = at.processes.pop("shadow")
    process.child.send_signal(signal.SIGINT)
    # The report needs the cores for a while, so nothing is measured beside it.
    await process.child.wait()
    result = json.loads((out / "result.json").read_text())
    await at.stop("replica-0", "replica-1")
    await at.start_replicas()
    url = free_url()
    flags = ["--config", str(at.config), "--host", "127.0.0.1", "--port", port_in(url), "--log-format", "json"]
    log = at.folder / f"serve-{rate:g}.log"
    at.processes["serve"] = await start(["serve", *flags, "--state-file", "none"], log)
    await ready(url, at.processes["serve"])
    after = await load(url, rate, seconds)
    await asyncio.sleep(1.0)
    await at.stop("serve", "replica-0", "replica-1")
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    for tenant in TENANTS:
        waits_s = [one["queue_wait_s"] for one in lines if one.get("tenant") == tenant and "queue_wait_s" in one]
        rows: dict[str, list[float | None]] = {
            "router, measured": [*figures(before[tenant]), None],
            "router, simulated": [*simulated(result, POLICY, tenant)[:3], None],
            "llmproxy, predicted": simulated(result, "llmproxy", tenant),
            "llmproxy, after the switch": [*figures(after[tenant]), percentile(waits_s, 0.95)],
        }
        for name, (share, p50_s, p95_s, wait_s) in rows.items():
            shown = [f"{value:.2f}" if value is not None and value < 1e6 else "" for value in (p50_s, p95_s, wait_s)]
            count = len((after if "after" in name else before)[tenant])
            table.row(f"{rate:g}/s", tenant, name, count, f"{share or 0.0:.1%}", *shown)
    await at.start_replicas()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-venv", type=Path, action="append", default=[], help="environment with vllm-router")
    parser.add_argument("--part", action="append", choices=("bytes", "faults", "time", "prediction"))
    parser.add_argument("--rate", type=float, action="append", help="requests per second; repeat it")
    parser.add_argument("--speed", type=float, default=0.5, help="speed of the replicas")
    parser.add_argument("--seconds", type=float, default=40.0, help="length of each load")
    parser.add_argument("--count", type=int, default=200, help="pairs of requests for the added time")
    options = parser.parse_args()
    random.seed(1)
    parts = options.part or ["bytes", "faults", "time", "prediction"]
    async with rig(options.peers_venv, options.speed) as at:
        if set(parts) - {"prediction"}:
            await at.start_shadow(at.folder / "out")
        if "bytes" in parts:
            await same_bytes(at)
        if "faults" in parts:
            await faults(at, options.peers_venv)
        if "time" in parts:
            await added_time(at, options.count)
        if shadow := at.processes.pop("shadow", None):
            await shadow.stop(signal.SIGKILL)
        if "prediction" in parts:
            names = "requests", "in time", "TTFT p50, s", "p95, s", "wait p95, s"
            table = Table("load", "tenant", "", *names, texts=3)
            for rate in options.rate or (5.0, 9.0):
                await prediction(at, table, rate, options.seconds)


if __name__ == "__main__":
    asyncio.run(main())
