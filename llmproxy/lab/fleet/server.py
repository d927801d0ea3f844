"""A simulated vLLM server in virtual time: its engine, requests, metrics and KV events."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Protocol

from llmproxy.lab.fleet.job import Broken, Leaving, Refusing, ServerJob, TooLong, TransferFailed
from llmproxy.lab.fleet.kv_connector import KeptKv, KvConnector
from llmproxy.lab.fleet.spec import KV_TRANSFER, ReplicaSpec
from llmproxy.lab.simulator.engine.engine import Engine
from llmproxy.lab.simulator.engine.kv_cache import Changes
from llmproxy.lab.simulator.engine.kv_transfer import KvTransfer
from llmproxy.lab.simulator.engine.profiles import Noise
from llmproxy.lab.simulator.engine.reports import Counters, Gauges, StepResult
from llmproxy.lab.simulator.engine.sequence import EngineRequest

NOISE = Noise()


class Subscriber(Protocol):
    """A subscriber to the KV events of a replica."""

    def published(self, at_s: float, changes: Changes) -> None:
        """Handles the changes of cached blocks by a step that ended at `at_s`. Called in the order of the steps."""

    def broken(self) -> None:
        """Handles a crash of the replica's process: its caches and its unsent events are lost."""


@dataclass(slots=True)
class _Stretch:
    """A run of `steps` decode steps without other work, which began at `start_s`.

    Each step takes `factor` times its noise-free time. Steps that ended by `settled_s` are already removed.
    """

    start_s: float
    steps: int
    factor: float
    settled_s: float


@dataclass(slots=True)
class _FaultsInForce:
    """The active faults. Past gauges are stored for `remembered_s`, the largest age of any `metric_age` fault."""

    slow: float = 1.0
    reset: float = 0.0
    metric_age_s: float = 0.0
    lost_readings: float = 0.0
    lost_kv_events: float = 0.0
    remembered_s: float = 0.0
    frozen: bool = False


