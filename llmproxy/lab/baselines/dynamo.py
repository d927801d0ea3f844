"""The KV router of NVIDIA Dynamo: takes the backend with the lowest cost, in blocks of prefill and decode work."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

from llmproxy.core.backends.view import View
from llmproxy.core.domain import Placed, Request, Usage, Verdict
from llmproxy.lab.baselines.common import ImmediatePlacement, Ledger, best, prompt_blocks
from llmproxy.lab.baselines.index import Block, BlockIndex
from llmproxy.lab.baselines.policy import Baseline, Surroundings, baselines

BLOCK_TOKENS = 16
PREDICTED_S = 120.0
TREE_BLOCKS = 1 << 20
PRUNED_TO = 0.8


def _blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


class Active:
    """The blocks of prompts in flight on each backend. A block that several requests share counts once."""

    def __init__(self, block_tokens: int) -> None:
        self._per_block = _blocks_of(block_tokens)
        self._index = BlockIndex()
        self._users: dict[str, dict[Block, int]] = {}
        self._leases: dict[int, tuple[str, dict[Block, int]]] = {}
        self._sums: dict[str, int] = {}

    def with_prompt(self, blocks: dict[Block, int], views: Sequence[View]) -> list[int]:
        """Returns, for each of `views`, the number of engine blocks in use if this prompt were added."""
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

    def amount(self, backend: str) -> int:
        return self._sums.get(backend, 0)


class KvEventCaches:
    """The caches that the engines' KV events report, 10 ms late. Lost events make this state wrong."""

    def __init__(self, around: Surroundings) -> None:
        self._cached_tokens = around.kv_events()

    def tokens(self, request: Request, blocks: dict[Block, int], backends: Sequence[str]) -> list[int]:
        """Returns the cached tokens of the prompt on each of `backends`."""
        known = self._cached_tokens(request.id)
        return [known.get(backend, 0) for backend in backends]

    def routed(self, backend: str, blocks: dict[Block, int]) -> None:
        pass

    def lost(self, backend: str) -> None:
        pass


class PredictedCaches:
    """Caches predicted without KV events: a backend has the blocks routed to it in the last 120 s."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._index = BlockIndex()
        self._blocks = 0
        self._blocks_max = max(1, TREE_BLOCKS * BLOCK_TOKENS // around.block_tokens)

    def tokens(self, request: Request, blocks: dict[Block, int], backends: Sequence[str]) -> list[int]:
        self._expire(self._around.clock())
        depths, prompt_tokens = self._index.matches(blocks, unbroken=True), sum(blocks.values())
        return [min(prompt_tokens, depths.get(name, 0) * self._around.block_tokens) for name in backends]

    def routed(self, backend: str, blocks: dict[Block, int]) -> None:
        before = self._index.size(backend)
        self._index.insert(backend, dict.fromkeys(blocks, self._around.clock() + PREDICTED_S))
        self._blocks += self._index.size(backend) - before
        if self._blocks > self._blocks_max:
            self._prune()

    def lost(self, backend: str) -> None:
        self._blocks -= self._index.size(backend)
        self._index.forget(backend)

    def _expire(self, now: float) -> None:
        for backend in self._index.backends():
            while (until_s := self._index.oldest(backend)) is not None and until_s <= now:
                self._index.drop_oldest(backend)
                self._blocks -= 1

    def _prune(self) -> None:
        """Drops blocks, the next to expire first, until a fifth of the index is free."""
        index = self._index
        oldest = [(until_s, name) for name in index.backends() if (until_s := index.oldest(name)) is not None]
        heapify(oldest)
        while self._blocks > PRUNED_TO * self._blocks_max:
            backend = oldest[0][1]
            index.drop_oldest(backend)
            self._blocks -= 1
            until_s = index.oldest(backend)
            if until_s is None:
                heappop(oldest)
            else:
                heapreplace(oldest, (until_s, backend))


class KvCost(ImmediatePlacement):
    """Takes the backend with the lowest cost.

    The cost is prefill_scale * max(prefill blocks - overlap * cached blocks, 0) + decode blocks, in blocks of 16
    tokens. Prefill blocks are this prompt and the uncached parts of prompts without a first byte. Decode blocks are
    this prompt and all prompts in flight, without answers. Ties are drawn at random.
    """

    def __init__(
        self, around: Surroundings, cached: KvEventCaches | PredictedCaches, overlap: float, prefill_scale: float
    ) -> None:
        self._around = around
        self._cached = cached
        self._overlap, self._prefill_scale = overlap, prefill_scale
        self.prefill_tokens = Ledger()
        self.active = Active(around.block_tokens)

    def choose(self, request: Request, views: Sequence[View]) -> Placed:
        blocks = prompt_blocks(request, self._around)
        tokens = sum(blocks.values())
        cached = self._cached.tokens(request, blocks, [view.backend for view in views])
        prefill = [
            max(0.0, (active + tokens) / BLOCK_TOKENS - self._overlap * (held // BLOCK_TOKENS))
            for active, held in zip(self.prefill_tokens.each(views), cached, strict=True)
        ]
        decode = self.active.with_prompt(blocks, views)
        scores = [-(self._prefill_scale * p + d) for p, d in zip(prefill, decode, strict=True)]
        return best(views, scores, {"prefill": prefill, "decode": decode}, self._around.rng)

    def booked(self, lease: int, request: Request, placed: Placed, now: float) -> None:
        backend, blocks = placed.backend, prompt_blocks(request, self._around)
        cached_tokens = self._cached.tokens(request, blocks, [backend])[0] // BLOCK_TOKENS * BLOCK_TOKENS
        self.prefill_tokens.give(lease, backend, sum(blocks.values()) - cached_tokens)
        self.active.add(lease, backend, blocks)
        self._cached.routed(backend, blocks)

    def started(self, lease: int, now: float) -> None:
        self.prefill_tokens.take_back(lease)

    def finished(self, lease: int, verdict: Verdict, usage: Usage | None, now: float) -> None:
        self.prefill_tokens.take_back(lease)
        self.active.remove(lease)

    def lost(self, backend: str) -> None:
        self._cached.lost(backend)


@baselines.register("dynamo_cost")
def dynamo_cost(*, overlap: float = 1.0, prefill_scale: float = 1.0, events: float = 1.0) -> Baseline:
    """Returns Dynamo's KV router. `events=0` is its mode for engines that publish no KV events."""
    how = "KV events, 10 ms late" if events else "caches predicted for 120 s, without KV events"
    return Baseline(
        "dynamo_cost",
        f"NVIDIA Dynamo KV router: least prefill and decode blocks; {how}",
        lambda around: KvCost(
            around, KvEventCaches(around) if events else PredictedCaches(around), overlap, prefill_scale
        ),
    )
