"""A generation request from acceptance to its last byte, streamed or not."""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from typing import Protocol

import orjson
from aiohttp import web

from llmproxy.lab.simulator.http.answer_events import ResponsesAnswer
from llmproxy.lab.simulator.http.answers import KEEP_ALIVE, AnswerUsage, AnswerWriter, Choice, Head
from llmproxy.lab.simulator.server.answer_text import AnswerText, Wrong
from llmproxy.lab.simulator.server.faults import FaultKind, LaterFault
from llmproxy.lab.simulator.server.metrics import unix_now_s
from llmproxy.lab.simulator.server.nixl import KvLoadError
from llmproxy.lab.simulator.server.pacer import GenerationJob
from llmproxy.lab.simulator.server.requests import ApiError, Body, GenerationRequest, Limits, items
from llmproxy.lab.simulator.server.service import BLOCK_SIZE, Service, engine_dead

STREAM_TYPE = "text/event-stream; charset=utf-8"


class AnswerWriterType(Protocol):
    """The class of an `AnswerWriter`, which also parses the requests of its endpoint."""

    def __call__(self, generation: GenerationRequest, head: Head) -> AnswerWriter: ...
    def parse(self, body: Body, limits: Limits) -> GenerationRequest: ...


def headers_of(content_type: str | None, length: int | None = None) -> dict[str, str]:
    """Returns response headers in vLLM's order and case. A stream has no `length`."""
    headers = {"date": formatdate(usegmt=True), "server": "uvicorn"}
    if length is not None:
        headers["content-length"] = str(length)
    if content_type is not None:
        headers["content-type"] = content_type
    headers["vary"] = "Origin"
    return headers


async def generate(
    service: Service, request: web.BaseRequest, writer_type: AnswerWriterType, body: Body
) -> web.StreamResponse:
    """Answers a request. Raises ApiError. Cancellation, after a client has disconnected, aborts its sequences."""
    try:
        if writer_type is ResponsesAnswer:
            body = service.continued(body)
        generation = writer_type.parse(body, service.limits)
    except ApiError as refused:
        # vLLM rejects invalid requests before they reach its connector.
        if service.nixl is not None and refused.kind != "Bad Request":
            service.nixl.reject(body.get("kv_transfer_params"))
        raise
    service.refuse_if_due()
    if service.faults.hits(FaultKind.SILENT):
        await asyncio.Event().wait()  # Until the client disconnects, even if the fault is cleared before.
    arrived_s = asyncio.get_running_loop().time()
    request_id = request.headers.get("x-request-id") or body.get("request_id") or secrets.token_hex(8)
    head = Head(str(request_id), int(unix_now_s()), service.options.prompt_tokens_details)
    answer = writer_type(generation, head)
    job = service.job(generation, f"{answer.id}-{secrets.token_hex(4)}", arrived_s)
    exchange = _Exchange(service, request, generation, job, answer, service.faults.hit_by(await request.read()))
    with service.counted():
        try:
            await asyncio.sleep(service.frontend_s)
            if service.faults.kind is FaultKind.ENGINE_DEAD:
                raise engine_dead()
            return await (exchange.stream() if generation.stream else exchange.whole())
        finally:
            service.pacer.drop(job)


@dataclass(slots=True)
class _Sent:
    """The progress of a choice: tokens seen, tokens whose text was sent, tokens whose ids were sent, and its end."""

    tokens: int = 0
    text_tokens: int = 0
    id_tokens: int = 0
    ended: bool = False


