"""The scheduler side of one relay worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from llmproxy.core.domain import Outcome, Request
from llmproxy.core.estimates.tokens import Estimator
from llmproxy.gateway.proxying.rules import Rulebook
from llmproxy.observe.exit import ExitSink, RequestExit
from llmproxy.observe.logs import log_exit
from llmproxy.remote import messages
from llmproxy.remote.link import FROM_WORKER, Link
from llmproxy.remote.server import LeaseServer, Services


@dataclass(frozen=True, slots=True)
class WorkerSinks:
    """The parts of the scheduler process that get the workers' reports."""

    rulebook: Rulebook
    exits: ExitSink
    estimator: Estimator
    learned: Callable[[str], None]  # Gets the model whose estimate has changed.


class WorkerSession:
    """Serves one worker over `link` until the worker is gone."""

    def __init__(self, services: Services, sinks: WorkerSinks) -> None:
        self._sinks = sinks
        self._loop = asyncio.get_running_loop()
        self.server = LeaseServer(services, self._handle)
        self.url: asyncio.Future[str] = self._loop.create_future()  # The URL at which the worker accepts connections.
        self.idle = asyncio.Event()  # Set when the worker is shutting down and has no request left.
        self.gone = asyncio.Event()  # Set when the connection has ended and all requests of the worker are recorded.
        self.cut = 0  # Number of requests that were open when the connection to the worker ended.
        self.buffered_bytes = 0  # Buffered bytes of request bodies, as last reported.
        self.link: Link[messages.FromWorker] = Link(FROM_WORKER, self.server.handle, self._lost, local=True)
        self.server.attach(self.link)

    def _handle(self, message: messages.FromWorker | messages.FromMember) -> None:
        """Handles a message that does not concern leases."""
        match message:
            case messages.AttemptEnded(backend, verdict):
                self._sinks.exits.attempted(backend, verdict)
            case messages.UsageLearned(model, prompt_bytes, sequences, answered):
                self._sinks.estimator.learn(model, prompt_bytes, sequences, answered)
                self._sinks.learned(model)
            case messages.WorkerIdle():
                self.idle.set()
            case messages.LogLinesLost(lines):
                self._sinks.exits.log_lines_lost(lines)
            case messages.BufferedBytes(body_bytes):
                self.buffered_bytes = body_bytes
            case messages.Listening(url):
                self.url.set_result(url)

    def _lost(self) -> None:
        self.server.end()
        self._loop.call_soon(self._end_requests)

    def _end_requests(self) -> None:
        """Records the exit of each of the worker's open requests. Their leases are already returned."""
        self.cut = len(self.server.requests)
        for request in list(self.server.requests.values()):
            ended = self._lost_exit(request)
            self._sinks.exits.record(ended)
            log_exit(ended)
            self.server.forget(request.id)
        self.url.cancel()
        self.buffered_bytes = 0
        self.idle.set()
        self.gone.set()

    def _lost_exit(self, request: Request) -> RequestExit:
        return RequestExit(
            request_id=request.label,
            method="POST",
            path="",
            model=request.model,
            adapter=request.adapter,
            tenant=request.tenant,
            band=self._sinks.rulebook.current.band_names.get(request.band, str(request.band)),
            level=request.band,
            flow=request.flow,
            stream=request.stream,
            arrived_s=request.arrived_s,
            outcome=Outcome.INTERNAL,
            status=500,
            duration_s=self._loop.time() - request.arrived_s,
            error="its relay worker ended before it did",
        )
