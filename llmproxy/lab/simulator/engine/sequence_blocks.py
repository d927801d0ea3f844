"""The KV blocks of sequences: allocation, filling, release, and pinning for another engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

from llmproxy.lab.simulator.engine.kv_cache import KvCache
from llmproxy.lab.simulator.engine.kv_store import KvStore
from llmproxy.lab.simulator.engine.sequence import EngineRequest, LiveSequence


class SequenceBlocks:
    """The KV blocks of all sequences, of `block_size` tokens each.

    With a `store`, prompt blocks are also written to it and loaded from it. `kept` has the ended requests whose blocks
    stay until another engine has read them. `wrong` has blocks that were read after another request had overwritten
    them, and blocks computed from these. Requests that share a wrong block get a wrong answer, as in vLLM.
    """

    def __init__(self, blocks: int, block_size: int, store: KvStore | None = None) -> None:
        self.cache = KvCache(blocks)
        self.block_size = block_size
        self.kept: dict[str, LiveSequence] = {}
        self._store_of_all = store
        self._wrong: set[int] = set()

    def cached(self, request: EngineRequest, length: int) -> list[int]:
        """Returns the cached blocks of the first `length` tokens."""
        # The last token of a prompt is always computed, even if it is cached, to get the next token.
        return self.cache.match(islice(request.hashes, (length - 1) // self.block_size))

    def take(self, sequence: LiveSequence) -> bool:
        """Shares the cached blocks, and allocates the rest. Returns False if the free blocks are too few."""
        request, length = sequence.request, sequence.length
        hits = self.cached(request, length)
        missing = math.ceil(length / self.block_size) - len(hits)
        if missing + self.cache.unused(hits) > self.cache.free:
            return False
        self.cache.share(hits)
        sequence.blocks = hits
        sequence.stored = len(hits)
        sequence.computed = self.block_size * len(hits)
        sequence.wrong = not self._wrong.isdisjoint(hits)
        return True

    def load(self, sequence: LiveSequence) -> int:
        """Loads blocks from the store beyond the cached ones. Returns their number of tokens."""
        if self._store_of_all is None:
            return 0
        most = (sequence.length - 1) // self.block_size
        found = self._store_of_all.found(sequence.request.hashes[sequence.stored : most])
        if found:
            sequence.computed += found * self.block_size
            self.extend(sequence, sequence.computed)
            self.fill(sequence, sequence.computed)
        return found * self.block_size

    def extend(self, sequence: LiveSequence, end: int) -> bool:
        """Allocates blocks for the tokens up to `end`. Returns False if the free blocks are too few."""
        blocks = self._allocate(math.ceil(end / self.block_size) - len(sequence.blocks))
        if blocks is None:
            return False
        sequence.blocks += blocks
        return True

    def grow(self, sequence: LiveSequence, now: int) -> bool:
        """Allocates the next block of a decode that has filled its last block. Returns False if none is free."""
        blocks = self._allocate(1)
        if blocks is None:
            return False
        sequence.blocks += blocks
        self.fill(sequence, sequence.mark + now)
        return True

    def fill(self, sequence: LiveSequence, computed: int) -> None:
        """Caches the blocks that `computed` tokens have filled."""
        full = computed // self.block_size
        request, new = sequence.request, slice(sequence.stored, full)
        self.cache.store(sequence.blocks[new], request.hashes[new])
        if sequence.wrong:
            self._wrong.update(sequence.blocks[new])
        elif self._store_of_all is not None:
            self._store_of_all.save(
                request.hashes[sequence.stored : min(full, request.prompt_tokens // self.block_size)]
            )
        sequence.stored = full

    def release(self, sequence: LiveSequence) -> None:
        self.cache.release(sequence.blocks, sequence.request.hashes, sequence.stored)
        sequence.blocks = []
        sequence.stored = 0

    def _allocate(self, count: int) -> Sequence[int] | None:
        blocks = self.cache.allocate(count)
        if self._wrong and blocks:
            self._wrong.difference_update(blocks)
        return blocks