@dataclass(slots=True)
class _Exchange:
    """An accepted generation request: runs its job, and writes the answer as the tokens come."""

    service: Service
    request: web.BaseRequest
    generation: GenerationRequest
    job: GenerationJob
    answer: AnswerWriter
    deadly: bool = False
    sent: list[_Sent] = field(init=False)
    opened: bool = False
    later: LaterFault | None = None
    # Bytes of the body until a connection reset; None without one.
    bytes_to_reset: int | None = None

    def __post_init__(self) -> None:
        self.sent = [_Sent() for _ in self.job.sequences]

    async def whole(self) -> web.StreamResponse:
        """Sends the answer as one JSON body, when its last token exists."""
        if self.service.faults.hits(FaultKind.STREAM_ERROR):
            raise engine_dead()
        self._submit()
        while not self.job.ended:
            await self.job.wait()
        if self.job.error is not None:
            raise self.job.error
        body = self.answer.whole(self._choices(), self._usage())
        if self.service.nixl is not None and (params := self.service.nixl.params_of(self.job)) is not None:
            body["kv_transfer_params"] = params
        self._keep(body)
        data = orjson.dumps(body)
        response = web.StreamResponse(headers=headers_of("application/json", len(data)))
        await self._prepare(response)
        await self._write(response, data)
        return response

    async def stream(self) -> web.StreamResponse:
        """Sends the head at acceptance, then events for tokens. An error becomes an event."""
        response = web.StreamResponse(headers=headers_of(STREAM_TYPE))
        await self._prepare(response)
        if self.service.faults.hits(FaultKind.STREAM_ERROR):
            await self._events(response, self.answer.broken(engine_dead()))
            return response
        self.later = self.service.faults.hit_later()
        self._submit()
        await self._events(response, self.answer.prologue())
        # The job may end while a slow reader blocks a write.
        while not self.job.ended or self._unsent():
            await self._wait_for_tokens(response)
            await self._events(response, self._fresh_events())
            if self.later is not None and max(sent.tokens for sent in self.sent) == self.later.after_tokens:
                if self.later.kind is FaultKind.STREAM_ERROR:
                    await self._events(response, self.answer.broken(engine_dead()))
                    return response
                if self.later.kind is FaultKind.SILENT:
                    await _until_cancelled()
                await self._reset_after(self.later.after_bytes)
                self.later = None
                await self._events(response, self._fresh_events())
        if self.job.error is not None:
            if isinstance(self.job.error, KvLoadError):
                await self._events(response, self._opening())
            await self._events(response, self.answer.broken(self.job.error))
            return response
        choices, usage = self._choices(), self._usage()
        await self._events(response, self.answer.closing(choices, usage))
        self._keep(self.answer.whole(choices, usage))
        return response

    def _submit(self) -> None:
        self.service.submit(self.job)
        if self.deadly:
            self.service.faults.die()

    async def _wait_for_tokens(self, response: web.StreamResponse) -> None:
        """Waits for tokens, and sends keep-alive comments meanwhile if they are enabled."""
        pause_s = self.service.options.sse_keep_alive_s
        while True:
            try:
                async with asyncio.timeout(pause_s):
                    await self.job.wait()
            except TimeoutError:
                await self._write(response, KEEP_ALIVE)
            else:
                return

    def _fresh_events(self) -> list[bytes]:
        """Returns events for the new tokens. Several tokens of a choice become one delta, as in vLLM."""
        events: list[bytes] = []
        for index, (sent, progress) in enumerate(zip(self.sent, self.job.progress, strict=True)):
            tokens = self._tokens(index)
            ends = progress.finished and tokens == progress.tokens
            if sent.ended or (tokens == sent.tokens and not ends):
                continue
            events += self._opening()
            sent.tokens = tokens
            sent.ended = ends
            reason = self.job.reasons[index] if ends else None
            answer = self._text(index)
            turn = (answer.seed + sent.tokens) % 8 if self.service.options.ragged_deltas and reason is None else -1
            if turn == 0:
                continue
            text = "" if turn == 1 else answer.text(sent.text_tokens, sent.tokens)
            if turn != 1:
                sent.text_tokens = sent.tokens
            part = self._choice(index, text, sent.id_tokens, reason)
            sent.id_tokens = sent.tokens
            events += self.answer.delta(index, part, self._usage())
        return events

    def _unsent(self) -> bool:
        return self.job.finished and not all(sent.ended for sent in self.sent)

    def _tokens(self, index: int) -> int:
        """Returns how many tokens of a choice exist. A fault may keep back the latest."""
        tokens = self.job.progress[index].tokens
        return tokens if self.later is None else min(tokens, self.later.after_tokens)

    def _text(self, index: int) -> AnswerText:
        answer = self.job.answers[index]
        return Wrong(answer.seed) if self.job.progress[index].wrong else answer

    def _choice(self, index: int, text: str, first: int, reason: str | None) -> Choice:
        """Returns a choice with this text, and with the token ids from token `first` on if they are requested."""
        answer = self._text(index)
        ids = answer.tokens(first, self._tokens(index)) if self.generation.return_token_ids else None
        return Choice(text, ids, reason, answer.stop_reason if reason else None)

    def _opening(self) -> list[bytes]:
        """Returns the opening events at the first call, and none at later calls."""
        if self.opened:
            return []
        self.opened = True
        return self.answer.opening(replace(self._usage(), output_tokens=0))

    def _choices(self) -> list[Choice]:
        return [
            self._choice(index, self._text(index).text(0, self._tokens(index)), 0, reason)
            for index, reason in enumerate(self.job.reasons)
        ]

    def _usage(self) -> AnswerUsage:
        firsts = self.job.progress[:: self.generation.choices]
        cached_tokens = sum(progress.cached_tokens for progress in firsts)
        full_tokens = sum(len(prompt) // BLOCK_SIZE * BLOCK_SIZE for prompt in self.generation.prompts)
        output_tokens = sum(map(self._tokens, range(len(self.job.progress))))
        created_tokens = max(full_tokens - cached_tokens, 0)
        return AnswerUsage(self.generation.prompt_tokens, output_tokens, cached_tokens, created_tokens)

    def _keep(self, body: Body) -> None:
        if isinstance(self.answer, ResponsesAnswer) and self.generation.body.get("store", True):
            self.service.keep_response(self.answer.id, body, [*items(self.generation.body["input"]), *body["output"]])

    # --- bytes --------------------------------------------------------------------------------------------------------

    async def _prepare(self, response: web.StreamResponse) -> None:
        await response.prepare(self.request)
        if self.service.faults.hits(FaultKind.RESET):
            await self._reset_after(self.service.faults.after_bytes)

    async def _events(self, response: web.StreamResponse, events: list[bytes]) -> None:
        for event in events:
            await self._write(response, event)

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        if self.bytes_to_reset is not None:
            data = data[: self.bytes_to_reset]
            self.bytes_to_reset -= len(data)
        try:
            await response.write(data)
        except ConnectionResetError:
            await _until_cancelled()
        if self.bytes_to_reset == 0:
            await self._reset()

    async def _reset_after(self, body_bytes: int) -> None:
        self.bytes_to_reset = body_bytes
        if body_bytes == 0:
            await self._reset()

    async def _reset(self) -> None:
        """Resets the connection (RST), after a pause: a reset discards bytes that have not arrived yet."""
        await asyncio.sleep(0.02)
        transport = self.request.transport
        if transport is not None:
            linger_on_for_zero_s = struct.pack("ii", 1, 0)
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_on_for_zero_s)
            transport.abort()
        await _until_cancelled()


async def _until_cancelled() -> None:
    """Waits for the server to cancel this handler of a lost connection. Any other end would be logged as a bug."""
    await asyncio.Event().wait()
