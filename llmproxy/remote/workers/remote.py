"""What a worker uses in place of the scheduler's dispatcher, estimator, metrics and pages: each sends messages."""

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
"""Header fields that describe how a body is sent on its connection."""


class Calls:
    """Calls of this worker that were not answered yet. When the scheduler is gone, every new call is refused."""

    def __init__(self, channel: Channel[Any], serial: Iterator[int] | None = None) -> None:
        """`serial` numbers the calls; from 1 upwards unless given."""
        self._channel = channel
        self._serial = count(1) if serial is None else serial
        self._open: dict[int, asyncio.Future[CallAnswer]] = {}

    async def answer(self, message: Callable[[int], protocol.Message]) -> CallAnswer:
        """Send the message that `message` makes of the number of this call, and wait. Raises Refused."""
        call, answer = self._send(message)
        try:
            return await answer
        except asyncio.CancelledError:
            # Also where the answer has arrived already: the scheduler then ends the lease that it granted.
            self._channel.send(protocol.CancelCall(call))
            raise
        finally:
            del self._open[call]
            # Its exception would refer back to it: the cycle would stay until the garbage collector runs.
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
        """A call that lasts as long as the block. `refused` is called when it is refused or the scheduler is gone."""
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
        """An answer has arrived. Its call may have been cancelled."""
        answer = self._open.get(message.call)
        if answer is None or answer.done():
            return
        if isinstance(message, protocol.CallRefused):
            answer.set_exception(Refused(message.outcome, message.message, message.retry_after_s))
        else:
            answer.set_result(message)

    def lost(self) -> None:
        """The scheduler is gone: all calls are refused."""
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(shutting_down())


class RemoteDispatcher:
    """`Leasing`, by calls of the scheduler process. Names that the scheduler has sent are resolved here."""

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
        """The lease of a request; see `admit`."""
        asked_s = _now()
        granted = await self._calls.answer(lambda call: protocol.Admit(call, request, excluded, entry))
        assert isinstance(granted, protocol.LeaseGranted)
        # A loop reads the clock once a turn: the scheduler may have read it before this worker asked.
        at_s = max(asked_s, granted.at_s)
        grant = Grant(
            granted.lease, as_stage(request, granted.stage), granted.placed, at_s, granted.queued_ahead, granted.why,
            granted.left_s,
        )  # fmt: skip
        lease = self._leases[granted.lease] = Lease(grant, self)
        return lease

    def returned(self, lease: Lease) -> None:
        """A lease has ended."""
        del self._leases[lease.grant.lease]
        self._channel.send(protocol.LeaseReturned(lease.grant.lease, lease.verdict, lease.usage))

    async def resolve(
        self, name: str | None, hold_s: float, body_bytes: int, key: str = "", beside: str | None = None
    ) -> Target:
        """See `Dispatcher.resolve`, which is called for names that are not known here."""
        known = self._unnamed if name is None else self._targets.get(name)
        if known is not None:
            return known
        resolved = await self._calls.answer(lambda call: protocol.Resolve(call, name, hold_s, body_bytes, key, beside))
        assert isinstance(resolved, protocol.NameResolved)
        return resolved.target

    def response_stored(self, response_id: str, backend: str, tenant: str) -> None:
        """Report a stored response at once: its client may name it to another worker as soon as it has the head."""
        self._channel.send(protocol.ResponseStored(response_id, backend, tenant))
        self._channel.flush()

    async def caught_up(self) -> None:
        """Wait until this worker knows what the scheduler knows now. Messages arrive in order, before the answer."""
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

    # --- events of leases -------------------------------------------------------------------------------------------

    def recomputing(self, grant: Grant) -> None:
        self._channel.send(protocol.LeaseRecomputing(grant.lease))

    def started(self, grant: Grant, now: float) -> None:
        del now
        self._channel.send(protocol.LeaseStarted(grant.lease))

    def committed(self, grant: Grant, now: float) -> None:
        del now
        self._channel.send(protocol.LeaseCommitted(grant.lease))

    def progress(self, grant: Grant, output_tokens: int, now: float) -> None:
        del now
        self._channel.send(protocol.LeaseProgress(grant.lease, output_tokens))

    # --- messages of the scheduler ----------------------------------------------------------------------------------

    def cut(self, message: protocol.LeaseCut) -> None:
        """The attempt of a lease has to end; the lease may have been given back already."""
        # In the next turn, after the task that was granted the lease knows of it.
        asyncio.get_running_loop().call_soon(self._cut, message)

    def _cut(self, message: protocol.LeaseCut) -> None:
        lease = self._leases.get(message.lease)
        if lease is not None:
            lease.cut(revoked=message.revoked)

    def take_names(self, known: protocol.KnownBackends) -> None:
        """Resolve these names from now on."""
        self._targets, self._unnamed = known.targets, known.unnamed

    def lost(self) -> None:
        """The scheduler is gone: all calls are refused, and no lease is granted any more."""
        self.shutdown = protocol.ShutdownState(leaving=True, draining=True, granting=False)
        self._calls.lost()


class RemoteEstimator(Estimator):
    """Sends the usage of each answer to the scheduler, and gets the estimates that it learns from all workers."""

    def __init__(self, channel: Channel[protocol.ToWorker]) -> None:
        super().__init__()
        self._channel = channel

    def learn(self, model: str, prompt_bytes: int | None, sequences: int | None, usage: Usage) -> None:
        self._channel.send(protocol.UsageLearned(model, prompt_bytes, sequences, usage))


class RemoteExits:
    """The `ExitSink` of a worker: the scheduler process takes note of everything."""

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
    """`Pages`, answered by the scheduler process, which checks keys and knows the state."""

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
        """Another page, on behalf of the client of this request, which has no body. Raises Failure."""
        return await self._ask(request, None, raw_path)

    async def _forward(self, request: web.BaseRequest) -> web.Response:
        response = await self._ask(request, None)
        if response.status == 100:
            # The body is read only when it is needed: a client without permission is refused first.
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
    """A request for this path, else as it came, with its body; None makes the server ask for the body."""
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
