"""A model of the vLLM V1 engine: which tokens each step computes and how long the step takes. Pure, in virtual time.

The rules are those of vLLM V1's scheduler: running requests first, then waiting ones first come first served; chunked
prefill under a token budget; a new request is admitted only when its whole prompt fits in the free KV blocks; when a
running request finds no block, the youngest running one is preempted and computed again later; a request whose adapter
does not fit the batch waits while others pass it. Step times come from `profiles`.

A step costs time in what *changes*: requests admitted, finished or entering a new block. A decoding request is not
touched between two blocks, since everything about it follows from the number of the step.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from llmproxy.simulator.adapter_slots import AdapterSlots
from llmproxy.simulator.kv_cache import KvCache
from llmproxy.simulator.profiles import Noise, Profile


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence: a prompt of `prompt_tokens` (>= 1) that is answered with exactly `output_tokens` (>= 1).

    `hashes` are those of `kv_cache.block_hashes` over the prompt, and beyond it over the answer as far as it is known:
    blocks without a hash are never shared.
    """

    id: str
    prompt_tokens: int
    output_tokens: int
    hashes: Sequence[int] = ()
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did; its tokens exist `duration_s` after its start. Everything in it is named by request id.

    `emitted` got one token each, in the order of admission; `finished` are those of them that got their last one;
    `admitted` left the queue, each with the prompt tokens it found cached.
    """

    duration_s: float
    emitted: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()
    admitted: tuple[tuple[str, int], ...] = ()
    preempted: tuple[str, ...] = ()
    prefill_tokens: int = 0
    decode_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Gauges:
    """What vLLM publishes after a step. `waiting` counts `deferred` ones, which wait for an adapter slot, too."""

    running: int = 0
    waiting: int = 0
    deferred: int = 0
    kv_used: float = 0.0
    running_adapters: tuple[str, ...] = ()


@dataclass(slots=True)
class Counters:
    """Totals since the start; queries, hits, prompt and generation are tokens."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prompt: int = 0
    generation: int = 0
    steps: int = 0


@dataclass(slots=True, eq=False)
class _Sequence:
    """A live request. While it decodes, step `t` computes its token number `mark + t`, counted from 0."""

    request: EngineRequest
    order: int
    emitted: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    mark: int = 0
    last_step: int = 0
    seen: bool = False


