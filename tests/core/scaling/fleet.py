"""Engines in virtual time behind the real scheduler, to compare the estimates of scaling with their real throughput."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from random import Random

from llmproxy.core.domain import Grant, Reading, Usage, Verdict
from llmproxy.core.lease_events import Progress, Returned, Started
from llmproxy.core.placement.policy import make
from llmproxy.core.pools import Pools
from llmproxy.core.scaling.need import Need
from llmproxy.core.settings import Settings
from tests.core.make import BASE, DEFAULTS, listing, request

BASE_S, SEQUENCE_S, TOKEN_S = 0.02, 0.0004, 0.00003
"""A step alone, more for each sequence, and more for each token of a prompt that is computed in it."""
TRAVEL_S = 0.002
"""From the proxy to an engine, and from an engine to the proxy."""
POLL_S = 0.2
KV_TOKENS = 200_000


@dataclass
class Job:
    """A request at an engine, and how many of the `tokens` of its answer there are."""

    grant: Grant
    tokens: int
    done: int = 0


@dataclass
class Engine:
    """Runs up to `seats` sequences in steps. Further requests wait inside the engine."""

    name: str
    seats: int
    slowness: float = 1.0
    waiting: list[Job] = field(default_factory=list)
    batch: list[Job] = field(default_factory=list)
    steps: bool = False


class Fleet:
    """Clients that ask again as soon as they are answered, and engines of `seats` sequences each.

    `streams` is the share of requests that are streams. Each answer has about `output` tokens.
    """

    def __init__(
        self, *seats: int, streams: float = 0.0, output: int = 96, prompt: int = 200, settings: Settings | None = None
    ) -> None:
        self.engines = [Engine(f"e{number}", one) for number, one in enumerate(seats)]
        settings = settings or DEFAULTS
        names = dict.fromkeys(one.name for one in self.engines)
        self.pools = Pools(settings, names, {}, partial(make, settings.placement, Random(0)))
        self.now = 0.0
        self.completed = 0
        self._streams, self._output, self._prompt = streams, output, prompt
        self._clients = self._wanted = 0
        self._rng, self._serial = Random(1), count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._poll()
        for name in names:
            self.pools.listed(name, listing())

    def clients(self, wanted: int) -> None:
        """Set the number of clients. Surplus clients leave after their answer."""
        self._wanted = wanted
        for _ in range(wanted - self._clients):
            self._clients += 1
            self._later(0.0, self._ask)

    def run(self, seconds: float) -> float:
        """Advance the clock. Returns the completions per second."""
        end_s, before = self.now + seconds, self.completed
        while self._events[0][0] <= end_s:
            self.now, _, happens = heappop(self._events)
            happens()
            for grant in self.pools.decide(self.now):
                assert isinstance(grant, Grant), grant
                engine = next(one for one in self.engines if one.name == grant.placed.backend)
                self._later(TRAVEL_S, partial(self._reach, engine, grant))
        self.now = end_s
        return (self.completed - before) / seconds

    @property
    def need(self) -> Need:
        """The number of replicas now."""
        return self.pools.needs(self.now)[BASE]

    @property
    def limits(self) -> list[int]:
        """The learned batch limits of the engines."""
        return [self.pools.backends[one.name].limit.value for one in self.engines]

    @property
    def waiting(self) -> int:
        """How many requests wait in the proxy."""
        return sum(requests for requests, _ in self.pools.queued().values())

    def _later(self, seconds: float, happens: Callable[[], None]) -> None:
        heappush(self._events, (self.now + seconds, next(self._serial), happens))

    def _ask(self) -> None:
        if self._clients > self._wanted:
            self._clients -= 1
            return
        stream = self._rng.random() < self._streams
        prompt = round(self._prompt * self._rng.uniform(0.7, 1.3))
        one = request(
            stream=stream,
            prompt_tokens=prompt,
            output_tokens=self._output,
            arrived_s=self.now,
            deadline_s=self.now + 1e6,
        )
        self.pools.submit(one, self.now)

    def _reach(self, engine: Engine, grant: Grant) -> None:
        engine.waiting.append(Job(grant, max(1, round(self._output * self._rng.uniform(0.7, 1.3)))))
        if not engine.steps:
            self._step(engine)

    def _step(self, engine: Engine) -> None:
        admitted = engine.waiting[: engine.seats - len(engine.batch)]
        del engine.waiting[: len(admitted)]
        engine.batch += admitted
        engine.steps = bool(engine.batch)
        if engine.steps:
            prompts = sum(job.grant.request.prompt_tokens for job in admitted)
            step_s = engine.slowness * (BASE_S + SEQUENCE_S * len(engine.batch) + TOKEN_S * prompts)
            self._later(step_s, partial(self._stepped, engine, admitted))

    def _stepped(self, engine: Engine, admitted: list[Job]) -> None:
        for job in admitted:
            if job.grant.request.stream:
                self._later(TRAVEL_S, partial(self._first_token, job.grant))
        for job in list(engine.batch):
            job.done += 1
            if job.done == job.tokens:
                engine.batch.remove(job)
                self._later(TRAVEL_S, partial(self._end, job))
            elif job.grant.request.stream:
                self._later(TRAVEL_S, partial(self._progress, job.grant, job.done))
        self._step(engine)

    def _first_token(self, grant: Grant) -> None:
        self.pools.apply(Started(grant.lease), self.now)

    def _progress(self, grant: Grant, tokens: int) -> None:
        self.pools.apply(Progress(grant.lease, tokens), self.now)

    def _end(self, job: Job) -> None:
        self.completed += 1
        usage = Usage(job.grant.request.prompt_tokens, job.tokens, 0)
        self.pools.apply(Returned(job.grant.lease, Verdict.SERVED, usage), self.now)
        self.pools.ended(job.grant.request, None, self.now)
        self._later(TRAVEL_S, self._ask)

    def _poll(self) -> None:
        for engine in self.engines:
            held = sum(job.grant.request.prompt_tokens + job.done for job in engine.batch)
            backend = self.pools.backends[engine.name]
            backend.observe(Reading(self.now, len(engine.batch), len(engine.waiting), held / KV_TOKENS, KV_TOKENS))
            backend.answered(self.now)
        self._later(POLL_S, self._poll)
