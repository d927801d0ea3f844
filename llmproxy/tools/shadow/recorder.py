"""Records each request of a shadow as a line of a decision log, which `llmproxy simulate` replays.

A line has no text. The blocks of a prompt are hashes with a secret that is never written, so that nobody can compute
them from a text. Tenant and band are chosen as llmproxy would choose them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from io import FileIO
from secrets import randbits
from typing import Any

import orjson
from xxhash import xxh64_intdigest

from llmproxy.config import Config
from llmproxy.core.domain import Outcome, Usage
from llmproxy.core.estimates.tokens import Estimator
from llmproxy.gateway.http.client_address import Client
from llmproxy.gateway.http.errors import Failure
from llmproxy.gateway.http.routes import Work
from llmproxy.gateway.proxying.answers import parse_answer
from llmproxy.gateway.proxying.sse import StreamTap, usage_in_tail
from llmproxy.gateway.request.auth import NO_TENANT, Keys, Tenant, presented_digest
from llmproxy.gateway.request.body_reader import BodyReader
from llmproxy.gateway.request.identity import Identity
from llmproxy.gateway.request.json_scan import BadBody, Slices
from llmproxy.gateway.request.parsed_body import ParsedBody
from llmproxy.gateway.request.prefix_hash import BLOCK_BYTES, ID_BYTES, Chain, answer_bytes
from llmproxy.observe.exit import RequestExit
from llmproxy.observe.writer import LineWriter
from llmproxy.tools.shadow.watcher import Exchange, Held

BLOCK_STEP_TOKENS = 16  # The tokens of a block in an engine. The blocks of a trace are a multiple of it.
LEARN_FROM = 32
LEARN_S = 60.0
"""Lines are held back until `LEARN_FROM` answers have reported their prompt tokens, or until `LEARN_S` seconds are
over. The file begins with the size of the blocks, which depends on the bytes of a token."""
LINES_BYTES_MAX = 16 << 20
NOT_RECORDED = "not recorded"
FULL = "not recorded, because the record is full"
KEYS_MAX = 1_000
FEED_BYTES = 16 << 10
NO_WORK = frozenset(range(400, 500)) - {408, 429, 499}
"""Statuses of requests that an engine rejects at once: they wait in no queue and cost no time. No line is written."""


@dataclass(slots=True)
class Tally:
    """Counts of a shadow by their text in the summary, and its messages to the user."""

    say: Callable[[str], None]
    counts: Counter[str] = field(default_factory=Counter)
    ttfts_s: list[float] = field(default_factory=list)

    def failed(self, count: str, error: Exception) -> None:
        """Counts a failure of the shadow itself. The first failure of each kind is printed."""
        self.counts[count] += 1
        if self.counts[count] == 1:
            self.say(f"{count}: {type(error).__name__}: {error}. Requests are passed on all the same. Said once.")

    def minute(self, is_open: int) -> str:
        """Returns the line of a minute.

        It has all requests so far, and the times to the first token since the last call.
        """
        first, self.ttfts_s = sorted(self.ttfts_s), []
        times = ""
        if first:
            p50, p95 = (first[int(share * (len(first) - 1))] for share in (0.5, 0.95))
            times = f", first token p50 {p50:.2f} s, p95 {p95:.2f} s of {len(first)} streams"
        full = ", the record is full" if self.counts[FULL] else ""
        return f"{time.strftime('%H:%M')}  {self.counts['requests']:,} requests so far, {is_open} open{times}{full}"


class _Lines(LineWriter[bytes]):
    def __init__(self, file: FileIO, tally: Tally) -> None:
        super().__init__("shadow", file, LINES_BYTES_MAX)
        self._tally = tally

    def _encoded(self, line: bytes) -> bytes:
        return line

    def _failed(self, error: OSError) -> None:
        self._tally.failed(NOT_RECORDED, error)

    def _resumed(self, lost: int) -> None:
        self._tally.counts[NOT_RECORDED] += lost


@dataclass(slots=True)
class _Answer:
    usage: Usage | None = None
    # The number of events with data in a stream. 0 if the answer is no stream, or was not kept whole.
    events: int = 0
    failed: bool = False
    # The text of the answer as bytes that continue the prefix chain of the prompt. Empty if unknown.
    text: bytes = b""


class Recorder:
    """Reads finished exchanges one after another, without blocking the event loop for long, and writes their lines.

    Args:
        adapters: The model names that are adapters.
        file_bytes_max: When a line would make the file longer than this, recording ends.
    """

    def __init__(
        self,
        config: Config,
        adapters: Collection[str],
        file: FileIO,
        file_bytes_max: int,
        held: Held,
        tally: Tally,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._adapters = frozenset(adapters)
        self._targets = {model.name: model.target or model.name for model in config.models}
        self._keys, self._identity = Keys(config), Identity(config)
        self._tenants = bool(config.tenants or config.api_keys)
        self._key_names: dict[bytes, str] = {}
        self._reader = BodyReader(prefixes=True)
        self._estimator = Estimator()
        self._held, self._tally = held, tally
        self._lines = _Lines(file, tally)
        self._lines.start()
        self._room_bytes = file_bytes_max
        self._secret = randbits(64)
        self._now = now
        self._began_s = now()
        self._block_tokens = 0
        self._waiting: list[dict[str, Any]] = []
        self._known: list[float] = []
        self._due: deque[Exchange] = deque()
        self._wake, self._turn = asyncio.Event(), asyncio.Lock()

    def take(self, exchange: Exchange) -> None:
        """Queues a finished exchange for recording. Never waits."""
        self._due.append(exchange)
        self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self.catch_up()

    async def catch_up(self) -> None:
        """Records all queued exchanges."""
        async with self._turn:
            while self._due:
                exchange = self._due.popleft()
                try:
                    await self._record(exchange)
                except Exception as error:  # noqa: BLE001 - the request was served, and must not fail for this
                    self._tally.failed(NOT_RECORDED, error)
                finally:
                    self._held.drop(exchange)

    def close(self) -> None:
        """Writes all lines that wait, and closes the file."""
        self._learned()
        self._lines.close()

    # --- one request --------------------------------------------------------------------------------------------------

    async def _record(self, exchange: Exchange) -> None:
        counts, route = self._tally.counts, exchange.route
        if route is None or route.work is Work.NOTHING:
            counts["other paths"] += 1
            return
        counts["requests"] += 1
        if exchange.unread:
            counts["unread: too large, or too many at once"] += 1
            return
        try:
            content_type = exchange.headers.get("content-type", "")
            parsed = await self._reader.read(bytes(exchange.body), route.kind, content_type)
        except BadBody:
            counts["unread: the body is no request"] += 1
            return
        answer = await self._reader.in_turns(_read_answer(exchange, parsed))
        outcome = _outcome(exchange, answer)
        if outcome is not Outcome.COMPLETED:
            counts["answered with an error, or cut" if outcome is not Outcome.CANCELLED else "clients left"] += 1
        if exchange.status in NO_WORK:
            return
        line = self._line(exchange, parsed, answer) | {"outcome": outcome.value}
        if parsed.stream and outcome is Outcome.COMPLETED and exchange.first_byte_s is not None:
            self._tally.ttfts_s.append(exchange.first_byte_s - exchange.arrived_s)
        self._write(line)

    def _line(self, exchange: Exchange, parsed: ParsedBody, answer: _Answer) -> dict[str, Any]:
        model = parsed.model or ""
        target = self._targets.get(model, model)
        record = RequestExit(request_id="", method=exchange.method, path=exchange.path)
        tenant = self._classify(record, exchange, model, target)
        usage = answer.usage
        prompt_tokens, _ = self._estimator.tokens(target, parsed)
        output_tokens: int | None = max(0, answer.events - 1) or None
        if usage is not None:
            prompt_tokens, output_tokens = max(1, usage.prompt_tokens), usage.output_tokens
            self._estimator.learn(target, parsed.prompt_bytes, parsed.sequences, usage)
            if not self._block_tokens and parsed.chain is not None and parsed.chain.hashes:
                self._known.append(self._estimator.bytes_per_token(target))
        elif output_tokens is not None:
            self._tally.counts["lengths counted by events, because the client asked for no usage"] += 1
        streaming_s = exchange.ended_s - (exchange.first_byte_s or exchange.ended_s)
        found = {
            "at_s": round(exchange.arrived_s - self._began_s, 6),
            "status": exchange.status,
            "model": target,
            "adapter": target if target in self._adapters else None,
            "tenant": tenant,
            "criticality": record.level,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "cached_tokens": None if usage is None else usage.cached_tokens,
            "stream": parsed.stream,
            "ttft_s": round(exchange.first_byte_s - exchange.arrived_s, 6)
            if parsed.stream and exchange.first_byte_s is not None
            else None,
            "tpot_s": round(streaming_s / (output_tokens - 1), 6)
            if parsed.stream and output_tokens is not None and output_tokens > 1
            else None,
            "duration_s": round(exchange.ended_s - exchange.arrived_s, 6),
            "ttft_slo_s": record.ttft_slo_s,
            "tpot_slo_s": record.tpot_slo_s,
            "chain": self._chain(parsed, answer, target),
        }
        return {name: value for name, value in found.items() if value is not None}

    def _classify(self, record: RequestExit, exchange: Exchange, model: str, target: str) -> str:
        """Sets band and objective of the record, and returns the name of the tenant.

        If llmproxy would refuse the request, this is counted. If the configuration has neither tenants nor `api_keys`,
        each key is a tenant. Otherwise the flow of a request without a tenant is its tenant.
        """
        tenant: Tenant = NO_TENANT
        try:
            tenant = self._keys.check(exchange.headers)
            trusted = self._identity.trusts(Client(exchange.address, certain=True), tenant)
            self._identity.classify(record, exchange.headers, trusted, model, target, tenant)
        except Failure as failure:
            self._tally.counts[f"llmproxy would refuse with {failure.status}"] += 1
        if tenant.name or self._tenants:
            return tenant.name or record.flow or "default"
        digest = presented_digest(exchange.headers)
        if digest == sha256(b"").digest():
            return "default"
        if digest not in self._key_names and len(self._key_names) < KEYS_MAX:
            self._key_names[digest] = f"key-{len(self._key_names) + 1}"
        return self._key_names.get(digest, "other keys")

    def _chain(self, parsed: ParsedBody, answer: _Answer, target: str) -> tuple[int, ...] | None:
        chain: Chain | None = parsed.chain
        if chain is None or parsed.prompt_tokens is not None:
            return None
        if answer.text:
            chain = chain.extended(answer.text)
        return tuple(
            xxh64_intdigest(block.to_bytes(8, "little"), self._secret) >> 11 for block in chain.hashes_on(target, None)
        )

    # --- lines --------------------------------------------------------------------------------------------------------

    def _write(self, line: dict[str, Any]) -> None:
        if self._block_tokens:
            self._put(line)
            return
        self._waiting.append(line)
        if len(self._known) >= LEARN_FROM or self._now() - self._began_s > LEARN_S:
            self._learned()

    def _learned(self) -> None:
        """Decides the size of the blocks, and writes the first line of the file and all lines that wait."""
        if self._block_tokens:
            return
        token_bytes = self._known[-1] if self._known else float(ID_BYTES)
        self._block_tokens = BLOCK_STEP_TOKENS * max(1, round(BLOCK_BYTES / token_bytes / BLOCK_STEP_TOKENS))
        ago = timedelta(seconds=self._now() - self._began_s)
        header = {
            "llmproxy_decisions": 1,
            "wall_time": (datetime.now(UTC) - ago).isoformat(),
            "block_tokens": self._block_tokens,
        }
        self._put(header)
        for line in self._waiting:
            self._put(line)
        self._waiting.clear()

    def _put(self, line: Mapping[str, Any]) -> None:
        written = dict(line)
        if (chain := written.pop("chain", None)) is not None:
            tokens = written["prompt_tokens"] + written.get("output_tokens", 0)
            written["blocks"] = chain[: tokens // self._block_tokens]
        data = orjson.dumps(written, option=orjson.OPT_APPEND_NEWLINE)
        self._room_bytes -= len(data)
        if self._room_bytes < 0:
            if not self._tally.counts[FULL]:
                self._tally.say("The record is full and ends here: --record-mb sets its size.")
            self._tally.counts[FULL] += 1
            return
        self._lines.put(data, len(data))
        self._tally.counts["recorded"] += "at_s" in written


def _read_answer(exchange: Exchange, parsed: ParsedBody) -> Slices[_Answer]:
    found = _Answer()
    if exchange.answer_headers.get("content-encoding", "identity") != "identity":
        return found
    data = bytes(exchange.answer)
    if "text/event-stream" in exchange.answer_headers.get("content-type", ""):
        tap = StreamTap()
        for start in range(0, len(data), FEED_BYTES):
            tap.feed(data[start : start + FEED_BYTES])
            yield
        tap.flush()
        found.usage, found.failed = tap.usage, tap.error_seen
        if not exchange.cut:
            found.events = tap.data_events
    else:
        found.usage = usage_in_tail(data[-(64 << 10) :])
    if exchange.complete and not exchange.cut and parsed.chain is not None and parsed.sequences == 1:
        answer = yield from parse_answer(data, parsed.kind)
        if answer is not None:
            found.text = answer_bytes(answer, parsed.kind)
    return found


def _outcome(exchange: Exchange, answer: _Answer) -> Outcome:
    if exchange.complete and 200 <= exchange.status < 300 and not answer.failed:
        return Outcome.COMPLETED
    if exchange.left:
        return Outcome.CANCELLED
    return Outcome.BROKEN_STREAM if 200 <= exchange.status < 300 else Outcome.UPSTREAM_STATUS
