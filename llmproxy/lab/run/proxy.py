"""A proxy of a replay: the production dispatcher, core and attempt loop, with pollers in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from random import Random

from llmproxy.config import Config
from llmproxy.core.domain import (
    Listing,
    ModelCard,
    Outcome,
    Reading,
    Refused,
    Request,
    RequestFacts,
    Stage,
    Trouble,
    Usage,
    Verdict,
)
from llmproxy.core.lease_events import Progress, Started
from llmproxy.core.retry import Again, RetryBudget
from llmproxy.lab.baselines.policy import Surroundings
from llmproxy.lab.fleet.job import Broken, Leaving, Refusing, ServerJob, TooLong, TransferFailed
from llmproxy.lab.fleet.kv_connector import KeptKv
from llmproxy.lab.fleet.kv_events import KvEvents
from llmproxy.lab.fleet.server import SimulatedServer
from llmproxy.lab.fleet.world import World
from llmproxy.lab.policies.by_name import PolicyPlan
from llmproxy.lab.results.audit import AuditedPools
from llmproxy.lab.results.record import Record
from llmproxy.lab.run.identity import IdentityReader
from llmproxy.lab.traces.arrival import BASE_MODEL, Arrival
from llmproxy.scheduling.attempt import Attempt
from llmproxy.scheduling.attempts import Routing, run_attempts
from llmproxy.scheduling.dispatcher import Dispatcher
from llmproxy.scheduling.lease import Lease

BYTES_PER_TOKEN = 4.3
"""Mean bytes per token of a replay's prompts. As in production, the proxy learns it from the usage of answers."""
BYTES_SIGMA = 0.1
PROGRESS_S = 0.3  # Interval at which the tokens of open streams are counted. In the gateway it is 0.5 s.
HEALTH_INTERVAL_S = 1.0  # Interval of health checks under a policy that reads no metrics.