@dataclass(slots=True)
class _Plan:
    """What the step `now` has decided so far; `ready` are the prompts that it completes."""

    now: int
    budget: int = 0
    load_s: float = 0.0
    chunks: list[tuple[int, int]] = field(default_factory=list)
    ready: list[_Sequence] = field(default_factory=list)
    admitted: list[tuple[str, int]] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)


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
        noise: Noise | None = None,
        seed: int = 0,
    ) -> None:
        """`step_tokens` is the token budget of a step, `kv_tokens` defaults to the profile's. Without `noise` every
        step takes exactly what the profile says. Raises ValueError for numbers that vLLM would refuse, too.
        """
        if not 1 <= max_num_seqs <= step_tokens:
            raise ValueError(f"max_num_seqs must be from 1 to the step's {step_tokens} tokens, got {max_num_seqs}")
        self.profile = profile
        self.max_num_seqs = max_num_seqs
        self.max_loras = max_loras
        self.block_size = block_size
        self.counters = Counters()
        self._step_tokens = step_tokens
        self._noise = noise
        self._random = random.Random(seed)
        self._cache = KvCache((profile.kv_tokens if kv_tokens is None else kv_tokens) // block_size)
        self._live: dict[str, _Sequence] = {}
        # One line per adapter, so that requests whose adapter fits need not be searched for.
        self._waiting: dict[str | None, OrderedDict[str, _Sequence]] = {}
        self._arrivals = 0
        self._returns = 0
        # In order of admission. At most one, and then the last, is still in prefill: a chunk is cut only where the
        # budget ends, so nobody is admitted behind it.
        self._running: dict[str, _Sequence] = {}
        self._prefilling: _Sequence | None = None
        self._decodes = 0
        self._marks = 0
        self._entering: list[dict[str, _Sequence]] = [{} for _ in range(block_size)]
        self._ending: dict[int, dict[str, _Sequence]] = {}
        self._slots = AdapterSlots(max_loras, max_loras if max_cpu_loras is None else max_cpu_loras, profile)

    # --- what callers ask and tell ------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._live)

    @property
    def kv_blocks(self) -> int:
        """All blocks, the one that is never used included, as vLLM's `num_gpu_blocks`."""
        return self._cache.blocks

    @property
    def kv_room_tokens(self) -> int:
        """The longest sequence that can ever be computed."""
        return (self._cache.blocks - 1) * self.block_size

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
        self._arrivals += 1
        sequence = _Sequence(request, self._arrivals)
        self._live[request.id] = sequence
        self._waiting.setdefault(request.adapter, OrderedDict())[request.id] = sequence

    def abort(self, request_id: str) -> bool:
        """Forget a request, queued or running, at once; False where it is not (or no longer) in the engine."""
        sequence = self._live.pop(request_id, None)
        if sequence is None:
            return False
        if request_id in self._running:
            self._stop(sequence)
        else:
            self._unqueue(sequence)
        return True

    def gauges(self) -> Gauges:
        """The state now. vLLM shows it to the world only after a step, which is for the caller to imitate."""
        deferred = sum(len(queue) for adapter, queue in self._waiting.items() if not self._slots.fits(adapter))
        return Gauges(
            running=len(self._running),
            waiting=len(self._live) - len(self._running),
            deferred=deferred,
            kv_used=self._cache.usage,
            running_adapters=self._slots.in_batch,
        )

    def step(self) -> StepResult:
        """Do one step. Where nobody runs or waits it does nothing and takes no time."""
        if not self._live:
            return StepResult(0.0)
        self.counters.steps += 1
        plan = _Plan(self.counters.steps)
        self._grow_decodes(plan)
        decodes, context_tokens = self._decodes, self._marks + self._decodes * (plan.now + 1)
        plan.budget = self._step_tokens - decodes
        self._continue_prefill(plan)
        self._admit(plan)
        step_s = self.profile.step_s(decodes, context_tokens, plan.chunks, adapters=bool(self._slots.in_batch))
        noise = 1.0 if self._noise is None else self._noise.factor(self._random)
        running = tuple(self._running)
        return StepResult(
            duration_s=plan.load_s + step_s * noise,
            emitted=running if self._prefilling is None else running[:-1],
            finished=self._emit(plan),
            admitted=tuple(plan.admitted),
            preempted=tuple(plan.preempted),
            prefill_tokens=sum(end - first for first, end in plan.chunks),
            decode_tokens=decodes,
        )

    def check(self) -> None:
        """Raise AssertionError unless all books agree with a recount; for tests."""
        self._cache.check([sequence.blocks for sequence in self._live.values()])
        queued = [sequence for queue in self._waiting.values() for sequence in queue.values()]
        assert len(queued) + len(self._running) == len(self._live), "a request is in no list or in two"
        assert all(not sequence.blocks for sequence in queued), "a waiting request holds blocks"
        assert all(self._waiting.values()), "an empty queue was kept"
        decoding = [sequence for sequence in self._running.values() if sequence is not self._prefilling]
        assert self._decodes == len(decoding), "the number of decodes is wrong"
        assert self._marks == sum(sequence.mark for sequence in decoding), "the decode context is wrong"
        assert len(self._running) <= self.max_num_seqs, "more run than max_num_seqs"
        self._slots.check([s.request.adapter for s in self._running.values() if s.request.adapter is not None])
        assert sum(map(len, self._entering)) == sum(map(len, self._ending.values())) == self._decodes
        assert all(self._ending.values()), "an empty ending was kept"
        if self._prefilling is not None:
            assert next(reversed(self._running.values())) is self._prefilling, "somebody runs behind a cut prefill"

    # --- one step -----------------------------------------------------------------------------------------------------

    def _grow_decodes(self, plan: _Plan) -> None:
        """Give a block to each decode that enters one, preempting the youngest while there is none."""
        for sequence in list(self._entering[plan.now % self.block_size].values()):
            if sequence.request.id not in self._running:
                continue
            self._store(sequence, sequence.mark + plan.now)
            while not self._extend(sequence, sequence.mark + plan.now + 1):
                youngest = next(reversed(self._running.values()))
                self._preempt(youngest, plan)
                if youngest is sequence:
                    break

    def _continue_prefill(self, plan: _Plan) -> None:
        """Compute the next chunk of the prompt that the last step cut."""
        sequence = self._prefilling
        if sequence is None:
            return
        if self._extend(sequence, self._chunk_end(sequence, plan)):
            self._prefill(sequence, plan)
        else:
            self._preempt(sequence, plan)

    def _admit(self, plan: _Plan) -> None:
        """Let waiting requests in: first come first served among those whose adapter fits the batch."""
        while plan.budget > 0 and len(self._running) < self.max_num_seqs and self._prefilling is None:
            sequence = self._next_waiting()
            if sequence is None:
                break
            length = self._length(sequence)
            # Nobody starts from a cached prompt alone: its last token must be computed to get the next one.
            hits = self._cache.match(sequence.request.hashes[: (length - 1) // self.block_size])
            missing = math.ceil(length / self.block_size) - len(hits)
            if missing + self._cache.unused(hits) > self._cache.free:
                break
            self._unqueue(sequence)
            self._cache.share(hits)
            sequence.blocks = hits
            sequence.computed = len(hits) * self.block_size
            if not sequence.seen:
                sequence.seen = True
                self.counters.prefix_queries += length
                self.counters.prefix_hits += sequence.computed
                self.counters.prompt += length
            plan.admitted.append((sequence.request.id, sequence.computed))
            plan.load_s += self._slots.enter(sequence.request.adapter)
            self._running[sequence.request.id] = self._prefilling = sequence
            self._extend(sequence, self._chunk_end(sequence, plan))
            self._prefill(sequence, plan)

    def _chunk_end(self, sequence: _Sequence, plan: _Plan) -> int:
        return min(self._length(sequence), sequence.computed + plan.budget)

    def _prefill(self, sequence: _Sequence, plan: _Plan) -> None:
        """Compute as much of the prompt as the budget allows; the end of it is the first token of the answer."""
        first, end = sequence.computed, self._chunk_end(sequence, plan)
        plan.chunks.append((first, end))
        plan.budget -= end - first
        sequence.computed = end
        self._store(sequence, end, first)
        if end == self._length(sequence):
            self._prefilling = None
            plan.ready.append(sequence)

    def _emit(self, plan: _Plan) -> tuple[str, ...]:
        """Hand out this step's tokens, end who got the last one, and let the finished prefills decode from now on."""
        self.counters.generation += self._decodes + len(plan.ready)
        done = list(self._ending.get(plan.now, {}).values())
        for sequence in plan.ready:
            sequence.emitted += 1
            left = sequence.request.output_tokens - sequence.emitted
            if left == 0:
                done.append(sequence)
            # The first decode step is the next one, and it computes the token emitted now.
            sequence.mark = sequence.computed - (plan.now + 1)
            sequence.last_step = plan.now + left
            self._decodes += 1
            self._marks += sequence.mark
            self._entering[-sequence.mark % self.block_size][sequence.request.id] = sequence
            self._ending.setdefault(sequence.last_step, {})[sequence.request.id] = sequence
        for sequence in done:
            self._store(sequence, sequence.request.prompt_tokens + sequence.request.output_tokens - 1)
            self._stop(sequence)
            del self._live[sequence.request.id]
        return tuple(sequence.request.id for sequence in done)

    # --- the life of one sequence -------------------------------------------------------------------------------------

    def _length(self, sequence: _Sequence) -> int:
        """Tokens to prefill: the prompt, and after a preemption what was answered already."""
        return sequence.request.prompt_tokens + sequence.emitted

    def _extend(self, sequence: _Sequence, end: int) -> bool:
        """Blocks for the tokens up to `end`; False where there are too few."""
        blocks = self._cache.allocate(math.ceil(end / self.block_size) - len(sequence.blocks))
        if blocks is None:
            return False
        sequence.blocks += blocks
        return True

    def _store(self, sequence: _Sequence, computed: int, since: int | None = None) -> None:
        """Cache the full blocks up to `computed` tokens: those from `since` on, else the last one."""
        full = min(computed // self.block_size, len(sequence.request.hashes))
        first = computed // self.block_size - 1 if since is None else since // self.block_size
        for index in range(max(first, 0), full):
            self._cache.store(sequence.blocks[index], sequence.request.hashes[index])

    def _stop(self, sequence: _Sequence) -> None:
        """Take a sequence out of the batch and free its blocks."""
        request = sequence.request
        del self._running[request.id]
        if sequence is self._prefilling:
            self._prefilling = None
        else:
            self._decodes -= 1
            self._marks -= sequence.mark
            del self._entering[-sequence.mark % self.block_size][request.id]
            ending = self._ending[sequence.last_step]
            del ending[request.id]
            if not ending:
                del self._ending[sequence.last_step]
        self._slots.leave(request.adapter)
        self._cache.release(sequence.blocks)
        sequence.blocks = []

    def _preempt(self, sequence: _Sequence, plan: _Plan) -> None:
        """Back to the head of the queue, with all its tokens to compute anew."""
        if sequence is not self._prefilling:
            sequence.emitted = sequence.request.output_tokens - (sequence.last_step - plan.now + 1)
        self._stop(sequence)
        sequence.computed = 0
        self._returns -= 1
        sequence.order = self._returns
        queue = self._waiting.setdefault(sequence.request.adapter, OrderedDict())
        queue[sequence.request.id] = sequence
        queue.move_to_end(sequence.request.id, last=False)
        self.counters.preemptions += 1
        plan.preempted.append(sequence.request.id)

    def _unqueue(self, sequence: _Sequence) -> None:
        queue = self._waiting[sequence.request.adapter]
        del queue[sequence.request.id]
        if not queue:
            del self._waiting[sequence.request.adapter]

    def _next_waiting(self) -> _Sequence | None:
        heads = [next(iter(queue.values())) for adapter, queue in self._waiting.items() if self._slots.fits(adapter)]
        return min(heads, key=lambda sequence: sequence.order, default=None)
