"""The requests of an engine: a sequence, the queue of waiting sequences, and the set of decoding sequences."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence, ValuesView
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A sequence with a prompt of `prompt_tokens` (>= 1) and exactly `output_tokens` (>= 1) of output.

    `hashes` are `kv_cache.block_hashes` of the prompt, and of the known output; blocks without a hash are never shared.
    If it `pins`, the blocks stay after the end until `Engine.release`. If it is `remote`, the KV blocks of the prompt
    are fetched from another engine, and `Engine.fetched` ends the transfer.
    """

    id: str
    prompt_tokens: int
    output_tokens: int
    hashes: Sequence[int] = ()
    adapter: str | None = None
    pins: bool = False
    remote: bool = False


@dataclass(slots=True, eq=False)
class LiveSequence:
    """A request in the engine. While it decodes, step `t` computes its token number `mark + t`, counted from 0.

    `order` is the position in the queue, smallest first. `computed` counts the computed tokens of the prefill,
    `emitted` the output tokens before the prefill. The first `stored` of its `blocks` are full and cached. With
    `fetch`, its KV blocks must still be fetched from another engine. With `wrong`, it got KV blocks of another prompt.
    """

    request: EngineRequest
    order: int = 0
    emitted: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    stored: int = 0
    mark: int = 0
    last_step: int = 0
    seen: bool = False
    fetch: bool = False
    wrong: bool = False

    @property
    def length(self) -> int:
        """The tokens to prefill: the prompt, and after a preemption also the output so far."""
        return self.request.prompt_tokens + self.emitted


@dataclass(slots=True)
class StepPlan:
    """The plan of step `now`. `ready`: prompts that it completes. `fetches`: missing tokens of remote requests."""

    now: int
    budget: int = 0
    load_s: float = 0.0
    chunks: list[tuple[int, int]] = field(default_factory=list)
    ready: list[LiveSequence] = field(default_factory=list)
    admitted: list[tuple[str, int]] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    fetches: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


class Waiting:
    """The waiting requests, in order of arrival. A queue per adapter finds requests with a fitting adapter at once.

    `to_fetch` counts requests that still need KV from another engine. `fetched` requests have it and go first, because
    they already have blocks.
    """

    def __init__(self) -> None:
        self._lines: dict[str | None, OrderedDict[str, LiveSequence]] = {}
        self._arrivals = 0
        self._returns = 0
        self._passed_over: set[str] = set()
        self.to_fetch = 0
        self.fetched: dict[str, LiveSequence] = {}

    def add(self, sequence: LiveSequence) -> None:
        self._arrivals += 1
        sequence.order = self._arrivals
        self._lines.setdefault(sequence.request.adapter, OrderedDict())[sequence.request.id] = sequence
        self.to_fetch += sequence.fetch

    def add_first(self, sequence: LiveSequence) -> None:
        self._returns -= 1
        sequence.order = self._returns
        line = self._lines.setdefault(sequence.request.adapter, OrderedDict())
        line[sequence.request.id] = sequence
        line.move_to_end(sequence.request.id, last=False)

    def remove(self, sequence: LiveSequence) -> None:
        self._passed_over.discard(sequence.request.id)
        if self.fetched.pop(sequence.request.id, None) is not None:
            return
        self.to_fetch -= sequence.fetch
        line = self._lines[sequence.request.adapter]
        del line[sequence.request.id]
        if not line:
            del self._lines[sequence.request.adapter]

    def first(self, fits: Callable[[str | None], bool]) -> LiveSequence | None:
        """Returns the next request whose adapter `fits`. Requests before it count as passed over."""
        for sequence in self.fetched.values():
            if fits(sequence.request.adapter):
                return sequence
            self._passed_over.add(sequence.request.id)
        heads, others = [], []
        for adapter, line in self._lines.items():
            if fits(adapter):
                heads.append(next(iter(line.values())))
            else:
                others.append(line)
        chosen = min(heads, key=lambda sequence: sequence.order, default=None)
        for line in others:
            for sequence in line.values():
                if chosen is not None and sequence.order > chosen.order:
                    break
                self._passed_over.add(sequence.request.id)
        return chosen

    @property
    def deferred(self) -> int:
        """The number of waiting requests that were passed over because their adapter did not fit."""
        return len(self._passed_over)


class Decodes:
    """The decoding sequences. Their state is updated at new blocks, and otherwise follows from the step number."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._count = 0
        self._marks = 0
        self._entering: list[dict[str, LiveSequence]] = [{} for _ in range(block_size)]
        self._ending: dict[int, dict[str, LiveSequence]] = {}

    def __len__(self) -> int:
        return self._count

    def add(self, sequence: LiveSequence) -> None:
        self._count += 1
        self._marks += sequence.mark
        self._entering[-sequence.mark % self._block_size][sequence.request.id] = sequence
        self._ending.setdefault(sequence.last_step, {})[sequence.request.id] = sequence

    def remove(self, sequence: LiveSequence) -> None:
        self._count -= 1
        self._marks -= sequence.mark
        del self._entering[-sequence.mark % self._block_size][sequence.request.id]
        ending = self._ending[sequence.last_step]
        del ending[sequence.request.id]
        if not ending:
            del self._ending[sequence.last_step]

    def context_tokens(self, step: int) -> int:
        """Returns the total context tokens of all sequences in a step."""
        return self._marks + self._count * (step + 1)

    def entering(self, step: int) -> ValuesView[LiveSequence]:
        """Returns the sequences that need a new block in a step."""
        return self._entering[step % self._block_size].values()

    def ending(self, step: int) -> list[LiveSequence]:
        """Returns the sequences that get their last token in a step."""
        return list(self._ending.get(step, {}).values())

    def steady_steps(self, step: int, free_blocks: int) -> int:
        """Returns the number of steps after `step` until a sequence ends or `free_blocks` are used up.

        The step in which a sequence ends is included. There must be a sequence.
        """
        to_end = min(self._ending) - step
        cycles, left = divmod(free_blocks, self._count)
        steps = cycles * self._block_size
        while steps < to_end:
            left -= len(self._entering[(step + steps + 1) % self._block_size])
            if left < 0:
                return steps
            steps += 1
        return to_end
