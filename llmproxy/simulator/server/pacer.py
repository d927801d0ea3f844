"""The engine in (scaled) real time: one task steps it, waits as long as the step takes, and hands out its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from llmproxy.simulator.engine.engine import Engine
from llmproxy.simulator.engine.sequence import EngineRequest
from llmproxy.simulator.server.metrics import ReplicaMetrics
from llmproxy.simulator.server.requests import ApiError

# A loop that was kept from running may catch up this much; beyond it the time is lost, as on a real machine.
_LAG_MAX_S = 0.05


@dataclass(slots=True)
class SequenceProgress:
    """What one sequence of a job has got so far."""

    tokens: int = 0
    cached_tokens: int = 0
    finished: bool = False
    admitted_s: float = 0.0
    first_s: float = 0.0


@dataclass(slots=True, eq=False)
class GenerationJob:
    """The sequences of one HTTP request and why each will end (`length`, `stop`). `each_token` says whether its owner
    is notified of every token or of the end only. `error` is set when the engine died under it.
    """

    sequences: Sequence[EngineRequest]
    reasons: Sequence[str]
    each_token: bool
    arrived_s: float
    progress: list[SequenceProgress] = field(init=False)
    error: ApiError | None = None
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

    async def news(self) -> None:
        """Wait until there are tokens (with `each_token`), the end, or an error."""
        await self._news.wait()
        self._news.clear()


class Pacer:
    """Steps one engine, `speed` times as fast as real, and keeps its metrics. `run` is a task of the owner."""

    def __init__(self, engine: Engine, speed: float, metrics: ReplicaMetrics) -> None:
        self.engine = engine
        self.speed = speed
        self._metrics = metrics
        self._jobs: dict[str, tuple[GenerationJob, int]] = {}
        self._work = asyncio.Event()
        self._thawed = asyncio.Event()
        self._thawed.set()

    def submit(self, job: GenerationJob) -> None:
        for index, sequence in enumerate(job.sequences):
            self.engine.add(sequence)
            self._jobs[sequence.id] = (job, index)
        self._work.set()

    def drop(self, job: GenerationJob) -> None:
        """Abort what is left of a job; nothing where it has ended. `run` shows it in the gauges with its next turn."""
        for sequence in job.sequences:
            if self._jobs.pop(sequence.id, None) is not None:
                self.engine.abort(sequence.id)

    def freeze(self, frozen: bool) -> None:
        """Stop time, or let it go on: no token, no gauge moves in between."""
        if frozen:
            self._thawed.clear()
        else:
            self._thawed.set()

    def fail(self, error: ApiError) -> None:
        for job in {id(job): job for job, _ in self._jobs.values()}.values():
            job.error = error
            self.drop(job)
            job.notify()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            if not self._work.is_set():
                await self._work.wait()
                due_s = loop.time()
            await self._thawed.wait()
            if not self.engine.busy:
                self._work.clear()
                self._metrics.publish(self.engine.gauges(), self.engine.counters)
                continue
            started_s = loop.time()
            result = self.engine.step()
            # What arrives while the step runs is unknown to the engine until the next one, and so to its gauges.
            gauges, counters = self.engine.gauges(), replace(self.engine.counters)
            due_s = max(due_s, started_s - _LAG_MAX_S) + result.duration_s / self.speed
            for request_id, cached_tokens in result.admitted:
                if held := self._jobs.get(request_id):
                    progress = held[0].progress[held[1]]
                    progress.admitted_s = progress.admitted_s or started_s
                    progress.cached_tokens = cached_tokens
            await asyncio.sleep(max(due_s - loop.time(), 0.0))
            await self._thawed.wait()
            now_s = loop.time()
            firsts = self._hand_out(result.emitted, result.finished, now_s)
            self._metrics.step(result, now_s - started_s, len(result.emitted) - firsts)
            self._metrics.publish(gauges, counters)

    def _hand_out(self, emitted: Sequence[str], finished: Sequence[str], now_s: float) -> int:
        """Give every emitted token to its job, all in one turn of the loop; how many were first ones."""
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
                self._metrics.first_token(job.arrived_s, progress.admitted_s, now_s)
            if job.each_token:
                job.notify()
        for request_id in finished:
            if (held := self._jobs.pop(request_id, None)) is None:
                continue
            job, index = held
            progress = job.progress[index]
            progress.finished = True
            times_s = (job.arrived_s, progress.admitted_s, progress.first_s, now_s)
            self._metrics.finished(job.sequences[index], job.reasons[index], *times_s)
            if job.finished or job.each_token:
                job.notify()
        return firsts