class LabProxy:
    """Serves arrivals with the production waiting room, placements and attempt loop.

    The proxy sees only the fields of an arrival that a gateway can read from a request: names, tenant, band and the
    bytes of the prompt. Only the engine knows the length of the answer.
    """

    def __init__(self, config: Config, plan: PolicyPlan, world: World, rng: Random) -> None:
        self._config = config
        self._world = world
        self._replicas = world.replicas
        self._scrape_s = plan.scrape_s
        self._rng = rng
        self._budget = RetryBudget(config.retry.budget_ratio)
        self._identities = IdentityReader(config)
        self._loop = asyncio.get_running_loop()
        around = Surroundings(
            Random(rng.getrandbits(32)),
            self._loop.time,
            world.prompts,
            world.blocks.block_tokens,
            lambda: KvEvents(world, self._loop.time).cached_tokens,
        )
        configured = {backend.name: backend.max_in_flight for backend in config.backends}
        limits = {name: configured.get(name) for name in self._replicas}
        roles = {name: replica.spec.role for name, replica in self._replicas.items()}
        settings = replace(plan.settings, roles=roles)
        self.pools = AuditedPools(settings, limits, {}, lambda: plan.make_placement(around, world))
        self.dispatcher = Dispatcher(self.pools)
        cards = [ModelCard(name, BASE_MODEL, None) for name in world.adapters]
        self._cards = {
            name: (ModelCard(BASE_MODEL, None, replica.spec.max_model_len), *cards)
            for name, replica in self._replicas.items()
        }
        self._streams: dict[str, tuple[Lease, ServerJob, SimulatedServer]] = {}
        self._kept: dict[str, KeptKv] = {}
        self._stopped = False

    # --- polling ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        for name in self._replicas:
            self._poll(name, None)
        self._loop.call_later(PROGRESS_S, self._count_streams)

    def stop(self) -> None:
        self._stopped = True
        self.dispatcher.close()

    def _poll(self, name: str, listed: float | None) -> None:
        """Polls a replica once. `listed` is the time of its last model list, None after a failure."""
        if self._stopped:
            return
        now, poll = self._loop.time(), self._config.poll
        interval_s = HEALTH_INTERVAL_S if self._scrape_s is None else self._scrape_s
        try:
            gauges = self._replicas[name].scrape()
        except (Refusing, Leaving) as failed:
            trouble = Trouble.REFUSED if isinstance(failed, Refusing) else Trouble.UNHEALTHY
            self.dispatcher.troubled(name, trouble, "")
            self._loop.call_later(self._jittered(interval_s), self._poll, name, None)
            return
        except TimeoutError:
            self._loop.call_later(poll.timeout_s, self._silent, name)
            return
        if listed is None or now - listed >= poll.models_interval_s:
            self.dispatcher.listed(name, Listing(now, self._cards[name]))
            listed = now
        if gauges is not None and self._scrape_s is not None:
            engine = self._replicas[name].engine
            reading = Reading(
                taken_at_s=now,
                running=gauges.running,
                waiting=gauges.waiting,
                kv_used=gauges.kv_used,
                kv_tokens=engine.kv_blocks * engine.block_size,
                running_adapters=frozenset(gauges.running_adapters),
                max_adapters=engine.max_loras if len(self._cards[name]) > 1 else None,
                deferred=gauges.deferred,
                generated=gauges.generated,
            )
            self.dispatcher.observe(name, reading)
        self.dispatcher.answered(name)
        self._loop.call_later(self._jittered(interval_s), self._poll, name, listed)

    def _silent(self, name: str) -> None:
        if not self._stopped:
            self.dispatcher.timed_out(name)
            self.dispatcher.troubled(name, Trouble.TIMEOUT, "")
            self._loop.call_later(self._jittered(self._config.poll.interval_s), self._poll, name, None)

    def _count_streams(self) -> None:
        """Reports the tokens of open streams, as the gateway does while it relays them."""
        if self._stopped:
            return
        now, stall_s = self._loop.time(), self._config.timeouts.stall_s
        for lease, job, replica in self._streams.values():
            answered_tokens = replica.answered_tokens(job)
            if answered_tokens > job.heard_tokens:
                job.heard_tokens, job.heard_s = answered_tokens, now
                if lease.grant.request.stream:
                    lease.apply(Progress(lease.grant.lease, answered_tokens), now)
            elif answered_tokens and now - job.heard_s >= stall_s:
                job.break_off(by_timeout=True)
        self._loop.call_later(PROGRESS_S, self._count_streams)

    def answers(self) -> Iterator[tuple[str, int]]:
        """Yields (request id, tokens so far) of every answer that has begun."""
        for request_id, (_, job, replica) in self._streams.items():
            if job.first_s is not None:
                yield request_id, replica.answered_tokens(job)

    def band(self, arrival: Arrival) -> int:
        return self._identities.band(arrival)

    def _jittered(self, interval_s: float) -> float:
        return interval_s * self._rng.uniform(0.8, 1.0)

    # --- one request --------------------------------------------------------------------------------------------------

    async def serve(self, arrival: Arrival) -> Record:
        """Serves a request. Never raises: failures are in the record."""
        now = self._loop.time()
        record = Record(arrival, now, self.band(arrival))
        request_id = self._world.enter(arrival)
        try:
            await self._schedule(request_id, record)
        except Refused as refused:
            self._refuse(record, refused)
        finally:
            self._world.leave(request_id)
            record.ended_s = self._loop.time()
        return record

    async def _schedule(self, request_id: str, record: Record) -> None:
        arrival = record.arrival
        total_tokens = arrival.prompt_tokens + arrival.output_tokens
        if all(total_tokens > replica.context_tokens for replica in self._replicas.values()):
            record.outcome = Outcome.BAD_REQUEST
            return
        prompt_bytes = round(arrival.prompt_tokens * BYTES_PER_TOKEN * self._rng.lognormvariate(0.0, BYTES_SIGMA))
        facts = RequestFacts(arrival.adapter or BASE_MODEL, stream=not arrival.whole, prompt_bytes=prompt_bytes)
        target = await self.dispatcher.resolve(facts.model, self._config.queue.no_backend_wait_s, prompt_bytes)
        self._budget.request()
        prompt_tokens, output_tokens = self.pools.estimator.tokens(target.model, facts)
        identity = self._identities.identity(arrival, target, record.band)
        request = Request(
            id=request_id,
            pool=target.pool,
            model=target.model,
            adapter=target.adapter,
            band=record.band,
            flow=identity.flow,
            arrived_s=record.arrived_s,
            # The wait counts from the moment at which the model name is resolved.
            deadline_s=self._loop.time() + identity.max_wait_s,
            body_bytes=prompt_bytes,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            stream=not arrival.whole,
            tenant=identity.tenant,
            weight=identity.weight,
            slo=identity.slo,
            limits=identity.limits,
            prefix=self._world.prompts[request_id].blocks[: arrival.prompt_tokens // self._world.blocks.block_tokens],
            prefix_tokens=self._world.blocks.block_tokens * prompt_tokens / arrival.prompt_tokens,
            session=arrival.session,
            splittable=self._world.split_up,
        )
        routing, extra_attempts = Routing(), self._config.retry.extra_attempts
        held: Lease | None = None

        async def serve(lease: Lease, attempt: Attempt) -> None:
            nonlocal held
            held = lease
            await self._attempt(record, routing, request, lease, attempt)

        try:
            await run_attempts(request, routing, serve, self.dispatcher, self._budget, extra_attempts)
        except Refused as refused:
            self._refuse(record, refused)
        else:
            self._learn(record, request, held)
        finally:
            # A preempted attempt is no failure, so it is not counted.
            record.attempts, record.preemptions = routing.attempts - routing.preemptions, routing.preemptions
            self._kept.pop(request.id, None)
            self.dispatcher.ended(request, _met(request, record))

    def _learn(self, record: Record, request: Request, lease: Lease | None) -> None:
        """Learns from a completed answer, as the gateway does."""
        if record.outcome is Outcome.COMPLETED and lease is not None and lease.usage is not None:
            self.pools.estimator.learn(request.model, request.body_bytes, 1, lease.usage)
            grant, hashes = lease.grant, self._world.blocks.cached(record.arrival)
            self.dispatcher.cached(request.pool, grant.lease, grant.placed.backend, hashes)

    def _refuse(self, record: Record, refused: Refused) -> None:
        # A retry that finds no backend ends with the outcome of the attempt before it, as in the gateway.
        if record.outcome is Outcome.INTERNAL:
            record.outcome = refused.outcome
            record.queue_wait_s = self._loop.time() - record.arrived_s

    async def _attempt(
        self, record: Record, routing: Routing, request: Request, lease: Lease, attempt: Attempt
    ) -> None:
        """Attempts the request on one backend. Sets its result, the lease's verdict and usage, and the outcome."""
        record.queue_wait_s, record.backend = routing.queue_wait_s or 0.0, lease.backend
        record.predicted_ttft, record.predicted_tpot = lease.grant.placed.ttft, lease.grant.placed.tpot
        stage = lease.grant.request.stage
        if stage is Stage.WHOLE:
            record.prefilled_on = None
        attempt.again = await self._run(record, request, len(routing.tried), lease)
        attempt.verdict, attempt.deadly = lease.verdict, attempt.again is Again.ONCE
        attempt.prefilled = stage is Stage.PREFILL and lease.verdict is Verdict.SERVED

    async def _run(self, record: Record, request: Request, leases: int, lease: Lease) -> Again:
        """Serves the request on the lease's replica. Returns whether another attempt may follow."""
        arrival, replica = record.arrival, self._replicas[lease.backend]
        if lease.preempted and not (lease.revoked or lease.hung):
            lease.verdict = Verdict.PREEMPTED
            return Again.NO
        stage = lease.grant.request.stage
        sequence = self._world.sequence(request.id, f"{request.id}.{leases}", stage)
        kept = self._kept.pop(request.id, None) if stage is Stage.DECODE else None
        timers: list[asyncio.TimerHandle] = []

        def first() -> None:
            if request.stream:
                lease.apply(Started(lease.grant.lease), self._loop.time())
            timers.pop().cancel()

        try:
            job = replica.open(sequence, first, kept)
        except (Refusing, Leaving) as failed:
            leaving = isinstance(failed, Leaving)
            lease.verdict = Verdict.DRAINING if leaving else Verdict.CONNECT_FAILED
            record.outcome = Outcome.UPSTREAM_STATUS if leaving else Outcome.CONNECT_FAILED
            return Again.ELSEWHERE
        except TooLong:
            lease.verdict, record.outcome = Verdict.SERVED, Outcome.UPSTREAM_STATUS
            lease.usage = Usage(0, 0)
            return Again.NO
        timers.append(self._loop.call_later(self._config.timeouts.first_byte_s, job.break_off, True))

        def cut() -> None:
            # A running answer is not preempted, but a dead backend ends every attempt.
            if lease.revoked or job.first_s is None:
                job.break_off()
                # Abort the sequence at once, so that it yields no token before this task runs again.
                replica.leave(job)

        lease.on_cut = cut
        self._streams[request.id] = lease, job, replica
        try:
            async with asyncio.timeout(self._config.timeouts.total_s):
                await job.ended
        except Broken as broken:
            return self._broke(request, record, lease, job, broken.by_timeout)
        except TransferFailed:
            lease.verdict, record.outcome = Verdict.TRANSFER_FAILED, Outcome.UPSTREAM_STATUS
            return Again.ELSEWHERE
        except TimeoutError:
            return self._broke(request, record, lease, job, by_timeout=True)
        finally:
            lease.on_cut = None
            del self._streams[request.id]
            replica.leave(job)
            for timer in timers:
                timer.cancel()
        lease.verdict = Verdict.SERVED
        if not request.stream:
            lease.apply(Started(lease.grant.lease), self._loop.time())
        if stage is Stage.PREFILL:
            self._kept[request.id], record.prefilled_on = replica.kept(job), lease.backend
            lease.usage = Usage(arrival.prompt_tokens, 1, job.hit_tokens)
            return Again.NO
        if kept is not None:
            job.hit_tokens = kept.cached_tokens
        record.outcome = Outcome.COMPLETED
        self._measure(record, lease, job, arrival.output_tokens)
        lease.usage = Usage(arrival.prompt_tokens, arrival.output_tokens, job.hit_tokens)
        return Again.NO

    def _broke(self, request: Request, record: Record, lease: Lease, job: ServerJob, by_timeout: bool) -> Again:
        if lease.preempted and not (lease.revoked or lease.hung) and job.first_s is None:
            lease.verdict = Verdict.PREEMPTED
            return Again.NO
        failed = Verdict.TIMED_OUT if by_timeout and job.first_s is None else Verdict.FAILED
        lease.verdict = Verdict.LOST if lease.revoked or lease.hung else failed
        if job.first_s is None or lease.grant.request.stage is Stage.PREFILL:
            record.outcome = Outcome.UPSTREAM_TIMEOUT if by_timeout else Outcome.CONNECT_FAILED
            return Again.ONCE
        record.outcome = Outcome.BROKEN_STREAM
        self._measure(record, lease, job, job.heard_tokens)
        # The tokens that arrived were computed, so they are charged.
        lease.usage = Usage(request.prompt_tokens, job.heard_tokens)
        return Again.NO

    def _measure(self, record: Record, lease: Lease, job: ServerJob, output_tokens: int) -> None:
        assert job.first_s is not None
        record.hit_tokens, record.output_tokens = job.hit_tokens or 0, output_tokens
        if record.arrival.whole:
            return
        record.ttft_s = job.first_s - record.arrived_s
        record.backend_ttft_s = job.first_s - lease.grant.at_s
        if output_tokens > 1:
            record.tpot_s = (self._loop.time() - job.first_s) / (output_tokens - 1)


def _met(request: Request, record: Record) -> bool | None:
    """Returns whether the request met its objective; None without an objective or after a rate limit refusal.

    As in the gateway, a whole answer shows no first token, so the time of its grant counts.
    """
    if request.slo is None or record.outcome is Outcome.RATE_LIMITED:
        return None
    first_s = record.ttft_s if request.stream else record.queue_wait_s
    return record.outcome is Outcome.COMPLETED and request.slo.met(first_s, record.tpot_s)
