"""A run in virtual time: a trace through the production scheduler onto simulated engines."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from random import Random

from llmproxy.config import Config
from llmproxy.core.domain import Outcome
from llmproxy.core.scaling.roles import prefill_share
from llmproxy.lab.fleet.fault_schedule import schedule
from llmproxy.lab.fleet.scaled import ScaledFleet
from llmproxy.lab.fleet.server import SimulatedServer
from llmproxy.lab.fleet.spec import Fault, FleetFaultKind, SimulatedFleet
from llmproxy.lab.fleet.world import Blocks, World
from llmproxy.lab.policies.by_name import PolicyPlan
from llmproxy.lab.results.fairness import LOOK_EVERY_S, OUTPUT_WEIGHT, PROMPT_WEIGHT
from llmproxy.lab.results.objectives import NOTHING_WANTED, Objectives, Wanted
from llmproxy.lab.results.record import Record
from llmproxy.lab.results.recorder import RunRecorder
from llmproxy.lab.run.proxy import LabProxy
from llmproxy.lab.run.virtual_time import run
from llmproxy.lab.scaling.signals import Look
from llmproxy.lab.traces.arrival import Arrival, Trace, turns_of

SETTLE_S = 2.0  # Time for polls before the first arrival, because a proxy starts before its clients.
SAMPLES = 120  # Number of load samples during a trace. Sampling continues at this rate until the last answer.
SAMPLE_LEAST_S = 0.05
DETECT_EVERY_S = 0.02  # Interval at which a run checks whether a fault is detected.
LATE_S = 60.0  # Window of an autoscaler that follows latencies.
DETECTABLE = frozenset({FleetFaultKind.KILL, FleetFaultKind.RESTART, FleetFaultKind.HANG, FleetFaultKind.SLOW})
"""Faults that a proxy should detect."""


@dataclass(frozen=True, slots=True)
class Setup:
    """All inputs of one run. Two runs with equal inputs give equal bytes.

    `duration_s` is the length of the trace, and `adapters` are its LoRA names. With `objectives_named`, each request
    sends its objectives to the proxy.
    """

    trace: Trace
    fleet: SimulatedFleet
    plan: PolicyPlan
    config: Config
    seed: int
    prefill_scale: float
    duration_s: float
    adapters: tuple[str, ...]
    warmup_s: float = 0.0
    objectives_named: bool = False
    wanted: Wanted = NOTHING_WANTED


def replay(setup: Setup, progress: Callable[[int], None] = lambda _: None) -> RunRecorder:
    """Runs `setup`. Calls `progress` repeatedly with the number of ended requests. Raises TraceError."""
    frozen = gc.get_threshold()
    # Requests have no reference cycles, so frequent garbage collections find nothing.
    gc.set_threshold(100_000, 20, 20)
    try:
        return run(Run(setup, progress).go())
    finally:
        gc.set_threshold(*frozen)


class Run:
    """The run of a trace. `on_record` gets every complete record. `proxies` has the proxies after the start."""

    def __init__(
        self,
        setup: Setup,
        progress: Callable[[int], None] = lambda _: None,
        on_record: Callable[[Record], None] = lambda _: None,
    ) -> None:
        self._setup = setup
        self._progress = progress
        self._on_record = on_record
        self._rng = Random(setup.seed)
        self.recorder = RunRecorder(setup.duration_s, [r.name for r in setup.fleet.replicas], setup.warmup_s)
        self._objectives = Objectives(setup.fleet, setup.prefill_scale, setup.wanted)
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: BaseException | None = None
        self._drained: asyncio.Future[None] | None = None
        self._over = False
        self._ended = 0
        self._output_tokens: Counter[int] = Counter()
        self.scaled: ScaledFleet | None = None
        self._answers: deque[tuple[float, float]] = deque()
        """(End, time to first token divided by its objective) of the last answers."""

    async def go(self) -> RunRecorder:
        setup, loop = self._setup, asyncio.get_running_loop()
        replicas = {
            spec.name: SimulatedServer(
                spec, setup.prefill_scale, self._rng.getrandbits(32), loop, kv_transfer=setup.fleet.kv_transfer
            )
            for spec in setup.fleet.replicas
        }
        if setup.fleet.autoscale is not None:
            self.scaled = ScaledFleet(setup.fleet.autoscale, replicas)
            self.scaled.begin()
            loop.call_at(SETTLE_S, self._scale, loop)
        for spec in setup.fleet.replicas if self.scaled is None else ():
            if spec.joins_s > 0:
                loop.call_at(SETTLE_S + spec.joins_s, replicas[spec.name].start)
            else:
                replicas[spec.name].start()
        blocks = Blocks(setup.trace.block_tokens, setup.fleet.replicas[0].block_size)
        self._replicas = replicas
        self._world = World(replicas, setup.adapters, blocks, setup.fleet.split_up)
        self.proxies = self._start_proxies(self._world)
        schedule(setup.fleet.faults, replicas, SETTLE_S)
        for fault in setup.fleet.faults:
            if fault.kind in DETECTABLE and fault.replica is not None:
                loop.call_at(SETTLE_S + fault.at_s, self._watch_for, loop, fault, fault.replica)
        loop.call_at(SETTLE_S, self._sample, loop, 0)
        loop.call_at(SETTLE_S + max(LOOK_EVERY_S, setup.warmup_s), self._look_at_service, loop)
        for at_s in (setup.warmup_s, setup.duration_s):
            loop.call_at(SETTLE_S + at_s, self._look_at_output)
        loop.call_at(SETTLE_S + setup.duration_s, self._look_at_ratio, loop)
        await self._feed(loop)
        if self._tasks:
            self._drained = loop.create_future()
            await self._drained
        self._over = True
        if self.scaled is not None:
            self.scaled.end(loop.time())
            turn_s = 2.0 * self.scaled.autoscale.start_s
            self.recorder.scaled(self.scaled.trail, self.scaled.cost_s, turn_s, SETTLE_S, loop.time())
        for proxy in self.proxies:
            proxy.stop()
            self.recorder.audited(proxy.pools.audit)
            self.recorder.ejected(sum(backend.health.ejected_times for backend in proxy.pools.backends.values()))
        for name, replica in replicas.items():
            self.recorder.counted(name, replica.counters)
        if self._failed is not None:
            raise self._failed
        self._progress(self._ended)
        return self.recorder

    def _start_proxies(self, world: World) -> list[LabProxy]:
        setup = self._setup
        proxies = [
            LabProxy(setup.config, setup.plan, world, Random(self._rng.getrandbits(32)))
            for _ in range(1 if setup.plan.central else setup.fleet.proxies)
        ]
        for proxy in proxies:
            proxy.start()
        return proxies

    def _watch_for(self, loop: asyncio.AbstractEventLoop, fault: Fault, replica: str) -> None:
        """Checks repeatedly until a proxy has detected the fault, or the fault ends."""
        passed_s = loop.time() - SETTLE_S - fault.at_s
        healths = [proxy.pools.backends[replica].health for proxy in self.proxies]
        if any(health.down or health.ejected for health in healths):
            self.recorder.fault_detected(fault, replica, passed_s)
        elif self._over or passed_s > _lasts_s(fault):
            self.recorder.fault_detected(fault, replica, None)
        else:
            loop.call_later(DETECT_EVERY_S, self._watch_for, loop, fault, replica)

    def _sample(self, loop: asyncio.AbstractEventLoop, number: int) -> None:
        """Samples the load of every serving replica, repeatedly until the last answer."""
        if self._over:
            return
        queued: dict[int, int] = {}
        for proxy in self.proxies:
            for band, (requests, _) in proxy.pools.queued().items():
                queued[band] = queued.get(band, 0) + requests
        load = {name: replica.load() for name, replica in self._replicas.items() if replica.alive}
        self.recorder.sample(loop.time() - SETTLE_S, load, queued)
        every_s = max(SAMPLE_LEAST_S, self._setup.duration_s / SAMPLES)
        loop.call_at(SETTLE_S + (number + 1) * every_s, self._sample, loop, number + 1)

    def _scale(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs the autoscaler, repeatedly until the last answer."""
        if self._over or self.scaled is None:
            return
        now, pools = loop.time(), self.proxies[0].pools
        needs = [need for proxy in self.proxies for need in proxy.pools.needs(now).values()]
        answers = self._answers
        while answers and answers[0][0] < now - SETTLE_S - LATE_S:
            answers.popleft()
        late = sorted(one[1] for one in answers)
        look = Look(
            now, self.scaled.up, self.scaled.asked, needs[0] if len(needs) == 1 else None,
            list(pools.views(now).values()),
            sum(requests for proxy in self.proxies for requests, _ in proxy.pools.queued().values()),
            late[int(0.9 * len(late))] if late else None,
        )  # fmt: skip
        self.scaled.look(look, loop)
        self.looked(look, self.scaled.asked)
        loop.call_later(self.scaled.ask_s, self._scale, loop)

    def looked(self, look: Look, wanted: int) -> None:
        """Handles a reading of the autoscaler's signal, for subclasses."""

    def _look_at_service(self, loop: asyncio.AbstractEventLoop) -> None:
        """Records each tenant's service so far and the backlogged tenants, repeatedly until the last answer."""
        under_way: dict[str, float] = {}
        waiting: dict[str, None] = {} if self._setup.plan.late else dict.fromkeys(self._world.arrivals)
        for proxy in self.proxies:
            if self._setup.plan.late:
                waiting.update(dict.fromkeys(proxy.pools.audit.waiting))
            for request_id, answered_tokens in proxy.answers():
                arrival = self._world.arrivals[request_id]
                service = PROMPT_WEIGHT * arrival.prompt_tokens + OUTPUT_WEIGHT * answered_tokens
                under_way[arrival.tenant] = under_way.get(arrival.tenant, 0.0) + service
                waiting.pop(request_id, None)
        self.recorder.service.look(under_way, {self._world.arrivals[one].tenant: None for one in waiting})
        if not self._over:
            loop.call_later(LOOK_EVERY_S, self._look_at_service, loop)

    def _look_at_ratio(self, loop: asyncio.AbstractEventLoop) -> None:
        """Records the share of replicas that prompts need, as the first proxy learned it."""
        for need in self.proxies[0].pools.needs(loop.time()).values():
            if need.prefill + need.decode > 0.0:
                self.recorder.prefill_share = prefill_share(need)

    def _look_at_output(self) -> None:
        """Records how many tokens each band has streamed by now."""
        tokens = self._output_tokens.copy()
        for proxy in self.proxies:
            for request_id, answered_tokens in proxy.answers():
                tokens[proxy.band(self._world.arrivals[request_id])] += answered_tokens
        self.recorder.output(tokens)

    # --- arrivals -----------------------------------------------------------------------------------------------------

    async def _feed(self, loop: asyncio.AbstractEventLoop) -> None:
        for arrival in self._setup.trace.arrivals():
            due_s = SETTLE_S + arrival.at_s
            if due_s > loop.time():
                await asyncio.sleep(due_s - loop.time())
            if self._failed is not None:
                return
            self._begin(arrival)

    def _begin(self, arrival: Arrival) -> None:
        if self._setup.objectives_named:
            ttft_slo_s, tpot_slo_s = self._objectives.for_arrival(arrival)
            arrival = replace(arrival, ttft_slo_s=ttft_slo_s, tpot_slo_s=tpot_slo_s)
        # A single proxy draws no random number: the results of a seed stay the same.
        proxy = self.proxies[0] if len(self.proxies) == 1 else self._rng.choice(self.proxies)
        task = asyncio.get_running_loop().create_task(self._serve(proxy, arrival))
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def _serve(self, proxy: LabProxy, arrival: Arrival) -> None:
        record = await proxy.serve(arrival)
        # Results count from the beginning of the trace.
        record.arrived_s -= SETTLE_S
        record.ended_s -= SETTLE_S
        self._judge(record)
        self._output_tokens[record.band] += record.output_tokens
        self._add(record)
        self._ended += 1
        if self._ended % 256 == 0:
            self._progress(self._ended)
        if record.outcome is Outcome.COMPLETED:
            if arrival.then is not None:
                await asyncio.sleep(arrival.think_s)
                self._begin(arrival.then)
        else:
            self._give_up(arrival.then, record)

    def _give_up(self, turn: Arrival | None, failed: Record) -> None:
        """Counts the later requests of a closed loop as missed, because they are not sent after a failed request.

        Otherwise a failure would improve the results.
        """
        for one in turns_of(turn):
            self._add(Record(one, failed.ended_s, failed.band, Outcome.CANCELLED, failed.ended_s))

    def _add(self, record: Record) -> None:
        self.recorder.add(record)
        self._on_record(record)

    def _judge(self, record: Record) -> None:
        record.met = self._objectives.met(record)
        if record.outcome is Outcome.COMPLETED and record.ttft_s is not None:
            self._answers.append((record.ended_s, record.ttft_s / self._objectives.for_arrival(record.arrival)[0]))

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._tasks and self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        if not task.cancelled() and task.exception() is not None:
            self._failed = self._failed or task.exception()


def _lasts_s(fault: Fault) -> float:
    if fault.kind is FleetFaultKind.RESTART:
        return fault.value
    return inf if fault.until_s is None else fault.until_s - fault.at_s
