"""The worker's side: a dispatcher, an estimator, counters and pages that are those of the scheduler process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import count

from aiohttp import web

from llmproxy.core.backends.catalogue import Target
from llmproxy.core.domain import Entry, Grant, Refused, Request, Usage, Verdict
from llmproxy.core.estimates.tokens import Estimator
from llmproxy.dispatcher import Admitted, Lease, shutting_down
from llmproxy.gateway.admin.adapters import BODY_BYTES_MAX
from llmproxy.gateway.http.errors import Failure
from llmproxy.gateway.proxying.response_writer import read_body
from llmproxy.gateway.proxying.rules import Rulebook
from llmproxy.telemetry import logs
from llmproxy.telemetry.exit import RequestExit
from llmproxy.workers import protocol
from llmproxy.workers.channel import Channel

Answered = protocol.LeaseGranted | protocol.NameResolved | protocol.PageResponse
_FRAMING = frozenset({b"content-length", b"transfer-encoding", b"expect"})
"""Fields that speak of how a body comes on its connection."""


class Calls:
    """What this worker asked and was not answered yet. When the scheduler is gone, nobody is let in any more."""

    def __init__(self, channel: Channel[protocol.ToWorker]) -> None:
        self._channel = channel
        self._serial = count(1)
        self._open: dict[int, asyncio.Future[Answered]] = {}

    async def answer(self, asked: Callable[[int], protocol.Message]) -> Answered:
        """Send what `asked` makes of the number of this call, and wait. Raises Refused."""
        if self._channel.lost:
            raise shutting_down()
        call = next(self._serial)
        answer: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        self._open[call] = answer
        self._channel.send(asked(call))
        try:
            return await answer
        except asyncio.CancelledError:
            # Also where the answer is here already: the scheduler then ends the lease that was granted.
            self._channel.send(protocol.CancelCall(call))
            raise
        finally:
            del self._open[call]
            # What it raises would lead back to it, and both would stay until cycles are looked for.
            del answer

    @contextmanager
    def lasting(self, asked: Callable[[int], protocol.Message], refused: Callable[[], None]) -> Iterator[None]:
        """A call that lasts as long as the block, unless it is refused, or there is nobody to refuse it any more."""
        if self._channel.lost:
            raise shutting_down()
        call = next(self._serial)
        answer: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        self._open[call] = answer

        def ended(answer: asyncio.Future[Answered]) -> None:
            if not answer.cancelled() and answer.exception() is not None and call in self._open:
                refused()

        answer.add_done_callback(ended)
        self._channel.send(asked(call))
        try:
            yield
        finally:
            self._channel.send(protocol.CancelCall(call))
            del self._open[call]
            answer.cancel()

    def answered(self, message: Answered | protocol.CallRefused) -> None:
        """The answer to a call; nobody may be waiting for it any more."""
        answer = self._open.get(message.call)
        if answer is None or answer.done():
            return
        if isinstance(message, protocol.CallRefused):
            answer.set_exception(Refused(message.outcome, message.message, message.retry_after_s))
        else:
            answer.set_result(message)

    def lost(self) -> None:
        """There will be no more answers."""
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(shutting_down())


class RemoteDispatcher:
    """`Leasing`, by asking the process that schedules. What names mean is known here, as far as it was told."""

    def __init__(self, channel: Channel[protocol.ToWorker], calls: Calls) -> None:
        self._channel = channel
        self._calls = calls
        self._leases: dict[int, Lease] = {}
        self._targets: Mapping[str, Target] = {}
        self._unnamed: Target | None = None
        self.standing = protocol.ShutdownState()

    @property
    def draining(self) -> bool:
        return self.standing.draining

    @property
    def granting(self) -> bool:
        return self.standing.granting

    @property
    def leases(self) -> int:
        return len(self._leases)

    def admit(self, request: Request, excluded: frozenset[str] = frozenset(), entry: Entry = Entry.NEW) -> Admitted:
        """See `Dispatcher.admit`."""
        return Admitted(self, request, excluded, entry)

    async def wait(self, request: Request, excluded: frozenset[str], entry: Entry) -> Lease:
        """The lease of a request; see `admit`."""
        asked_s = _now()
        granted = await self._calls.answer(lambda call: protocol.Admit(call, request, excluded, entry))
        assert isinstance(granted, protocol.LeaseGranted)
        # Loops read the clock once a turn: that of the scheduler may have done so before this one asked.
        at_s = max(asked_s, granted.at_s)
        grant = Grant(
            granted.lease, request, granted.placed, at_s, granted.queued_ahead, granted.why, granted.left_s
        )  # fmt: skip
        lease = self._leases[granted.lease] = Lease(grant, self)
        return lease

    def returned(self, lease: Lease) -> None:
        """A lease is over."""
        del self._leases[lease.grant.lease]
        self._channel.send(protocol.LeaseReturned(lease.grant.lease, lease.verdict, lease.usage))

    async def resolve(self, name: str | None, hold_s: float, body_bytes: int) -> Target:
        """See `Dispatcher.resolve`, which is asked of whatever is not known here."""
        known = self._unnamed if name is None else self._targets.get(name)
        if known is not None:
            return known
        resolved = await self._calls.answer(lambda call: protocol.Resolve(call, name, hold_s, body_bytes))
        assert isinstance(resolved, protocol.NameResolved)
        return resolved.target

    async def caught_up(self) -> None:
        """Know here what the scheduler knew when it was asked: what it tells comes in order, before any answer."""
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

    # --- what leases tell -------------------------------------------------------------------------------------------

    def started(self, grant: Grant, now: float) -> None:
        del now
        self._channel.send(protocol.LeaseStarted(grant.lease))

    def committed(self, grant: Grant, now: float) -> None:
        del now
        self._channel.send(protocol.LeaseCommitted(grant.lease))

    def progress(self, grant: Grant, output_tokens: int, now: float) -> None:
        del now
        self._channel.send(protocol.LeaseProgress(grant.lease, output_tokens))

    # --- what the scheduler tells -----------------------------------------------------------------------------------

    def cut(self, message: protocol.LeaseCut) -> None:
        """A lease is taken back, which may be given back already."""
        # Not before the task that was granted it knows of it, which it does in the next turn, before this.
        asyncio.get_running_loop().call_soon(self._cut, message)

    def _cut(self, message: protocol.LeaseCut) -> None:
        lease = self._leases.get(message.lease)
        if lease is not None:
            lease.cut(revoked=message.revoked)

    def names(self, fleet: protocol.KnownBackends) -> None:
        """Know these names from now on."""
        self._targets, self._unnamed = fleet.targets, fleet.unnamed

    def lost(self) -> None:
        """The scheduler is gone: whatever runs ends, and nothing is granted any more."""
        self.standing = protocol.ShutdownState(leaving=True, draining=True, granting=False)
        self._calls.lost()


class RemoteEstimator(Estimator):
    """Learns what the scheduler learns from the answers of all workers, and tells it of those that came by here."""

    def __init__(self, channel: Channel[protocol.ToWorker]) -> None:
        super().__init__()
        self._channel = channel

    def learn(self, model: str, prompt_bytes: int | None, sequences: int | None, usage: Usage) -> None:
        self._channel.send(protocol.UsageLearned(model, prompt_bytes, sequences, usage))


class RemoteMetrics:
    """`ExitSink`, for the metrics and the decision log of the scheduler process."""

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
    """`Pages`, as the scheduler process answers them: who may look, and what there is to see, is known there."""

    def __init__(self, calls: Calls, rulebook: Rulebook) -> None:
        self._calls = calls
        self._rulebook = rulebook

    async def show(self, path: str, request: web.BaseRequest) -> web.Response:
        del path
        return await self._forward(request)

    async def administer(self, path: str, request: web.BaseRequest, on_admin_port: bool) -> web.Response:
        del path, on_admin_port
        return await self._forward(request)

    async def _forward(self, request: web.BaseRequest) -> web.Response:
        shown = await self._ask(request, None)
        if shown.status == 100:
            # Not before it is asked for: who may not send one is told so first, and most pages read none.
            body = await read_body(request, BODY_BYTES_MAX, self._rulebook.current.config.clients)
            shown = await self._ask(request, body)
        return web.Response(status=shown.status, reason=shown.reason, headers=list(shown.headers), body=shown.body)

    async def _ask(self, request: web.BaseRequest, body: bytes | None) -> protocol.PageResponse:
        raw = _raw(request, body)
        try:
            shown = await self._calls.answer(lambda call: protocol.PageRequest(call, raw, request.remote or ""))
        except Refused as refused:
            raise Failure.of(refused) from None
        assert isinstance(shown, protocol.PageResponse)
        return shown


def _raw(request: web.BaseRequest, body: bytes | None) -> bytes:
    """A request as it came, with its body; or with None, such that the body is asked for."""
    fields = [*request.raw_headers]
    if body is not None:
        fields = [field for field in fields if field[0].lower() not in _FRAMING]
        fields.append((b"Content-Length", b"%d" % len(body)))
    elif request.can_read_body and "expect" not in request.headers:
        fields.append((b"Expect", b"100-continue"))
    version = f"HTTP/{request.version.major}.{request.version.minor}"
    first = f"{request.method} {request.raw_path} {version}\r\n".encode("utf-8", "surrogateescape")
    return first + b"".join(b"%b: %b\r\n" % field for field in fields) + b"\r\n" + (body or b"")


def _now() -> float:
    return asyncio.get_running_loop().time()
