"""A model of the vLLM V1 engine: which tokens each step computes and how long the step takes. Pure, in virtual time.

The rules are those of vLLM V1's scheduler: running requests first, then waiting ones first come first served; chunked
prefill under a token budget; a new request is admitted only when its whole prompt fits in the free KV blocks; when a
running request finds no block, the youngest running one is preempted and computed again later; a request whose adapter
does not fit the batch waits while others pass it. Step times come from `profiles`.

A step costs time in what *changes*: requests admitted, finished or entering a new block. A decoding request is not
touched between two blocks, since everything about it follows from the number of the step; while nothing but decoding
happens, any number of steps can be done at once.

With vLLM's asynchronous scheduling, its default on a GPU, a step is planned when the one before it begins. So a request
that arrives during a step waits for the whole next one too, and the place, adapter and blocks of one that ends serve
nobody in the next step. Gauges count those who are planned as running. Left out is the token that vLLM computes in vain
for an answer that ended by itself, and `overhead_ms` of a profile is that of a scheduler that does not plan ahead.

A request that is `remote` leaves the queue as any other does, gets the blocks of its prompt, and waits for their
content beside the batch: `StepResult.fetches` says that the transfer begins, `fetched` that it has ended. Then it goes
to the head of the queue and computes one token, the last of its prompt. Who transfers, and how long that takes, is the
caller's matter. A request that `pins` keeps its blocks when it has ended, until `release`.
"""

from __future__ import annotations

import random

from llmproxy.lab.simulator.engine.adapter_slots import AdapterSlots
from llmproxy.lab.simulator.engine.decode_times import DecodeTimes
from llmproxy.lab.simulator.engine.kv_cache import Changes
from llmproxy.lab.simulator.engine.kv_store import KvStore
from llmproxy.lab.simulator.engine.kv_transfer import KvTransfer
from llmproxy.lab.simulator.engine.profiles import Noise, Profile
from llmproxy.lab.simulator.engine.reports import Counters, Gauges, StepResult
from llmproxy.lab.simulator.engine.sequence import Decodes, EngineRequest, LiveSequence, StepPlan, Waiting
from llmproxy.lab.simulator.engine.sequence_blocks import SequenceBlocks


