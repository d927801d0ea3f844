"""The cache-aware policy of SGLang's router, which vllm-router inherited."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from llmproxy.core.backends.view import View
from llmproxy.core.domain import Placed, Request
from llmproxy.lab.baselines.common import Counting, best, prompt_blocks
from llmproxy.lab.baselines.index import BlockIndex
from llmproxy.lab.baselines.policy import Baseline, Surroundings, baselines

TREE_CHARACTERS = 64 << 20
CHARACTERS_PER_TOKEN = 4
EVICT_EVERY_S = 60.0


class CacheAware(Counting):
    """Takes the backend with the fewest requests in flight if loads are unequal. Otherwise takes the backend with the
    longest cached prefix, or without one, the backend with the smallest tree.

    Loads are unequal if the largest number in flight exceeds the smallest by more than `abs_load` and by more than the
    factor `rel_load`. A prefix counts if it is more than the part `match` of the prompt. The real router's tree has
    text; this one has the blocks of the trace, so a prefix counts in whole blocks. As in the router, a request is added
    to the tree when it is routed. The tree is cut to its limit per backend every `EVICT_EVERY_S`, and kept when a
    backend restarts.
    """

    def __init__(self, around: Surroundings, match: float, abs_load: float, rel_load: float) -> None:
        super().__init__()
        self._around = around
        self._match, self._abs_load, self._rel_load = match, abs_load, rel_load
        self._tree = BlockIndex()
        self._tree_tokens: dict[str, float] = {}
        self._evict_at_s = around.clock() + EVICT_EVERY_S

    def choose(self, request: Request, views: Sequence[View]) -> Placed:
        loads = self.in_flight.each(views)
        least, most = min(loads), max(loads)
        if most - least > self._abs_load and most > self._rel_load * least:
            first = views[loads.index(least)].backend
            return Placed(first, -least, (("in_flight", least),), len(views))
        holder, ratio = self._holder(request)
        if ratio <= self._match:
            sizes = [self._tree_tokens.get(view.backend, 0.0) for view in views]
            return best(views, [-size for size in sizes], {"tree_tokens": sizes}, self._around.rng)
        if not any(view.backend == holder for view in views):
            self._forget(holder)
            holder = views[0].backend
        return Placed(holder, ratio, (("match", ratio),), len(views))

    def _holder(self, request: Request) -> tuple[str, float]:
        """Returns the backend with the longest prefix of the prompt, and that prefix as a share of the prompt, 0..1."""
        blocks = prompt_blocks(request, self._around)
        depths = self._tree.matches(blocks, unbroken=True)
        if not depths:
            return "", 0.0
        depth = max(depths.values())
        known = list(blocks)[:depth]
        # Among several backends, the router takes the first of its hash table: arbitrary, but always the same.
        salt = repr(known[-1])
        holder = min((crc32(f"{salt} {name}".encode()), name) for name, found in depths.items() if found == depth)[1]
        return holder, sum(blocks[block] for block in known) / sum(blocks.values())

    def booked(self, lease: int, request: Request, placed: Placed, now: float) -> None:
        super().booked(lease, request, placed, now)
        backend = placed.backend
        added = self._tree.insert(backend, prompt_blocks(request, self._around))
        self._tree_tokens[backend] = self._tree_tokens.get(backend, 0.0) + added
        if now >= self._evict_at_s:
            self._evict_at_s = now + EVICT_EVERY_S
            self._evict()

    def _evict(self) -> None:
        for backend in self._tree_tokens:
            while self._tree_tokens[backend] * CHARACTERS_PER_TOKEN > TREE_CHARACTERS:
                self._tree_tokens[backend] -= self._tree.drop_oldest(backend)

    def _forget(self, backend: str) -> None:
        self._tree.forget(backend)
        del self._tree_tokens[backend]


@baselines.register("cache_aware")
def cache_aware(*, match: float = 0.3, abs_load: float = 64.0, rel_load: float = 1.5) -> Baseline:
    about = (
        "longest known prefix unless loads are unequal (SGLang router 0.3.2, vllm-router; smallest tree below `match`)"
    )
    return Baseline("cache_aware", about, lambda around: CacheAware(around, match, abs_load, rel_load))
