"""The clients of the timed soak: several dialects, models and tenants, streams and answers in one piece; some leave."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import aiohttp

from benchmarks.endurance.ledger import End, Ledger, View
from benchmarks.endurance.rig import ADAPTER, ALIAS, key_of

LEAVES = 0.05
"""Share of the clients that leave before their answer has ended."""
LEAVES_AFTER_S = (0.02, 2.0)
TOKENS = (16, 112)
TIMEOUT_S = 120.0
"""Longer than the proxy may keep anybody waiting here."""
PREFIXES = 40
PREFIX_WORDS, OWN_WORDS = 60, 30
TAIL_BYTES = 600


@dataclass(frozen=True, slots=True)
class Dialect:
    """One endpoint: what the prompt is called, what ends a stream, and what an error in one begins with."""

    path: str
    prompt: Callable[[str], Mapping[str, Any]]
    limit: str
    end: bytes
    error: bytes


CHAT = Dialect(
    "/v1/chat/completions",
    lambda text: {"messages": [{"role": "user", "content": text}]},
    "max_tokens",
    b"data: [DONE]\n\n",
    b'data: {"error"',
)
COMPLETIONS = Dialect("/v1/completions", lambda text: {"prompt": text}, "max_tokens", CHAT.end, CHAT.error)
RESPONSES = Dialect(
    "/v1/responses", lambda text: {"input": text}, "max_output_tokens", b'"type":"response.completed"', b"event: error"
)
MESSAGES = Dialect(
    "/v1/messages", CHAT.prompt, "max_tokens", b'{"type":"message_stop"}\n\n', b"event: error"
)  # fmt: skip
DIALECTS = {CHAT: 60, COMPLETIONS: 20, RESPONSES: 10, MESSAGES: 10}
NAMES = {"sim": 35, ADAPTER: 15, ALIAS: 10, "small": 40}
"""What is asked for, as the pools can serve it: three replicas of one, two of the other."""
TENANTS = {"desk": 20, "app": 60, "batch": 20}
STREAMS = 0.65


@dataclass(frozen=True, slots=True)
class SoakRequest:
    """One request, and after how many seconds its client leaves, None where it stays."""

    dialect: Dialect
    tenant: str
    body: Mapping[str, Any]
    leaves_after_s: float | None

    @property
    def stream(self) -> bool:
        return bool(self.body["stream"])


class SoakRequests:
    """What clients request, one after the other; one seed is one order."""

    def __init__(self, seed: int, leaves: float = LEAVES) -> None:
        self._rng = random.Random(seed)
        self._leaves = leaves
        self._prefixes = [self._words(PREFIX_WORDS) for _ in range(PREFIXES)]

    def _words(self, count: int) -> str:
        return " ".join(str(self._rng.randrange(100_000)) for _ in range(count))

    def next(self) -> SoakRequest:
        rng = self._rng
        dialect = _drawn(rng, DIALECTS)
        leaves_after_s = rng.uniform(*LEAVES_AFTER_S) if rng.random() < self._leaves else None
        # Who is to leave requests for more than comes until then.
        tokens = TOKENS[1] if leaves_after_s is not None else rng.randint(*TOKENS)
        text = f"{rng.choice(self._prefixes)} {self._words(OWN_WORDS)}"
        body = {
            "model": _drawn(rng, NAMES),
            **dialect.prompt(text),
            dialect.limit: tokens,
            "stream": rng.random() < STREAMS,
        }
        if dialect in (CHAT, COMPLETIONS):
            body["ignore_eos"] = True
        return SoakRequest(dialect, _drawn(rng, TENANTS), body, leaves_after_s)


def _drawn(rng: random.Random, weighted: Mapping[Any, int]) -> Any:
    return rng.choices(list(weighted), list(weighted.values()))[0]


def sending_traced() -> aiohttp.TraceConfig:
    """Appends to the list that is a request's context when the first of its bytes are sent."""

    async def note(_: aiohttp.ClientSession, context: SimpleNamespace, __: aiohttp.TraceRequestChunkSentParams) -> None:
        context.trace_request_ctx.append(True)

    trace = aiohttp.TraceConfig()
    trace.on_request_chunk_sent.append(note)
    return trace


