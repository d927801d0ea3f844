"""A model of the vLLM V1 engine in virtual time: the tokens and the duration of each step.

The model follows the scheduler of vLLM V1:

- Running requests come first, then waiting requests in order of arrival.
- Prefill is chunked under a token budget.
- A request is admitted only if its whole prompt fits in the free KV blocks.
- If a running request finds no free block, the youngest running request is preempted and recomputed later.
- A request whose adapter does not fit the batch waits, and later requests pass it.

Step times come from `profiles`. Between two KV blocks, the state of a decoding request follows from the step number, so
any number of pure decode steps can be simulated at once.

With vLLM's asynchronous scheduling, its default on a GPU, a step is planned when its predecessor begins. So a request
that arrives during a step also waits for the whole next step, and the slot and blocks of a finished request stay unused
in the next step. Gauges count planned requests as running.

A `remote` request leaves the queue like any other, gets the blocks of its prompt, and waits outside the batch until
these are filled. `StepResult.fetches` reports the start of its transfer, and the caller, who models the transfer, ends
it with `fetched`. Then the request goes to the head of the queue and computes the last token of its prompt. The blocks
of a request that `pins` stay after its end until `release`.
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
    """A vLLM engine. Call `add` and `abort` at any time, and `step` while `busy`.

    A step has at most `step_tokens`. Without `noise`, it takes exactly the time of the profile. Other engines share the
    KV `store`. Raises ValueError for numbers that vLLM would refuse, too.
    """

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
        # Requests that wait for KV of another engine, and aborted requests whose transfer still writes into their
        # blocks.
        self._fetching: dict[str, LiveSequence] = {}
        self._abandoned: dict[str, LiveSequence] = {}
        # The next step, if it is already planned, and requests that end with the current step, which the plan ignores.
        self._ahead: StepPlan | None = None
        self._ended: list[LiveSequence] = []
        self._found_for: tuple[EngineRequest, int] | None = None
        self._found = 0
        # Whether no waiting request can be admitted. It changes only when a request arrives or leaves, because decoding
        # frees no blocks.
        self._blocked = False
        # In order of admission. Only the last can still be in prefill: a chunk is cut only at the end of the budget,
        # and then no further request is admitted.
        self._running: dict[str, LiveSequence] = {}
        self._prefilling: LiveSequence | None = None
        self._decodes = Decodes(block_size)
        self._slots = AdapterSlots(max_loras, max_loras if max_cpu_loras is None else max_cpu_loras, profile)

    # --- requests and state -------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether `step` has work: it would compute tokens, or begin a transfer of KV blocks."""
        planned = self._ahead is not None and bool(self._ahead.fetches)
        return bool(self._running) or planned or (not self._blocked and len(self._live) > len(self._fetching))

    @property
    def kv_blocks(self) -> int:
        """All blocks, including the null block, as vLLM's `num_gpu_blocks`."""
        return self._cache.blocks

    @property
    def kv_room_tokens(self) -> int:
        """The longest sequence, in tokens, that the engine can compute."""
        return (self._cache.blocks - 1) * self.block_size

    def cached_tokens(self, request: EngineRequest) -> int:
        # Memoised, because a placement asks about the same waiting request repeatedly between changes.
        key = request, self._cache.version
        if key != self._found_for:
            self._found_for, self._found = key, len(self.kv.cached(request, request.prompt_tokens))
        return self.block_size * self._found

    def answered_tokens(self, request_id: str) -> int | None:
        """Returns the number of output tokens of a request; None if it is not in the engine."""
        sequence = self._live.get(request_id)
        if sequence is None:
            return None
        if not sequence.last_step:
            return sequence.emitted
        return sequence.request.output_tokens - (sequence.last_step - self.counters.steps)

    def publish_kv_events(self) -> None:
        """Reports cached and evicted blocks with each step from now on."""
        self._cache.changes = Changes()

    def add(self, request: EngineRequest) -> None:
        """Queues a request. Raises ValueError if it could never finish, or if its id is in use."""
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
        """Removes a request at once. Returns False if it is not in the engine."""
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
        """Ends the transfer of a `remote` request. `right` is False if the blocks were reused before they were read."""
        if (abandoned := self._abandoned.pop(request_id, None)) is not None:
            self.kv.release(abandoned)
        else:
            sequence = self._fetching.pop(request_id)
            sequence.wrong = sequence.wrong or not right
            self.counters.external += sequence.length - sequence.computed
            # The last token of the prompt is always computed, to get the next token.
            sequence.computed = sequence.length - 1
            self.kv.fill(sequence, sequence.computed)
            self._waiting.fetched[request_id] = sequence
        self._blocked = False

    def not_fetched(self, request_id: str) -> None:
        """Computes the prompt of a `remote` request here, because its KV is not available."""
        sequence = self._abandoned.pop(request_id, None) or self._fetching.pop(request_id)
        self.kv.release(sequence)
        if request_id in self._live:
            self._waiting.add_first(sequence)
        self._blocked = False

    def release(self, request_id: str) -> bool:
        """Frees the blocks of an ended request that `pins`. Returns False if they are not pinned."""
        sequence = self.kv.kept.pop(request_id, None)
        if sequence is None:
            return False
        self.kv.release(sequence)
        self._blocked = False
        return True

    def gauges(self) -> Gauges:
        """Returns the current gauges. vLLM publishes them only after a step, which the caller must imitate."""
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
        """Runs one step. Without work, does nothing and takes no time."""
        if not self.busy:
            return StepResult(0.0)
        # Without running requests a plan is void, unless it begins a transfer.
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
        """Returns how many next steps certainly only decode the current sequences.

        Sequences may end with the last of these steps. If 0 is returned, call `step` next.
        """
        nobody_waits = len(self._live) == len(self._running)
        planned = self._ahead is not None and (self._ahead.chunks or self._ahead.preempted or self._ahead.fetches)
        if planned or self._prefilling is not None or not self._decodes or not (nobody_waits or self._blocked):
            return 0
        # A planned step already has its blocks.
        ahead = self._ahead is not None
        return ahead + self._decodes.steady_steps(self.counters.steps + ahead, self._cache.free)

    def stretch_s(self, steps: int) -> float:
        """Returns the total seconds of the next `steps` stable steps, without noise."""
        return self._decode_times().total_s(steps)

    def steps_within(self, seconds: float) -> int:
        """Returns the number of stable steps that end within `seconds`, without noise."""
        return self._decode_times().steps_within(seconds, self.stable_steps())

    def advance(self, steps: int) -> StepResult:
        """Runs several stable steps at once, with the same effect as `step`.

        The result's `duration_s` is without noise. Its `emitted` is empty, because every decoding request gets a token
        in every step; some requests may finish with the last step. Raises ValueError for more steps than are stable.
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
        """Returns the batch of KV events of a step that ends in `after_s`, if there are events."""
        changes = self._cache.changes
        if not changes:
            return ()
        self._cache.changes = Changes()
        return ((after_s, changes),)

    def _decode_times(self) -> DecodeTimes:
        """Returns the times of the next steps if they only decode."""
        decodes, adapters = len(self._decodes), bool(self._slots.in_batch)
        context_tokens = self._decodes.context_tokens(self.counters.steps + 1)
        first_s = self.profile.step_s(decodes, context_tokens, [], adapters)
        second_s = self.profile.step_s(decodes, context_tokens + decodes, [], adapters)
        return DecodeTimes(first_s, second_s - first_s)

    # --- one step -----------------------------------------------------------------------------------------------------

    def _plan(self) -> StepPlan:
        plan = StepPlan(self.counters.steps + 1)
        self._grow_decodes(plan)
        plan.budget = self._step_tokens - len(self._decodes)
        self._continue_prefill(plan)
        self._admit(plan)
        return plan

    def _grow_decodes(self, plan: StepPlan) -> None:
        """Gives a block to each decode that needs one. Preempts the youngest requests while no block is free."""
        for sequence in list(self._decodes.entering(plan.now)):
            if sequence.request.id not in self._running:
                continue
            while not self.kv.grow(sequence, plan.now):
                youngest = next(reversed(self._running.values()))
                self._preempt(youngest, plan)
                if youngest is sequence:
                    break

    def _continue_prefill(self, plan: StepPlan) -> None:
        """Computes the next chunk of an unfinished prompt."""
        sequence = self._prefilling
        if sequence is not None and not self._prefill(sequence, plan):
            self._preempt(sequence, plan)

    def _admit(self, plan: StepPlan) -> None:
        """Admits waiting requests whose adapter fits the batch, in order of arrival.

        A step that has preempted a request admits none.
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
        """Moves a request from the queue into the batch, or begins the transfer of its KV.

        Returns False if the free blocks are too few.
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
        """Computes as much of the prompt as the budget allows. The end of the prompt yields the first output token.

        Returns False if the free blocks are too few.
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
        """Emits this step's tokens, ends sequences after their last token, and starts decodes after prefills."""
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
            # The next step is the first decode step. It computes the KV of the token that is emitted now.
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
        del self._running[sequence.request.id]
        if sequence is self._prefilling:
            self._prefilling = None
        elif sequence.last_step:
            self._decodes.remove(sequence)

    def _preempt(self, sequence: LiveSequence, plan: StepPlan) -> None:
        """Moves a sequence back to the head of the queue. All its tokens are computed again."""
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
