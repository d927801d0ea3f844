"""A tiny engine for fairness policies: it dispatches the first candidate, charges estimates, and corrects them.

It counts the service of each flow independently, to check the bounds that policies promise.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise, permutations
from random import Random

from llmproxy.core.domain import Request
from llmproxy.core.queueing.fairness import FairnessPolicy
from tests.core.make import request

OUTPUT_WEIGHT = 2


def offered(policy: FairnessPolicy, now: float = 0.0) -> list[str]:
    return list(policy.candidates(now))


def first(policy: FairnessPolicy, now: float = 0.0) -> str | None:
    looking = policy.candidates(now)
    flow = next(looking, None)
    getattr(looking, "close", lambda: None)()
    return flow


def arrive(policy: FairnessPolicy, *flows: str, at_s: float = 0.0, weight: float = 1.0) -> None:
    for flow in flows:
        policy.backlogged(flow, request(flow=flow, arrived_s=at_s, weight=weight))


def standing(policy: FairnessPolicy, flow: str) -> dict[str, float]:
    return dict(policy.standing(flow))


@dataclass(slots=True)
class Job:
    """A request and its real tokens, which the policy learns late. `cached` are the cached prompt tokens."""

    request: Request
    output: int
    cached: int
    done: int = 0
    charged: float = 0.0
    delivered: float = 0.0

    def cost(self, output: int, cached: int = 0) -> float:
        return self.request.prompt_tokens - cached + OUTPUT_WEIGHT * output

    @property
    def peak(self) -> float:
        """The most that it can be charged in its life, per unit of weight."""
        return self.cost(max(self.output, self.request.output_tokens)) / self.request.weight


class Engine:
    """Runs `slots` requests at once. Service is the computed work of a flow, per unit of weight."""

    def __init__(self, policy: FairnessPolicy, weights: Mapping[str, float], slots: int) -> None:
        self.policy = policy
        self.weights = weights
        self.slots = slots
        self.waiting: dict[str, deque[Job]] = {flow: deque() for flow in weights}
        self.running: list[Job] = []
        self.service: defaultdict[str, float] = defaultdict(float)
        self.order: list[str] = []
        self.peak_all = 0.0
        self.peak_of: dict[str, float] = dict.fromkeys(weights, 0.0)
        self._spread: dict[tuple[str, str], tuple[float, float]] = {}

    @property
    def backlogged(self) -> list[str]:
        return [flow for flow, jobs in self.waiting.items() if jobs]

    def arrive(self, flow: str, prompt: int, expected: int, output: int, cached: int = 0) -> None:
        asked = request(flow=flow, prompt_tokens=prompt, output_tokens=expected, weight=self.weights[flow])
        self.waiting[flow].append(Job(asked, output, cached))
        if len(self.waiting[flow]) == 1:
            self.policy.backlogged(flow, asked)
            self.check()
        self.dispatch()

    def dispatch(self) -> None:
        while len(self.running) < self.slots and (flow := first(self.policy)) is not None:
            job = self.waiting[flow].popleft()
            if self.waiting[flow]:
                self.policy.backlogged(flow, self.waiting[flow][0].request)
            else:
                self.policy.emptied(flow)
            self.order.append(flow)
            self.running.append(job)
            self.policy.dispatched(flow)
            self._charge(job, job.cost(job.request.output_tokens))
            self._note_peaks()

    def stream(self, job: Job, tokens: int) -> None:
        job.done = min(job.output, job.done + tokens)
        self._deliver(job, job.cost(job.done, job.cached))
        self._charge(job, max(job.charged, job.cost(job.done)))

    def end(self, job: Job) -> None:
        """End a request with the tokens so far: complete, or aborted by its client."""
        self.running.remove(job)
        self._deliver(job, job.cost(job.done, job.cached))
        self._charge(job, job.cost(job.done, job.cached))
        self.dispatch()

    def fail(self, job: Job) -> None:
        """Fail a request without service and without cost."""
        if not job.delivered:
            self.running.remove(job)
            self._charge(job, 0.0)
            self.dispatch()

    def churn(self, rng: Random, steps: int) -> None:
        """Arrivals in bursts with pauses, wrong estimates, streams, aborts and failures, in any order."""
        eager = dict.fromkeys(self.weights, 1)
        for step in range(steps):
            if step % 40 == 0:
                eager = {flow: rng.choice((0, 1, 4)) for flow in self.weights}
            for flow, most in eager.items():
                if len(self.waiting[flow]) < most:
                    prompt = rng.choice((10, 100, 1000))
                    self.arrive(flow, prompt, rng.randrange(400), rng.randrange(400), rng.randrange(prompt))
            if self.running:
                job = rng.choice(self.running)
                if rng.random() < 0.1:
                    self.fail(job)
                else:
                    self.stream(job, rng.choice((1, 50, 400)))
                    if job.done == job.output or rng.random() < 0.1:
                        self.end(job)

    def pairs(self) -> dict[tuple[str, str], tuple[float, float]]:
        """Of each two backlogged flows: least and most of (service of one - of the other) while both were."""
        both = set(permutations(self.backlogged, 2))
        self._spread = {pair: spread for pair, spread in self._spread.items() if pair in both}
        for pair in both:
            ahead = self.service[pair[0]] - self.service[pair[1]]
            low, high = self._spread.get(pair, (ahead, ahead))
            self._spread[pair] = (min(low, ahead), max(high, ahead))
        return self._spread

    def check(self) -> None:
        """Called after every charge, for the checks of a test."""

    def _charge(self, job: Job, cost: float) -> None:
        before, job.charged = job.charged, cost
        self.policy.charge(job.request.flow, (cost - before) / job.request.weight)
        self.check()

    def _deliver(self, job: Job, cost: float) -> None:
        self.service[job.request.flow] += (cost - job.delivered) / job.request.weight
        job.delivered = cost

    def _note_peaks(self) -> None:
        running: defaultdict[str, float] = defaultdict(float)
        for job in self.running:
            running[job.request.flow] += job.peak
        self.peak_all = max(self.peak_all, sum(running.values()))
        for flow, peak in running.items():
            self.peak_of[flow] = max(self.peak_of[flow], peak)


def rivals(engine: Engine, depths: Mapping[str, int], rounds: int, output: int = 100) -> None:
    """Flows that always have this many waiting requests; answers end in the order of dispatch, half as long as
    estimated."""
    for _ in range(rounds):
        for flow, depth in depths.items():
            while len(engine.waiting[flow]) < depth:
                engine.arrive(flow, 100, 2 * output, output)
        job = engine.running[0]
        engine.stream(job, output)
        engine.end(job)


def hot(order: list[str]) -> float:
    """The share of dispatches that stayed with the flow of the one before, whose prefix is warm."""
    return sum(one == other for one, other in pairwise(order)) / max(1, len(order) - 1)
