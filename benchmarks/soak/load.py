"""The clients of the soak: four APIs, several models and tenants, answers with and without a stream.

Some clients leave.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import aiohttp

from benchmarks.soak.fleet import ADAPTER, ALIAS, key_of
from benchmarks.soak.ledger import End, Ledger, View

LEAVES = 0.05  # The share of the clients that leave before the end of their answer.
LEAVES_AFTER_S = (0.02, 2.0)
TOKENS = (16, 112)
TIMEOUT_S = 120.0  # The time limit of a request, longer than any wait in the proxy.
PREFIXES = 40
PREFIX_WORDS, OWN_WORDS = 60, 30
TAIL_BYTES = 600


@dataclass(frozen=True, slots=True)
class Dialect:
    """An API endpoint."""

    path: str
    prompt: Callable[[str], Mapping[str, Any]]
    limit: str
    """The member of the body that limits the answer."""
    end: bytes
    """The bytes with which a complete stream ends."""
    error: bytes
    """The bytes with which an error event begins."""


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
MESSAGES = Dialect("/v1/messages", CHAT.prompt, "max_tokens", b'{"type":"message_stop"}\n\n', b"event: error")
DIALECTS = {CHAT: 60, COMPLETIONS: 20, RESPONSES: 10, MESSAGES: 10}
NAMES = {"sim": 35, ADAPTER: 15, ALIAS: 10, "small": 40}
"""The names of the models, with shares in proportion to the capacity of both pools."""
TENANTS = {"desk": 20, "app": 60, "batch": 20}
STREAMS = 0.65


@dataclass(frozen=True, slots=True)
class SoakRequest:
    """A request of the soak. `leaves_after_s` is None if its client stays to the end."""

    dialect: Dialect
    tenant: str
    body: Mapping[str, Any]
    leaves_after_s: float | None


class SoakRequests:
    """Makes random requests. Equal seeds give equal requests."""

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
        # A client that leaves asks for more tokens than it waits for.
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
    """Returns a trace configuration that notes when the first bytes of a request are sent.

    The time is appended to the list in the context of the request.
    """

    async def note(_: aiohttp.ClientSession, context: SimpleNamespace, __: aiohttp.TraceRequestChunkSentParams) -> None:
        context.trace_request_ctx.append(True)

    trace = aiohttp.TraceConfig()
    trace.on_request_chunk_sent.append(note)
    return trace


@dataclass(slots=True)
class Sender:
    """Sends requests, and records in the ledger how each ended for its client."""

    session: aiohttp.ClientSession
    url: str
    ledger: Ledger

    async def one(self, request: SoakRequest) -> None:
        request_id = f"soak-{self.ledger.sent}"
        self.ledger.send(request_id)
        sent: list[bool] = []
        try:
            async with asyncio.timeout(request.leaves_after_s or TIMEOUT_S):
                view = await self._view(request, request_id, sent)
        except TimeoutError:
            if request.leaves_after_s is None:
                view = View(End.LOST, detail=f"no end within {TIMEOUT_S:g} s")
            else:
                view = View(End.LEFT if sent else End.UNSENT)
        except aiohttp.ClientError as error:
            view = View(End.LOST, detail=f"{type(error).__name__}: {error}")
        self.ledger.end(request_id, view)

    async def _view(self, request: SoakRequest, request_id: str, sent: list[bool]) -> View:
        headers = {"authorization": f"Bearer {key_of(request.tenant)}", "x-request-id": request_id}
        dialect, url = request.dialect, self.url + request.dialect.path
        async with self.session.post(url, json=request.body, headers=headers, trace_request_ctx=sent) as answer:
            tail, broken = b"", False
            try:
                async for piece in answer.content.iter_any():
                    # An event that is cut by the border of two pieces is whole in the first or the second tail.
                    tail += piece
                    broken = broken or dialect.error in tail
                    tail = tail[-TAIL_BYTES:]
            except aiohttp.ClientPayloadError as error:
                return View(End.BROKEN, answer.status, str(error))
        text = tail.decode(errors="replace")
        if answer.status != 200:
            return View(End.REFUSED, answer.status, text[:200])
        complete = dialect.end in tail if request.body["stream"] else tail.rstrip().endswith(b"}")
        return View(End.WHOLE, 200) if complete and not broken else View(End.BROKEN, 200, text[-200:])

    async def offer(self, rate: float, seed: int, stop: asyncio.Event) -> None:
        """Sends `rate` requests per second at random moments until `stop` is set.

        Then waits until all open requests have ended.
        """
        loop, rng, requests = asyncio.get_running_loop(), random.Random(seed + 1), SoakRequests(seed)
        at_s = loop.time()
        async with asyncio.TaskGroup() as tasks:
            while not stop.is_set():
                at_s += rng.expovariate(rate)
                await asyncio.sleep(at_s - loop.time())
                tasks.create_task(self.one(requests.next()))

    async def capacity(self, clients: int, warm_s: float, seconds: float) -> float:
        """Returns the requests per second of a full fleet.

        `clients` send one request after the other. The first `warm_s`, in which batches fill, do not count.
        """
        loop, requests, served = asyncio.get_running_loop(), SoakRequests(1, leaves=0.0), 0
        begins_s = loop.time() + warm_s

        async def client() -> None:
            nonlocal served
            while loop.time() < begins_s + seconds:
                await self.one(requests.next())
                served += begins_s <= loop.time() < begins_s + seconds

        async with asyncio.TaskGroup() as tasks:
            for _ in range(clients):
                tasks.create_task(client())
        return served / seconds