class SimulatedServer:
    """A simulated server that accepts requests and scrapes, with its faults.

    A run of pure decode steps needs one timer. A request or scrape during the run first advances the engine to that
    moment.
    """

    def __init__(
        self,
        spec: ReplicaSpec,
        prefill_scale: float,
        seed: int,
        loop: asyncio.AbstractEventLoop,
        noise: Noise = NOISE,
        kv_transfer: KvTransfer = KV_TRANSFER,
    ) -> None:
        self.spec = spec
        self.alive = False
        self._leaving_for_s: float | None = None
        self.faults = _FaultsInForce()
        self._earlier = Counters()
        self.engine: Engine
        self._profile = replace(spec.profile, prefill_factor=prefill_scale)
        self._rng = Random(seed)
        self._noise = noise
        self._loop = loop
        self._jobs: dict[str, ServerJob] = {}
        self._before_first_token: dict[str, ServerJob] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._stretch: _Stretch | None = None
        self._step: StepResult | None = None
        self._left_s = 0.0
        self._visible = self._coming = Gauges()
        self._seen: deque[tuple[float, Gauges]] = deque()
        self._subscribers: list[Subscriber] = []
        self._kv = KvConnector(kv_transfer, loop, self._before_change, self._after_change)
        self._install()

    def _install(self) -> None:
        spec = self.spec
        self.engine = Engine(
            self._profile,
            max_num_seqs=spec.max_num_seqs,
            max_loras=spec.max_loras,
            max_cpu_loras=spec.max_cpu_loras,
            kv_tokens=spec.kv_tokens,
            block_size=spec.block_size,
            step_tokens=spec.step_tokens,
            async_scheduling=spec.async_scheduling,
            noise=self._noise,
            seed=self._rng.getrandbits(32),
        )
        self._kv.restarted(self.engine)
        self._visible = self._coming = Gauges()
        self._seen.clear()
        if self._subscribers:
            self.engine.publish_kv_events()

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.alive = True
        self._leaving_for_s = None

    def roll(self, gone_s: float) -> None:
        """Drains the server, stops it, and starts it again `gone_s` later with cold caches."""
        self._leaving_for_s = gone_s
        self._stop_when_done()

    def _stop_when_done(self) -> None:
        if self._leaving_for_s is not None and self.alive and not self._jobs:
            self._loop.call_later(self._leaving_for_s, self.start)
            self.kill()

    def kill(self) -> None:
        """Kills the process. Its connections break, and its caches are lost."""
        self._stop_timer()
        self._stretch = self._step = None
        self._earlier = self.counters
        self.alive = False
        self.faults.frozen = False
        jobs, self._jobs = self._jobs, {}
        self._before_first_token.clear()
        self._install()
        for job in jobs.values():
            job.break_off()
        for subscriber in self._subscribers:
            subscriber.broken()

    def freeze(self, frozen: bool) -> None:
        """Stops the engine, or continues it. The server accepts requests in both states."""
        if frozen == self.faults.frozen or not self.alive:
            return
        self.faults.frozen = frozen
        if frozen:
            self._interrupt()
            if self._timer is not None:
                self._left_s = self._timer.when() - self._loop.time()
                self._stop_timer()
        elif self._step is not None:
            self._timer = self._loop.call_later(self._left_s, self._step_done)
        else:
            self._next()

    def slow_down(self, factor: float) -> None:
        """Makes each step take `factor` times its normal time, from the next step on."""
        self._before_change()
        self.faults.slow = factor

    # --- what clients do ----------------------------------------------------------------------------------------------

    def open(self, request: EngineRequest, on_first: Callable[[], None], kept: KeptKv | None = None) -> ServerJob:
        """Sends a request. The blocks of a `remote` request are `kept` on another server.

        Raises Refusing if the server is not alive, Leaving if it drains, and TooLong if it answers 400.
        """
        if not self.alive:
            raise Refusing
        if self._leaving_for_s is not None:
            raise Leaving
        if not self.holds(request):
            raise TooLong
        job = ServerJob(request, on_first, self._loop.create_future())
        if self.faults.reset and self._rng.random() < self.faults.reset:
            job.cut_short = True
            job.request = replace(request, output_tokens=self._rng.randint(1, request.output_tokens))
        self._jobs[request.id] = job
        if kept is not None:
            self._kv.accepted(request.id, kept)
        self._loop.call_later(self._profile.frontend_s, self._enter, job)
        return job

    @property
    def context_tokens(self) -> int:
        """The most tokens that this server accepts, of prompt and answer together."""
        return min(self.spec.max_model_len, self.engine.kv_room_tokens)

    def holds(self, request: EngineRequest) -> bool:
        return request.prompt_tokens + request.output_tokens <= self.context_tokens

    def answered_tokens(self, job: ServerJob) -> int:
        """Returns the tokens of the answer so far; 0 before the first token and after the end."""
        self.catch_up()
        if job.first_s is None or job.ended.done():
            return 0
        answered = self.engine.answered_tokens(job.request.id)
        # The engine forgets a request when it plans the step of its last token.
        return job.request.output_tokens - 1 if answered is None else answered

    def leave(self, job: ServerJob) -> None:
        """Closes the client's connection. Does nothing after the end of the job."""
        request_id = job.request.id
        if self._jobs.get(request_id) is not job:
            return
        del self._jobs[request_id]
        if self._leaving_for_s is not None:
            self._loop.call_soon(self._stop_when_done)
        if self._before_first_token.pop(request_id, None) is not None or job.first_s is not None:
            self._before_change()
            self.engine.abort(request_id)
        self._kv.left(request_id)

    def kept(self, job: ServerJob) -> KeptKv:
        """Returns the pinned blocks of a prefill job that has just ended."""
        return self._kv.keep(job.request.id, job.hit_tokens or 0)

    def scrape(self) -> Gauges | None:
        """Returns the gauges of the metrics page; None if the scrape is lost.

        Raises Refusing if the server is not alive, Leaving if it drains, and TimeoutError if it hangs.
        """
        if not self.alive:
            raise Refusing
        if self._leaving_for_s is not None:
            raise Leaving
        if self.faults.frozen:
            raise TimeoutError
        if self.faults.lost_readings and self._rng.random() < self.faults.lost_readings:
            return None
        now = self._loop.time()
        if self._stretch is not None:
            self._settle(now)
            self._visible = self.engine.gauges()
        if self.faults.remembered_s:
            self._seen.append((now, self._visible))
            while len(self._seen) > 1 and self._seen[1][0] <= now - self.faults.remembered_s:
                self._seen.popleft()
        if not self.faults.metric_age_s:
            return self._visible
        old_s = now - self.faults.metric_age_s
        past = [gauges for seen_s, gauges in self._seen if seen_s <= old_s]
        # A younger process shows its first gauges.
        return past[-1] if past else self._seen[0][1]

    def subscribe(self, subscriber: Subscriber) -> None:
        """Publishes one batch of KV events per step to a further subscriber."""
        self._subscribers.append(subscriber)
        self.engine.publish_kv_events()

    @property
    def counters(self) -> Counters:
        """The counters, summed over all processes since the first start."""
        return self._earlier + self.engine.counters

    def load(self) -> tuple[int, int]:
        gauges = self.engine.gauges()
        return gauges.running, gauges.waiting

    # --- the engine's time --------------------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Advances the engine to the last step that has ended by now."""
        if self._stretch is not None and not self.faults.frozen:
            self._settle(self._loop.time())

    def _enter(self, job: ServerJob) -> None:
        """Passes a request to the engine, after the front end has tokenised its prompt."""
        if self._jobs.get(job.request.id) is not job:
            return
        self._before_change()
        self.engine.add(job.request)
        self._before_first_token[job.request.id] = job
        self._after_change()

    def _before_change(self) -> None:
        """Advances the engine to the present, before it is changed from outside."""
        if not self.faults.frozen:
            self._interrupt()

    def _after_change(self) -> None:
        if self._timer is None and not self.faults.frozen:
            self._next()

    def _fetched(self, request_id: str, found: bool) -> None:
        """Handles the end of a transfer. `found` is False if it failed."""
        fails = not found and self._kv.times.on_failure == "fail"
        if fails and (job := self._jobs.pop(request_id, None)) is not None:
            del self._before_first_token[request_id]
            if not job.ended.done():
                job.ended.set_exception(TransferFailed())

    def _next(self) -> None:
        self._stretch = self._step = None
        now = self._loop.time()
        steps = self.engine.stable_steps()
        if steps > 1:
            factor = self._noise.stretch_factor(self._rng, steps) * self.faults.slow
            self._stretch = _Stretch(now, steps, factor, now)
            self._timer = self._loop.call_at(now + self.engine.stretch_s(steps) * factor, self._stretch_done)
        elif self.engine.busy:
            self._step = self.engine.step()
            for request_id, lacking_tokens in self._step.fetches:
                self._kv.fetch(request_id, lacking_tokens, partial(self._fetched, request_id))
            # Read before the step runs: its gauges do not include requests that arrive later.
            self._coming = self.engine.gauges()
            self._timer = self._loop.call_at(now + self._step.duration_s * self.faults.slow, self._step_done)
        else:
            self._timer = None
            self._visible = self.engine.gauges()

    def _step_done(self) -> None:
        step, self._step = self._step, None
        assert step is not None
        self._visible = self._coming
        for _, changes in step.kv_events:
            self._publish(self._loop.time(), changes)
        self._deliver(step)
        self._next()

    def _stretch_done(self) -> None:
        stretch, self._stretch = self._stretch, None
        assert stretch is not None
        self._deliver(self._advance(stretch, stretch.steps))
        self._visible = self.engine.gauges()
        self._next()

    def _settle(self, now: float) -> None:
        """Advances the engine by the decode steps that are complete at `now`."""
        stretch = self._stretch
        assert stretch is not None
        if now == stretch.settled_s:
            # All streams of a replica are counted at the same moment.
            return
        stretch.settled_s = now
        # The last step of a stretch may end requests, so its timer delivers it.
        done = min(self.engine.steps_within((now - stretch.start_s) / stretch.factor), stretch.steps - 1)
        if done > 0:
            self._advance(stretch, done)

    def _advance(self, stretch: _Stretch, steps: int) -> StepResult:
        """Executes the first `steps` of a run of decode steps, and removes them from the run."""
        result = self.engine.advance(steps)
        for after_s, changes in result.kv_events:
            self._publish(stretch.start_s + after_s * stretch.factor, changes)
        stretch.start_s += result.duration_s * stretch.factor
        stretch.steps -= steps
        return result

    def _interrupt(self) -> None:
        """Ends the run of decode steps after the step in progress, because the engine is about to change."""
        if self._stretch is None:
            return
        self._settle(self._loop.time())
        stretch, self._stretch = self._stretch, None
        self._stop_timer()
        self._visible = self.engine.gauges()
        self._step = self.engine.advance(1)
        self._coming = self.engine.gauges()
        end_s = stretch.start_s + self._step.duration_s * stretch.factor
        # The factor of the stretch already includes noise and slowness.
        self._timer = self._loop.call_at(max(end_s, self._loop.time()), self._step_done)

    def _publish(self, at_s: float, changes: Changes) -> None:
        for subscriber in self._subscribers:
            if not self.faults.lost_kv_events or self._rng.random() >= self.faults.lost_kv_events:
                subscriber.published(at_s, changes)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _deliver(self, step: StepResult) -> None:
        """Delivers the results of the step that ends now to its requests."""
        now = self._loop.time()
        for request_id, cached_tokens in step.admitted:
            job = self._jobs.get(request_id)
            # A preempted request finds its own blocks again, which does not count as a hit.
            if job is not None and job.hit_tokens is None:
                job.hit_tokens = cached_tokens
        if self._before_first_token and step.emitted:
            emitted = set(step.emitted)
            for request_id in [one for one in self._before_first_token if one in emitted]:
                job = self._before_first_token.pop(request_id)
                job.first_s = job.heard_s = now
                job.heard_tokens = 1
                job.on_first()
        for request_id in step.finished:
            job = self._jobs.pop(request_id, None)
            if job is None or job.ended.done():
                continue
            if job.cut_short:
                job.ended.set_exception(Broken())
            else:
                job.ended.set_result(None)
        if self._leaving_for_s is not None:
            self._loop.call_soon(self._stop_when_done)
