"""Runs the engine in scaled real time: a task runs a step, waits for its duration, and delivers its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llmproxy.lab.simulator.engine.engine import Engine
from llmproxy.lab.simulator.engine.sequence import EngineRequest
from llmproxy.lab.simulator.server.answer_text import AnswerText
from llmproxy.lab.simulator.server.metrics import ReplicaMetrics
from llmproxy.lab.simulator.server.requests import ApiError

# A delayed loop may catch up by this much. Longer delays are lost, as on a real machine.
_LAG_MAX_S = 0.05


@dataclass(slots=True)
class SequenceProgress:
    """The progress of a sequence. `wrong`: it was computed from KV blocks of another prompt."""

    tokens: int = 0
    cached_tokens: int = 0
    wrong: bool = False
    finished: bool = False
    admitted_s: float = 0.0
    first_s: float = 0.0


@dataclass(slots=True, eq=False)
class GenerationJob:
    """The sequences of an HTTP request, and the reason for which each will end (`length`, `stop`)."""

    sequences: Sequence[EngineRequest]
    reasons: Sequence[str]
    each_token: bool  # Whether the request handler is notified of every token, or only of the end.
    arrived_s: float
    kv_transfer_params: Mapping[str, Any] = field(default_factory=dict)
    remote_cached_tokens: int | None = None  # Cached prompt tokens on the prefill replica.
    answers: Sequence[AnswerText] = ()
    progress: list[SequenceProgress] = field(init=False)
    error: ApiError | None = None  # Set when the engine has died, or when the job's KV blocks are not available.
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.progress = [SequenceProgress() for _ in self.sequences]

    @property
    def ended(self) -> bool:
        return self.error is not None or self.finished

    @property
    def finished(self) -> bool:
        return all(progress.finished for progress in self.progress)

    def notify(self) -> None:
        self._news.set()

    async def wait(self) -> None:
        """Waits until there are tokens (with `each_token`), the end, or an error."""
        await self._news.wait()
        self._news.clear()


class Pacer:
    """Steps an engine, `speed` times as fast as real time, and updates its metrics. The caller runs `run` as a task.

    `on_fetch` gets a sequence whose KV blocks must be fetched now, and its number of missing tokens. `on_finished` gets
    a sequence after its last token, and `on_abort` an aborted sequence.
    """

    def __init__(self, engine: Engine, speed: float, metrics: ReplicaMetrics) -> None:
        self.engine = engine
        self.speed = speed
        self.metrics = metrics
        self._jobs: dict[str, tuple[GenerationJob, int]] = {}
        self._work = asyncio.Event()
        self._thawed = asyncio.Event()
        self._thawed.set()
        self.on_fetch: Callable[[str, int], None] = _nothing
        self.on_finished: Callable[[str], None] = _nothing
        self.on_abort: Callable[[str], None] = _nothing

    def submit(self, job: GenerationJob) -> None:
        for index, sequence in enumerate(job.sequences):
            self.engine.add(sequence)
            self._jobs[sequence.id] = (job, index)
        self.wake()

    def wake(self) -> None:
        """Wakes `run`, because the engine may have work or changed gauges."""
        self._work.set()

    def drop(self, job: GenerationJob) -> None:
        """Aborts the unfinished sequences of a job. `run` updates the gauges afterwards."""
        for sequence in job.sequences:
            if self._jobs.pop(sequence.id, None) is not None:
                self.engine.abort(sequence.id)
                self.on_abort(sequence.id)

    def freeze(self, frozen: bool) -> None:
        """Freezes or resumes the engine. A frozen engine emits no token and changes no gauge."""
        if frozen:
            self._thawed.clear()
        else:
            self._thawed.set()

    def fail(self, error: ApiError, jobs: Iterable[GenerationJob] | None = None) -> None:
        """Ends these jobs with an error; None: all jobs."""
        for job in self._all_jobs() if jobs is None else jobs:
            job.error = error
            self.drop(job)
            job.notify()

    def abort(self) -> None:
        """Ends all jobs at once with the finish reason `abort`."""
        for job in self._all_jobs():
            self.drop(job)
            pairs = zip(job.progress, job.reasons, strict=True)
            job.reasons = [reason if progress.finished else "abort" for progress, reason in pairs]
            for progress in job.progress:
                progress.finished = True
            job.notify()

    def _all_jobs(self) -> list[GenerationJob]:
        return list(dict.fromkeys(job for job, _ in self._jobs.values()))

    async def run(self) -> None:
        """Runs the steps of the engine at `speed` times real time, and gives the tokens to the jobs. Never returns."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            if not self._work.is_set():
                await self._work.wait()
                due_s = loop.time()
            await self._thawed.wait()
            if not self.engine.busy:
                self._work.clear()
                self.metrics.publish(self.engine.gauges(), self.engine.counters)
                continue
            started_s = loop.time()
            result = self.engine.step()
            # The engine and its gauges see requests that arrive during a step only in the next step.
            gauges, counters = self.engine.gauges(), replace(self.engine.counters)
            due_s = max(due_s, started_s - _LAG_MAX_S) + result.duration_s / self.speed
            for request_id, cached_tokens in result.admitted:
                if held := self._jobs.get(request_id):
                    progress, remote = held[0].progress[held[1]], held[0].remote_cached_tokens
                    progress.admitted_s = progress.admitted_s or started_s
                    progress.cached_tokens = cached_tokens if remote is None else remote
            for request_id in result.wrong:
                if held := self._jobs.get(request_id):
                    held[0].progress[held[1]].wrong = True
            for request_id, lacking_tokens in result.fetches:
                self.on_fetch(request_id, lacking_tokens)
            await asyncio.sleep(max(due_s - loop.time(), 0.0))
            await self._thawed.wait()
            now_s = loop.time()
            firsts = self._hand_out(result.emitted, result.finished, now_s)
            self.metrics.step(result, now_s - started_s, len(result.emitted) - firsts)
            self.metrics.publish(gauges, counters)

    def _hand_out(self, emitted: Sequence[str], finished: Sequence[str], now_s: float) -> int:
        """Delivers all emitted tokens to their jobs. Returns how many are first tokens of a sequence."""
        firsts = 0
        for request_id in emitted:
            if (held := self._jobs.get(request_id)) is None:
                continue
            job, index = held
            progress = job.progress[index]
            progress.tokens += 1
            if progress.tokens == 1:
                firsts += 1
                progress.first_s = now_s
                self.metrics.first_token(job.arrived_s, progress.admitted_s, now_s)
            if job.each_token:
                job.notify()
        for request_id in finished:
            self.on_finished(request_id)
            if (held := self._jobs.pop(request_id, None)) is None:
                continue
            job, index = held
            progress = job.progress[index]
            progress.finished = True
            times_s = (job.arrived_s, progress.admitted_s, progress.first_s, now_s)
            self.metrics.finished(job.sequences[index], job.reasons[index], *times_s)
            if job.finished or job.each_token:
                job.notify()
        return firsts


def _nothing(*_: object) -> None:
    pass
