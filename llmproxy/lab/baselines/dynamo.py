"""The KV router of NVIDIA Dynamo: the lowest cost in blocks of prefill and decode work."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

from llmproxy.core.domain import Placed, Request, Usage, Verdict
from llmproxy.core.fleet import View
from llmproxy.lab.baselines.common import AtOnce, Ledger, best, prompt_blocks
from llmproxy.lab.baselines.index import Block, PrefixIndex
from llmproxy.lab.policy import Baseline, Surroundings, baselines

BLOCK_TOKENS = 16
PREDICTED_S = 120.0
TREE_BLOCKS = 1 << 20
PRUNED_TO = 0.8


def _blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


class Active:
    """The blocks of prompts in flight, per backend; one that several requests there share is counted once."""

    def __init__(self, block_tokens: int) -> None:
        self._per_block = _blocks_of(block_tokens)
        self._index = PrefixIndex()
        self._users: dict[str, dict[Block, int]] = {}
        self._leases: dict[int, tuple[str, dict[Block, int]]] = {}
        self._sums: dict[str, int] = {}

    def with_prompt(self, blocks: dict[Block, int], views: Sequence[View]) -> list[int]:
        """How many engine blocks would be in use at each of `views` if the prompt of `blocks` went there."""
        own = sum(map(_blocks_of, blocks.values()))
        shared = self._index.matches(blocks, unbroken=True)
        found = []
        for view in views:
            depth = shared.get(view.backend, 0)
            new = 0 if depth == len(blocks) else own - depth * self._per_block
            found.append(self._sums.get(view.backend, 0) + new)
        return found

    def add(self, lease: int, backend: str, blocks: dict[Block, int]) -> None:
        self._leases[lease] = backend, blocks
        self._index.insert(backend, blocks)
        users = self._users.setdefault(backend, {})
        for block, tokens in blocks.items():
            users[block] = users.get(block, 0) + 1
            if users[block] == 1:
                self._sums[backend] = self._sums.get(backend, 0) + _blocks_of(tokens)

    def remove(self, lease: int) -> None:
        backend, blocks = self._leases.pop(lease)
        users = self._users[backend]
        for block, tokens in blocks.items():
            users[block] -= 1
            if not users[block]:
                del users[block]
                self._index.remove(backend, block)
                self._sums[backend] -= _blocks_of(tokens)

    def of(self, backend: str) -> int:
        return self._sums.get(backend, 0)


class KvCost(AtOnce):
    """prefill_scale * max(prefill blocks - overlap * cached blocks, 0) + decode blocks; the lowest cost wins.

    Prefill blocks are those of the prompts that have no byte yet, less what was believed cached, and of this prompt.
    Decode blocks are those of the prompts in flight and of this one, without their answers, in engine blocks of 16
    tokens. Cached is what was routed there within 120 s; it is known by the trace's blocks. Equals are drawn at random.
    """

    def __init__(self, around: Surroundings, overlap: float, prefill_scale: float) -> None:
        self._around = around
        self._overlap, self._prefill_scale = overlap, prefill_scale
        self._predicted = PrefixIndex()
        self._predicted_blocks = 0
        self._blocks_max = max(1, TREE_BLOCKS * BLOCK_TOKENS // around.block_tokens)
        self.prefill_tokens = Ledger()
        self.active = Active(around.block_tokens)

    def choose(self, request: Request, views: Sequence[View]) -> Placed:
        self._expire(self._around.clock())
        blocks = prompt_blocks(request, self._around)
        tokens = sum(blocks.values())
        cached = self._cached_blocks(blocks, tokens)
        prefill = [
            max(0.0, (active + tokens) / BLOCK_TOKENS - self._overlap * cached.get(view.backend, 0))
            for view, active in zip(views, self.prefill_tokens.each(views), strict=True)
        ]
        decode = self.active.with_prompt(blocks, views)
        scores = [-(self._prefill_scale * p + d) for p, d in zip(prefill, decode, strict=True)]
        return best(views, scores, {"prefill": prefill, "decode": decode}, self._around.rng)

    def _cached_blocks(self, blocks: dict[Block, int], tokens: int) -> dict[str, int]:
        depths = self._predicted.matches(blocks, unbroken=True)
        return {name: min(tokens, depth * self._around.block_tokens) // BLOCK_TOKENS for name, depth in depths.items()}

    def booked(self, lease: int, request: Request, backend: str) -> None:
        blocks = prompt_blocks(request, self._around)
        tokens = sum(blocks.values())
        cached = self._cached_blocks(blocks, tokens).get(backend, 0)
        self.prefill_tokens.give(lease, backend, tokens - cached * BLOCK_TOKENS)
        self.active.add(lease, backend, blocks)
        before = self._predicted.size(backend)
        self._predicted.insert(backend, dict.fromkeys(blocks, self._around.clock() + PREDICTED_S))
        self._predicted_blocks += self._predicted.size(backend) - before
        if self._predicted_blocks > self._blocks_max:
            self._prune()

    def _expire(self, now: float) -> None:
        for backend in self._predicted.backends():
            while (until_s := self._predicted.oldest(backend)) is not None and until_s <= now:
                self._predicted.drop_oldest(backend)
                self._predicted_blocks -= 1

    def _prune(self) -> None:
        """Forget those that would expire first, whichever backend they are on, until a fifth of the room is free."""
        index = self._predicted
        oldest = [(until_s, name) for name in index.backends() if (until_s := index.oldest(name)) is not None]
        heapify(oldest)
        while self._predicted_blocks > PRUNED_TO * self._blocks_max:
            backend = oldest[0][1]
            index.drop_oldest(backend)
            self._predicted_blocks -= 1
            until_s = index.oldest(backend)
            if until_s is None:
                heappop(oldest)
            else:
                heapreplace(oldest, (until_s, backend))

    def started(self, lease: int) -> None:
        self.prefill_tokens.take_back(lease)

    def finished(self, lease: int, verdict: Verdict, usage: Usage | None) -> None:
        del verdict, usage
        self.prefill_tokens.take_back(lease)
        self.active.remove(lease)

    def lost(self, backend: str) -> None:
        self._predicted_blocks -= self._predicted.size(backend)
        self._predicted.forget(backend)


@baselines.register("dynamo_cost")
def dynamo_cost(*, overlap: float = 1.0, prefill_scale: float = 1.0) -> Baseline:
    about = "NVIDIA Dynamo KV router, predicting caches for 120 s: its mode without KV events (its default has them)"
    return Baseline("dynamo_cost", about, lambda around: KvCost(around, overlap, prefill_scale))
