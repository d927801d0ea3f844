"""Worker side: replacements of the scheduler's dispatcher, estimator and metrics, which send messages to it."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager

from llmproxy.core.backends.catalogue import Target
from llmproxy.core.domain import Usage, Verdict
from llmproxy.core.estimates.tokens import Estimator
from llmproxy.observe import logs
from llmproxy.observe.exit import RequestExit
from llmproxy.remote import messages
from llmproxy.remote.client import LeaseClient
from llmproxy.remote.link import Link
from llmproxy.scheduling.dispatcher import shutting_down


class WorkerLeasing(LeaseClient):
    """A `Leasing` that calls the scheduler process. It resolves known names itself."""

    def __init__(self, link: Link[messages.ToWorker], backends: Container[str]) -> None:
        """See `LeaseClient`."""
        super().__init__(backends)
        self.link = link
        self._targets: Mapping[str, Target] = {}
        self._unnamed: Target | None = None

    async def resolve(
        self, name: str | None, no_backend_wait_s: float, body_bytes: int, key: str = "", beside: str | None = None
    ) -> Target:
        """See `Dispatcher.resolve`. The scheduler resolves names that this worker does not know."""
        known = self._unnamed if name is None else self._targets.get(name)
        if known is not None:
            return known
        resolved = await self.answer(
            lambda call: messages.Resolve(call, name, no_backend_wait_s, body_bytes, key, beside)
        )
        assert isinstance(resolved, messages.NameResolved)
        return resolved.target

    def direct(self, backend: str, cut: Callable[[], None]) -> AbstractContextManager[None]:
        """See `Dispatcher.direct`."""
        if self.draining:
            raise shutting_down()
        return self.lasting(lambda call: messages.DirectRequest(call, backend), cut)

    def set_names(self, known: messages.KnownBackends) -> None:
        """Replace the names that this worker resolves."""
        self._targets, self._unnamed = known.targets, known.unnamed

    def lost(self) -> None:
        """Refuse all calls and new requests, because the scheduler is gone."""
        self.drain()
        self.detach()


class RemoteEstimator(Estimator):
    """Reports the usage of each response to the scheduler, which learns from all workers and sends estimates."""

    def __init__(self, link: Link[messages.ToWorker]) -> None:
        super().__init__()
        self._link = link

    def learn(self, model: str, prompt_bytes: int | None, sequences: int | None, usage: Usage) -> None:
        self._link.send(messages.UsageLearned(model, prompt_bytes, sequences, usage))


class RemoteExits:
    """An `ExitSink` that forwards everything to the scheduler process."""

    def __init__(self, link: Link[messages.ToWorker]) -> None:
        self._link = link

    def record(self, ended: RequestExit) -> None:
        self._link.send(messages.ExitReport(ended))
        if lost := logs.take_lines_lost():
            self.log_lines_lost(lost)

    def attempted(self, backend: str, verdict: Verdict) -> None:
        self._link.send(messages.AttemptEnded(backend, verdict))

    def log_lines_lost(self, lines: int) -> None:
        self._link.send(messages.LogLinesLost(lines))