async def one(session: aiohttp.ClientSession, url: str, request: SoakRequest, request_id: str, ledger: Ledger) -> None:
    """Send one request, and enter into the ledger how it ended for its client."""
    ledger.send(request_id)
    sent: list[bool] = []
    try:
        async with asyncio.timeout(request.leaves_after_s or TIMEOUT_S):
            view = await _sent(session, url, request, request_id, sent)
    except TimeoutError:
        if request.leaves_after_s is None:
            view = View(End.LOST, detail=f"no end within {TIMEOUT_S:g} s")
        else:
            view = View(End.LEFT if sent else End.UNSENT)
    except aiohttp.ClientError as error:
        view = View(End.LOST, detail=f"{type(error).__name__}: {error}")
    ledger.end(request_id, view)


async def _sent(
    session: aiohttp.ClientSession, url: str, request: SoakRequest, request_id: str, sent: list[bool]
) -> View:
    headers = {"authorization": f"Bearer {key_of(request.tenant)}", "x-request-id": request_id}
    async with session.post(
        url + request.dialect.path, json=request.body, headers=headers, trace_request_ctx=sent
    ) as answer:
        tail, broken = b"", False
        try:
            async for piece in answer.content.iter_any():
                # An event that is cut by the border of two pieces is whole in one of the two looks.
                tail += piece
                broken = broken or request.dialect.error in tail
                tail = tail[-TAIL_BYTES:]
        except aiohttp.ClientPayloadError as error:
            return View(End.BROKEN, answer.status, str(error))
    if answer.status != 200:
        return View(End.REFUSED, answer.status, tail.decode(errors="replace")[:200])
    ends_well = request.dialect.end in tail if request.stream else tail.rstrip().endswith(b"}")
    whole = ends_well and not broken
    return View(End.WHOLE, 200) if whole else View(End.BROKEN, 200, tail.decode(errors="replace")[-200:])


class Load:
    """An open loop of Poisson arrivals, until it is asked to stop; every request is one task of its own."""

    def __init__(self, session: aiohttp.ClientSession, url: str, seed: int, ledger: Ledger) -> None:
        self._session = session
        self._url = url
        self._requests = SoakRequests(seed)
        self._rng = random.Random(seed + 1)
        self._ledger = ledger
        self.running: set[asyncio.Task[None]] = set()

    async def offer(self, rate: float, stop: asyncio.Event) -> None:
        """Send `rate` requests per second; when it returns, requests may still be running."""
        loop = asyncio.get_running_loop()
        at_s = loop.time()
        while not stop.is_set():
            at_s += self._rng.expovariate(rate)
            await asyncio.sleep(at_s - loop.time())
            request, request_id = self._requests.next(), f"soak-{self._ledger.sent}"
            task = asyncio.create_task(one(self._session, self._url, request, request_id, self._ledger))
            self.running.add(task)
            task.add_done_callback(self.running.discard)

    async def ended(self) -> None:
        """Wait for those that are running."""
        if self.running:
            await asyncio.wait(self.running)


async def capacity(
    session: aiohttp.ClientSession, url: str, clients: int, warm_s: float, seconds: float, ledger: Ledger
) -> float:
    """Requests per second that are served when nothing lacks work: `clients` that send their next request at once.

    The first `warm_s` are not counted, in which batches fill.
    """
    loop = asyncio.get_running_loop()
    requests, began_s, served = SoakRequests(1, leaves=0.0), loop.time() + warm_s, 0

    async def client(number: int) -> None:
        nonlocal served
        while loop.time() < began_s + seconds:
            await one(session, url, requests.next(), f"capacity-{number}-{ledger.sent}", ledger)
            served += began_s <= loop.time() < began_s + seconds

    async with asyncio.TaskGroup() as tasks:
        for number in range(clients):
            tasks.create_task(client(number))
    return served / seconds


def shown(counts: Mapping[Any, int]) -> str:
    """Counts as a person reads them, the largest first."""
    return json.dumps({str(name): count for name, count in sorted(counts.items(), key=lambda each: -each[1])})
