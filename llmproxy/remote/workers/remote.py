"""Worker side: replacements of the scheduler's dispatcher, estimator, metrics and pages, which send messages to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import count
from typing import Any

from aiohttp import web

from llmproxy.core.backends.catalogue import Target
from llmproxy.core.domain import AdmissionKind, Grant, Refused, Request, Usage, Verdict
from llmproxy.core.estimates.tokens import Estimator
from llmproxy.core.lease_events import LeaseEvent, Returned
from llmproxy.core.placement.staged import as_stage
from llmproxy.gateway.admin.adapters import BODY_BYTES_MAX
from llmproxy.gateway.http.errors import Failure
from llmproxy.gateway.proxying.rules import Rulebook
from llmproxy.gateway.request.body import read_body
from llmproxy.observe import logs
from llmproxy.observe.exit import RequestExit
from llmproxy.remote.workers import protocol
from llmproxy.remote.workers.channel import Channel
from llmproxy.remote.workers.page import PASSED_ON
from llmproxy.scheduling.dispatcher import shutting_down
from llmproxy.scheduling.lease import Admitted, Lease

CallAnswer = protocol.LeaseGranted | protocol.NameResolved | protocol.PageResponse
_FRAMING = frozenset({b"content-length", b"transfer-encoding", b"expect"})
"""Headers about the framing of a body, which differs on each connection."""


class Calls:
    """Makes calls to the scheduler or leader. All pending calls are refused once the connection is lost."""

    def __init__(self, channel: Channel[Any], serial: Iterator[int] | None = None) -> None:
        """`serial` yields call numbers. By default, they count from 1."""
        self._channel = channel
        self._serial = count(1) if serial is None else serial
        self._open: dict[int, asyncio.Future[CallAnswer]] = {}

    async def answer(self, message: Callable[[int], protocol.Message]) -> CallAnswer:
        """Send the message that `message` returns for a new call number, and wait for the answer. Raises Refused.

        Cancellation is safe: it sends `CancelCall`, and the other side ends a lease that it has granted meanwhile.
        """
        call, answer = self._send(message)
        try:
            return await answer
        except asyncio.CancelledError:
            # Needed even if the answer has arrived already, so that the scheduler ends the granted lease.
            self._channel.send(protocol.CancelCall(call))
            raise
        finally:
            del self._open[call]
            # Avoids a reference cycle through the exception, which only the garbage collector could free.
            del answer

    def _send(self, message: Callable[[int], protocol.Message]) -> tuple[int, asyncio.Future[CallAnswer]]:
        if self._channel.lost:
            raise shutting_down()
        call = next(self._serial)
        answer = self._open[call] = asyncio.get_running_loop().create_future()
        self._channel.send(message(call))
        return call, answer

    @contextmanager
    def lasting(self, message: Callable[[int], protocol.Message], refused: Callable[[], None]) -> Iterator[None]:
        """Keep a call open during the block. `refused` is called if it is refused or the connection is lost."""
        call, answer = self._send(message)

        def ended(answer: asyncio.Future[CallAnswer]) -> None:
            if not answer.cancelled() and answer.exception() is not None and call in self._open:
                refused()

        answer.add_done_callback(ended)
        try:
            yield
        finally:
            self._channel.send(protocol.CancelCall(call))
            del self._open[call]
            answer.cancel()

    def answered(self, message: CallAnswer | protocol.CallRefused) -> None:
        """Resolve a pending call. Does nothing if the call was cancelled."""
        answer = self._open.get(message.call)
        if answer is None or answer.done():
            return
        if isinstance(message, protocol.CallRefused):
            answer.set_exception(Refused(message.outcome, message.message, message.retry_after_s))
        else:
            answer.set_result(message)

    def lost(self) -> None:
        """Refuse all pending calls, because the connection is lost."""
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(shutting_down())


class RemoteDispatcher:
    """A `Leasing` that calls the scheduler process. It resolves known names itself."""

    def __init__(self, channel: Channel[protocol.ToWorker], calls: Calls) -> None:
        self._channel = channel
        self._calls = calls
        self._leases: dict[int, Lease] = {}
        self._targets: Mapping[str, Target] = {}
        self._unnamed: Target | None = None
        self.shutdown = protocol.ShutdownState()

    @property
    def draining(self) -> bool:
        return self.shutdown.draining

    @property
    def granting(self) -> bool:
        return self.shutdown.granting

    def admit(
        self, request: Request, excluded: frozenset[str] = frozenset(), entry: AdmissionKind = AdmissionKind.NEW
    ) -> Admitted:
        """See `Dispatcher.admit`."""
        return Admitted(self, request, excluded, entry)

    async def wait(self, request: Request, excluded: frozenset[str], entry: AdmissionKind) -> Lease:
        """Wait for the lease of a request; see `Dispatcher.admit`."""
        asked_s = _now()
        granted = await self._calls.answer(lambda call: protocol.Admit(call, request, excluded, entry))
        assert isinstance(granted, protocol.LeaseGranted)
        # Each loop reads the clock once a turn, so the scheduler's time may be earlier than the time of asking.
        at_s = max(asked_s, granted.at_s)
        grant = Grant(
            granted.lease, as_stage(request, granted.stage), granted.placed, at_s, granted.queued_ahead, granted.why,
            granted.left_s,
        )  # fmt: skip
        lease = self._leases[granted.lease] = Lease(grant, self.apply)
        return lease

    def apply(self, event: LeaseEvent, now: float) -> None:
        """Report an event of a lease to the scheduler, which uses its own clock."""
        del now
        if type(event) is Returned:
            del self._leases[event.lease]
        self._channel.send(event)

    async def resolve(
        self, name: str | None, no_backend_wait_s: float, body_bytes: int, key: str = "", beside: str | None = None
    ) -> Target:
        """See `Dispatcher.resolve`. The scheduler resolves names that this worker does not know."""
        known = self._unnamed if name is None else self._targets.get(name)
        if known is not None:
            return known
        resolved = await self._calls.answer(
            lambda call: protocol.Resolve(call, name, no_backend_wait_s, body_bytes, key, beside)
        )
        assert isinstance(resolved, protocol.NameResolved)
        return resolved.target

    def response_stored(self, response_id: str, backend: str, tenant: str) -> None:
        """Report a stored response at once: its client may refer to it at another worker once the head has come."""
        self._channel.send(protocol.ResponseStored(response_id, backend, tenant))
        self._channel.flush()

    async def caught_up(self) -> None:
        """Wait for all messages that the scheduler has sent so far. They arrive before the answer to this call."""
        with suppress(Refused):
            await self._calls.answer(lambda call: protocol.Resolve(call, None, 0.0, 0))

    def direct(self, backend: str, cut: Callable[[], None]) -> AbstractContextManager[None]:
        """See `Dispatcher.direct`."""
        if self.draining:
            raise shutting_down()
        return self._calls.lasting(lambda call: protocol.DirectRequest(call, backend), cut)

    def ended(self, request: Request, met: bool | None) -> None:
        self._channel.send(protocol.RequestEnded(request.id, met))

    def cached(self, grant: Grant, hashes: Sequence[int]) -> None:
        self._channel.send(protocol.PrefixCached(grant.request.pool, grant.lease, grant.placed.backend, tuple(hashes)))

    # --- messages of the scheduler ----------------------------------------------------------------------------------

    def cut(self, message: protocol.LeaseCut) -> None:
        """End the attempt of a lease, unless the lease was returned already."""
        # In the next turn of the loop, after the task has received its lease.
        asyncio.get_running_loop().call_soon(self._cut, message)

    def _cut(self, message: protocol.LeaseCut) -> None:
        lease = self._leases.get(message.lease)
        if lease is not None:
            lease.cut(revoked=message.revoked)

    def set_names(self, known: protocol.KnownBackends) -> None:
        """Replace the names that this worker resolves."""
        self._targets, self._unnamed = known.targets, known.unnamed

    def lost(self) -> None:
        """Refuse all calls and new requests, because the scheduler is gone."""
        self.shutdown = protocol.ShutdownState(leaving=True, draining=True, granting=False)
        self._calls.lost()


class RemoteEstimator(Estimator):
    """Reports the usage of each response to the scheduler, which learns from all workers and sends estimates."""

    def __init__(self, channel: Channel[protocol.ToWorker]) -> None:
        super().__init__()
        self._channel = channel

    def learn(self, model: str, prompt_bytes: int | None, sequences: int | None, usage: Usage) -> None:
        self._channel.send(protocol.UsageLearned(model, prompt_bytes, sequences, usage))


class RemoteExits:
    """An `ExitSink` that forwards everything to the scheduler process."""

    def __init__(self, channel: Channel[protocol.ToWorker]) -> None:
        self._channel = channel

    def record(self, ended: RequestExit) -> None:
        self._channel.send(protocol.ExitReport(ended))
        if lost := logs.take_lines_lost():
            self.log_lines_lost(lost)

    def attempted(self, backend: str, verdict: Verdict) -> None:
        self._channel.send(protocol.AttemptEnded(backend, verdict))

    def log_lines_lost(self, lines: int) -> None:
        self._channel.send(protocol.LogLinesLost(lines))


class RemotePages:
    """The `Pages` of a process that forwards requests to the scheduler or leader, which also checks keys."""

    def __init__(self, calls: Calls, rulebook: Rulebook) -> None:
        self._calls = calls
        self._rulebook = rulebook

    async def show(self, path: str, request: web.BaseRequest) -> web.Response:
        del path
        return await self._forward(request)

    async def administer(self, path: str, request: web.BaseRequest, on_admin_port: bool) -> web.Response:
        del path, on_admin_port
        return await self._forward(request)

    async def get(self, raw_path: str, request: web.BaseRequest) -> protocol.PageResponse:
        """Request another page for the client of this request, without a body. Raises Failure."""
        return await self._ask(request, None, raw_path)

    async def _forward(self, request: web.BaseRequest) -> web.Response:
        response = await self._ask(request, None)
        if response.status == 100:
            # Read only when it is needed, so that a client without permission is refused first.
            body = await read_body(request, BODY_BYTES_MAX, self._rulebook.current.config.clients)
            response = await self._ask(request, body)
        return web.Response(
            status=response.status, reason=response.reason, headers=list(response.headers), body=response.body
        )

    async def _ask(
        self, request: web.BaseRequest, body: bytes | None, raw_path: str | None = None
    ) -> protocol.PageResponse:
        raw = _raw(request, body, raw_path or request.raw_path)
        try:
            response = await self._calls.answer(
                lambda call: protocol.PageRequest(call, raw, request.remote or "", request.get(PASSED_ON, 0) + 1)
            )
        except Refused as refused:
            raise Failure.from_refused(refused) from None
        assert isinstance(response, protocol.PageResponse)
        return response


def _raw(request: web.BaseRequest, body: bytes | None, raw_path: str) -> bytes:
    """Returns the bytes of a request with this path. Without a `body`, `Expect` makes the server ask for it."""
    fields = [*request.raw_headers]
    if body is not None:
        fields = [field for field in fields if field[0].lower() not in _FRAMING]
        fields.append((b"Content-Length", b"%d" % len(body)))
    elif request.can_read_body and "expect" not in request.headers:
        fields.append((b"Expect", b"100-continue"))
    version = f"HTTP/{request.version.major}.{request.version.minor}"
    first = f"{request.method} {raw_path} {version}\r\n".encode("utf-8", "surrogateescape")
    return first + b"".join(b"%b: %b\r\n" % field for field in fields) + b"\r\n" + (body or b"")


def _now() -> float:
    return asyncio.get_running_loop().time()
