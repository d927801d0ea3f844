"""The paged KV cache of vLLM V1 as a model: blocks, reference counts, chained hashes and LRU eviction. Pure.

What is modelled follows vLLM V1's block manager: one null block is set aside, only full blocks are cached, a freed
block keeps its content until somebody needs the room, the block freed longest ago goes first, and a request's blocks
are freed tail first, so that the shared head of a prompt lives longest.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence


def block_hashes(
    tokens: Sequence[int], block_size: int, adapter: str | None = None, cache_salt: str | None = None
) -> tuple[int, ...]:
    """Chained hashes of the full blocks of `tokens`: equal hashes mean equal tokens from the first one on.

    The adapter and the salt enter the chain at its start, so nothing is shared across them. The result does not
    depend on PYTHONHASHSEED.
    """
    parent = zlib.crc32(f"{adapter or ''}\0{cache_salt or ''}".encode())
    hashes = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = hash((parent, *tokens[start : start + block_size]))
        hashes.append(parent)
    return tuple(hashes)


class KvCache:
    """Blocks of `block_size` tokens, `blocks` in all, of which one is never used, as in vLLM.

    Every call costs time in the blocks it names, never in the size of the cache.
    """

    def __init__(self, blocks: int) -> None:
        if blocks < 2:
            raise ValueError(f"a KV cache needs at least 2 blocks, one of which stays unused; got {blocks}")
        self.blocks = blocks
        self._references: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._hash_of: dict[int, int] = {}
        self._freed: OrderedDict[int, None] = OrderedDict()
        self._fresh = 1

    @property
    def free(self) -> int:
        """Blocks that an allocation may take; cached ones that nobody uses count as free."""
        return self.blocks - 1 - len(self._references)

    @property
    def usage(self) -> float:
        """Used share, 0..1, as vLLM publishes it."""
        return len(self._references) / (self.blocks - 1)

    def match(self, hashes: Iterable[int]) -> list[int]:
        """The cached blocks of the longest known prefix of `hashes`; nothing is taken yet."""
        found = []
        for block_hash in hashes:
            block = self._cached.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def unused(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are free, so that taking them makes the free ones fewer."""
        return sum(1 for block in blocks if block not in self._references)

    def share(self, blocks: Iterable[int]) -> None:
        """Take cached blocks for one more request."""
        for block in blocks:
            self._freed.pop(block, None)
            self._references[block] = self._references.get(block, 0) + 1

    def allocate(self, count: int) -> list[int] | None:
        """`count` empty blocks, or None where fewer are free. Evicts what was freed longest ago."""
        if count > self.free:
            return None
        taken = []
        for _ in range(count):
            if self._fresh < self.blocks:
                block = self._fresh
                self._fresh += 1
            else:
                block, _ = self._freed.popitem(last=False)
                evicted = self._hash_of.pop(block, None)
                if evicted is not None:
                    del self._cached[evicted]
            self._references[block] = 1
            taken.append(block)
        return taken

    def store(self, block: int, block_hash: int) -> None:
        """A block became full. Where the same content is cached already, the older copy stays the cached one."""
        if block not in self._hash_of and block_hash not in self._cached:
            self._hash_of[block] = block_hash
            self._cached[block_hash] = block

    def release(self, blocks: Sequence[int]) -> None:
        """A request lets go of its blocks, given in the order of its tokens."""
        for block in reversed(blocks):
            left = self._references[block] - 1
            if left:
                self._references[block] = left
            else:
                del self._references[block]
                self._freed[block] = None

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the books agree with the blocks that requests hold."""
        counted: dict[int, int] = {}
        for blocks in held:
            for block in blocks:
                counted[block] = counted.get(block, 0) + 1
        assert counted == self._references, "reference counts differ from what requests hold"
        assert not set(self._freed) & set(self._references), "a block is free and in use"
        assert len(self._freed) + len(self._references) == self._fresh - 1, "a block was lost"
        assert {h: b for b, h in self._hash_of.items()} == self._cached, "hashes and cached blocks disagree"
        assert all(0 < block < self.blocks for block in counted), "a block outside the cache is in use"