class Engine:
    """One engine. `add` and `abort` at any time, `step` whenever `busy`; a request ends by finishing or by `abort`."""

    def __init__(
        self,
        profile: Profile,
        *,
        max_num_seqs: int = 256,
        max_loras: int = 4,
        max_cpu_loras: int | None = None,
        kv_tokens: int | None = None,
        block_size: int = 16,
        step_tokens: int = 8192,
        async_scheduling: bool = True,
        noise: Noise | None = None,
        seed: int = 0,
        store: tuple[KvStore, KvTransfer] | None = None,
    ) -> None:
        """`step_tokens` is the token budget of a step, `kv_tokens` defaults to the profile's. Without `noise` every
        step takes exactly what the profile says. A `store` is shared with other engines, and comes with the times of
        loading from it. Raises ValueError for numbers that vLLM would refuse, too.
        """
        if not 1 <= max_num_seqs <= step_tokens:
            raise ValueError(f"max_num_seqs must be from 1 to the step's {step_tokens} tokens, got {max_num_seqs}")
        self.profile = profile
        self.max_num_seqs = max_num_seqs
        self.max_loras = max_loras
        self.block_size = block_size
        self.counters = Counters()
        self._step_tokens = step_tokens
        self._async_scheduling = async_scheduling
        self._noise = noise
        self._random = random.Random(seed)
        blocks = (profile.kv_tokens if kv_tokens is None else kv_tokens) // block_size
        self.kv = SequenceBlocks(blocks, block_size, store[0] if store is not None else None)
        self._cache = self.kv.cache
        self._load_s = store[1].transfer_s if store is not None else None
        self._live: dict[str, LiveSequence] = {}
        self._waiting = Waiting()
        # Those that wait for KV of another engine, and those of them that were aborted under a transfer: it still
        # writes into their blocks.
        self._fetching: dict[str, LiveSequence] = {}
        self._abandoned: dict[str, LiveSequence] = {}
        # The next step, if it is planned already, and those that end with this one, of which that plan knows nothing.
        self._ahead: StepPlan | None = None
        self._ended: list[LiveSequence] = []
        self._found_for: tuple[EngineRequest, int] | None = None
        self._found = 0
        # Whether no waiting request can be admitted. Looked at again only when a request came or left: decoding alone
        # makes no room.
        self._blocked = False
        # In order of admission. At most one, and then the last, is still in prefill: a chunk is cut only where the
        # budget ends, so no request is admitted behind it.
        self._running: dict[str, LiveSequence] = {}
        self._prefilling: LiveSequence | None = None
        self._decodes = Decodes(block_size)
        self._slots = AdapterSlots(max_loras, max_loras if max_cpu_loras is None else max_cpu_loras, profile)

    # --- requests and state -------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        planned = self._ahead is not None and bool(self._ahead.fetches)
        return bool(self._running) or planned or (not self._blocked and len(self._live) > len(self._fetching))

    @property
    def kv_blocks(self) -> int:
        """All blocks, the one that is never used included, as vLLM's `num_gpu_blocks`."""
        return self._cache.blocks

    @property
    def kv_room_tokens(self) -> int:
        """The longest sequence that can ever be computed."""
        return (self._cache.blocks - 1) * self.block_size

    def cached_tokens(self, request: EngineRequest) -> int:
        """How many tokens of its prompt a request would find cached now."""
        # Placement asks for the same waiting request again and again between steps that change nothing here.
        key = request, self._cache.version
        if key != self._found_for:
            self._found_for, self._found = key, len(self.kv.cached(request, request.prompt_tokens))
        return self.block_size * self._found

    def answered_tokens(self, request_id: str) -> int | None:
        """How many tokens a request has got, None where it is not (or no longer) in the engine."""
        sequence = self._live.get(request_id)
        if sequence is None:
            return None
        if not sequence.last_step:
            return sequence.emitted
        return sequence.request.output_tokens - (sequence.last_step - self.counters.steps)

    def publish_kv_events(self) -> None:
        """Report from now on, with each step, which blocks became cached and which were evicted."""
        self._cache.changes = Changes()

    def add(self, request: EngineRequest) -> None:
        """Queue a request. ValueError for one that could never finish or whose id is alive."""
        if request.id in self._live:
            raise ValueError(f"request {request.id!r} is already in the engine")
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise ValueError(f"request {request.id!r} needs at least one prompt and one output token")
        total_tokens = request.prompt_tokens + request.output_tokens
        if total_tokens > self.kv_room_tokens:
            raise ValueError(f"request {request.id!r} has {total_tokens} tokens, the cache {self.kv_room_tokens}")
        if request.adapter is not None and self.max_loras < 1:
            raise ValueError(f"request {request.id!r} asks for an adapter and the engine has no adapter slot")
        sequence = LiveSequence(request, fetch=request.remote)
        self._live[request.id] = sequence
        self._waiting.add(sequence)
        self._blocked = False

    def abort(self, request_id: str) -> bool:
        """Forget a request, queued or running, at once; False where it is not (or no longer) in the engine."""
        sequence = self._live.pop(request_id, None)
        if sequence is None:
            return False
        if request_id in self._running:
            self._stop(sequence)
            self._slots.leave(sequence.request.adapter)
        elif self._fetching.pop(request_id, None) is None:
            self._waiting.remove(sequence)
        elif self._ahead is None or self._ahead.fetches.pop(request_id, None) is None:
            self._abandoned[request_id] = sequence
            return True
        self.kv.release(sequence)
        self._blocked = False
        return True

    # --- KV of other engines ------------------------------------------------------------------------------------------

    def fetched(self, request_id: str, right: bool = True) -> None:
        """The KV of a `remote` request has come; not `right`: from blocks that were not its own any more."""
        if (abandoned := self._abandoned.pop(request_id, None)) is not None:
            self.kv.release(abandoned)
        else:
            sequence = self._fetching.pop(request_id)
            sequence.wrong = sequence.wrong or not right
            self.counters.external += sequence.length - sequence.computed
            # The last token of a prompt is computed in any case, to get the next one.
            sequence.computed = sequence.length - 1
            self.kv.fill(sequence, sequence.computed)
            self._waiting.fetched[request_id] = sequence
        self._blocked = False

    def not_fetched(self, request_id: str) -> None:
        """The KV of a `remote` request cannot be had: its prompt is computed here."""
        sequence = self._abandoned.pop(request_id, None) or self._fetching.pop(request_id)
        self.kv.release(sequence)
        if request_id in self._live:
            self._waiting.add_first(sequence)
        self._blocked = False

    def release(self, request_id: str) -> bool:
        """Give away the blocks of an ended request that `pins`; False where they are not kept (any more)."""
        sequence = self.kv.kept.pop(request_id, None)
        if sequence is None:
            return False
        self.kv.release(sequence)
        self._blocked = False
        return True

    def gauges(self) -> Gauges:
        """The state now. vLLM publishes it only after a step, which the caller has to imitate."""
        return Gauges(
            running=len(self._running),
            waiting=len(self._live) - len(self._running),
            deferred=self._waiting.deferred + len(self._fetching),
            kv_used=self._cache.usage,
            running_adapters=self._slots.in_batch,
            to_fetch=self._waiting.to_fetch,
            fetching=len(self._fetching),
            fetched=len(self._waiting.fetched),
            generated=self.counters.generation,
        )

    def step(self) -> StepResult:
        """Do one step. Where the engine is not busy, it does nothing and takes no time."""
        if not self.busy:
            return StepResult(0.0)
        # Where nothing runs any more, a plan is as good as none, unless a transfer was to begin with it.
        ahead = self._ahead
        plan = ahead if ahead is not None and (self._running or ahead.fetches) else self._plan()
        self.counters.steps += 1
        decodes, context_tokens = len(self._decodes), self._decodes.context_tokens(plan.now)
        step_s = self.profile.step_s(decodes, context_tokens, plan.chunks, adapters=bool(self._slots.in_batch))
        noise = 1.0 if self._noise is None else self._noise.factor(self._random)
        duration_s = plan.load_s + step_s * noise
        running = tuple(self._running)
        return StepResult(
            duration_s=duration_s,
            emitted=running if self._prefilling is None else running[:-1],
            finished=self._emit(plan),
            admitted=tuple(plan.admitted),
            preempted=tuple(plan.preempted),
            fetches=tuple(plan.fetches.items()),
            wrong=tuple(plan.wrong),
            prefill_tokens=sum(end - first for first, end in plan.chunks),
            decode_tokens=decodes,
            kv_events=self._changes(duration_s),
        )

    # --- many steps at once -------------------------------------------------------------------------------------------

    def stable_steps(self) -> int:
        """How many further steps are certain to do nothing but decode, for the same sequences up to and including the
        last of them, which may be the last one of some. 0 where the next step is for `step`.
        """
        nobody_waits = len(self._live) == len(self._running)
        planned = self._ahead is not None and (self._ahead.chunks or self._ahead.preempted or self._ahead.fetches)
        if planned or self._prefilling is not None or not self._decodes or not (nobody_waits or self._blocked):
            return 0
        # A step that is planned has its blocks.
        ahead = self._ahead is not None
        return ahead + self._decodes.steady_steps(self.counters.steps + ahead, self._cache.free)

    def stretch_s(self, steps: int) -> float:
        """Seconds that the next `steps` steps, all of them stable, take without noise."""
        return self._decode_times().total_s(steps)

    def steps_within(self, seconds: float) -> int:
        """How many of the stable steps have ended `seconds` from now, without noise."""
        return self._decode_times().steps_within(seconds, self.stable_steps())

    def advance(self, steps: int) -> StepResult:
        """Do that many stable steps, after which everything is as `step` would have left it.

        `duration_s` is without noise. `emitted` is empty: every decoding request got a token with every step, and some
        `finished` with the last one. ValueError for more steps than are stable.
        """
        if not 1 <= steps <= self.stable_steps():
            raise ValueError(f"{steps} steps were to be done at once and {self.stable_steps()} are stable")
        times = self._decode_times()
        duration_s = times.total_s(steps)
        kv_events: tuple[tuple[float, Changes], ...] = ()
        decodes, done, ahead = len(self._decodes), self.counters.steps, self._ahead is not None
        for now in range(done + 1 + ahead, done + steps + 1):
            for sequence in self._decodes.entering(now):
                self.kv.grow(sequence, now)
            if now - ahead < done + steps and self._cache.changes:
                kv_events += self._changes(times.total_s(now - ahead - done))
        self.counters.steps += steps
        self.counters.generation += decodes * (steps - 1)
        finished = self._emit(StepPlan(self.counters.steps))
        kv_events += self._changes(duration_s)
        return StepResult(duration_s, finished=finished, decode_tokens=decodes * steps, kv_events=kv_events)

    def _changes(self, after_s: float) -> tuple[tuple[float, Changes], ...]:
        """The batch of KV events of a step that ends in `after_s`, if there is one."""
        changes = self._cache.changes
        if not changes:
            return ()
        self._cache.changes = Changes()
        return ((after_s, changes),)

    def _decode_times(self) -> DecodeTimes:
        """How long the next steps take if they only decode."""
        decodes, adapters = len(self._decodes), bool(self._slots.in_batch)
        context_tokens = self._decodes.context_tokens(self.counters.steps + 1)
        first_s = self.profile.step_s(decodes, context_tokens, [], adapters)
        second_s = self.profile.step_s(decodes, context_tokens + decodes, [], adapters)
        return DecodeTimes(first_s, second_s - first_s)

    # --- one step -----------------------------------------------------------------------------------------------------

    def _plan(self) -> StepPlan:
        """Decide what the next step computes."""
        plan = StepPlan(self.counters.steps + 1)
        self._grow_decodes(plan)
        plan.budget = self._step_tokens - len(self._decodes)
        self._continue_prefill(plan)
        self._admit(plan)
        return plan

    def _grow_decodes(self, plan: StepPlan) -> None:
        """Give a block to each decode that enters one, preempting the youngest while there is none."""
        for sequence in list(self._decodes.entering(plan.now)):
            if sequence.request.id not in self._running:
                continue
            while not self.kv.grow(sequence, plan.now):
                youngest = next(reversed(self._running.values()))
                self._preempt(youngest, plan)
                if youngest is sequence:
                    break

    def _continue_prefill(self, plan: StepPlan) -> None:
        """Compute the next chunk of the prompt that the last step cut."""
        sequence = self._prefilling
        if sequence is not None and not self._prefill(sequence, plan):
            self._preempt(sequence, plan)

    def _admit(self, plan: StepPlan) -> None:
        """Let waiting requests in, first come first served among those whose adapter fits the batch. Not in a step that
        has preempted a request.
        """
        if self._blocked or plan.preempted:
            return
        while plan.budget > 0 and self._prefilling is None and len(self._running) < len(self._live):
            full = len(self._running) + len(self._ended) >= self.max_num_seqs
            sequence = None if full else self._waiting.first(self._slots.fits)
            if sequence is None or not self._enter(sequence, plan):
                self._blocked = True
                return

    def _enter(self, sequence: LiveSequence, plan: StepPlan) -> bool:
        """Take a request from the queue into the batch, or let the transfer of its KV begin. False where the free
        blocks do not hold all of it.
        """
        request = sequence.request
        if request.id not in self._waiting.fetched and not self.kv.take(sequence):
            return False
        self._waiting.remove(sequence)
        if not sequence.seen:
            sequence.seen = True
            self.counters.prefix_queries += sequence.length
            self.counters.prefix_hits += sequence.computed
        if sequence.fetch:
            sequence.fetch = False
            self.kv.extend(sequence, sequence.length)
            self._fetching[request.id] = sequence
            plan.fetches[request.id] = sequence.length - sequence.computed
            return True
        if self._load_s is not None and (loaded := self.kv.load(sequence)):
            self.counters.external += loaded
            plan.load_s += self._load_s(loaded)
        plan.admitted.append((request.id, sequence.computed))
        if sequence.wrong:
            plan.wrong.append(request.id)
        load_s = self._slots.enter(request.adapter)
        plan.load_s += load_s
        self.counters.adapter_requests += request.adapter is not None
        self.counters.adapter_loads += load_s > 0.0
        self._running[request.id] = self._prefilling = sequence
        self._prefill(sequence, plan)
        return True

    def _prefill(self, sequence: LiveSequence, plan: StepPlan) -> bool:
        """Compute as much of the prompt as the budget allows; the end of it is the first token of the answer. False
        where there are too few blocks.
        """
        first, end = sequence.computed, min(sequence.length, sequence.computed + plan.budget)
        if not self.kv.extend(sequence, end):
            return False
        plan.chunks.append((first, end))
        plan.budget -= end - first
        sequence.computed = end
        self.kv.fill(sequence, end)
        if end == sequence.length:
            self._prefilling = None
            plan.ready.append(sequence)
        return True

    def _emit(self, plan: StepPlan) -> tuple[str, ...]:
        """Emit this step's tokens, end requests that got their last one, and let finished prefills decode."""
        ready = [one for one in plan.ready if self._running.get(one.request.id) is one]
        self.counters.generation += len(self._decodes) + len(ready)
        done = self._decodes.ending(plan.now)
        for sequence in ready:
            if sequence.emitted == 0:
                self.counters.prompt += sequence.request.prompt_tokens
            sequence.emitted += 1
            left = sequence.request.output_tokens - sequence.emitted
            if left == 0:
                done.append(sequence)
            # The first decode step is the next one, and it computes the token emitted now.
            sequence.mark = sequence.computed - (plan.now + 1)
            sequence.last_step = plan.now + left
            self._decodes.add(sequence)
        for sequence in done:
            self.kv.fill(sequence, sequence.request.prompt_tokens + sequence.request.output_tokens - 1)
            self._stop(sequence)
            del self._live[sequence.request.id]
        self._ended = done
        self._ahead = self._plan() if self._async_scheduling and self._running else None
        self._ended = []
        for sequence in done:
            self._slots.leave(sequence.request.adapter)
            if sequence.request.pins:
                self.kv.kept[sequence.request.id] = sequence
            else:
                self.kv.release(sequence)
            self._blocked = False
        return tuple(sequence.request.id for sequence in done)

    # --- the life of one sequence -------------------------------------------------------------------------------------

    def _stop(self, sequence: LiveSequence) -> None:
        """Compute no more of a sequence of the batch."""
        del self._running[sequence.request.id]
        if sequence is self._prefilling:
            self._prefilling = None
        elif sequence.last_step:
            self._decodes.remove(sequence)

    def _preempt(self, sequence: LiveSequence, plan: StepPlan) -> None:
        """Back to the head of the queue, with all its tokens to compute anew."""
        if sequence.last_step:
            sequence.emitted = sequence.request.output_tokens - (sequence.last_step - plan.now + 1)
        self._stop(sequence)
        self._slots.leave(sequence.request.adapter)
        self.kv.release(sequence)
        self._blocked = False
        sequence.computed = sequence.last_step = 0
        self._waiting.add_first(sequence)
        self.counters.preemptions += 1
        plan.preempted.append(sequence.request.id)
