"""A model of vLLM V1's paged KV cache: blocks, reference counts, chained hashes and LRU eviction.

The first block is reserved (null block). Only full blocks are cached. A freed block keeps its content until its memory
is needed. A request's blocks are freed tail first, so that the shared head of a prompt stays longest. An allocation
first takes blocks without content, then the blocks that were freed longest ago. If several blocks have the same
content, each request has its own copy, and the oldest copy serves new requests.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat, takewhile


def block_hashes(
    tokens: Sequence[int], block_size: int, adapter: str | None = None, cache_salt: str | None = None
) -> tuple[int, ...]:
    """Returns chained hashes of the full blocks of `tokens`: equal hashes mean equal tokens from the start.

    The chain starts with the adapter and the salt, so requests with different adapters or salts share no block. The
    result does not depend on PYTHONHASHSEED.
    """
    parent = zlib.crc32(f"{adapter or ''}\0{cache_salt or ''}".encode())
    hashes = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = hash((parent, *tokens[start : start + block_size]))
        hashes.append(parent)
    return tuple(hashes)


@dataclass(slots=True)
class Changes:
    """Hashes that became cached or were removed. Only the last change of each hash counts."""

    stored: set[int] = field(default_factory=set)
    removed: set[int] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.stored or self.removed)


class KvCache:
    """A cache of `blocks` blocks, including the null block.

    Each call takes time in proportion to its own blocks, not to the size of the cache. `changes`, unless None, collects
    KV events as vLLM publishes them: only the first copy of a block counts as stored, and only the last copy as
    removed. `match` returns the same result until `version` changes.
    """

    def __init__(self, blocks: int) -> None:
        if blocks < 2:
            raise ValueError(f"a KV cache needs at least 2 blocks, because one stays unused; got {blocks}")
        self.blocks = blocks
        self.changes: Changes | None = None
        self.version = 0
        self._used = 0
        # Counted only for blocks with several holders, because most blocks have one or none.
        self._holders: dict[int, int] = {}
        # The oldest block with each content, and its younger copies in order.
        self._cached: dict[int, int] = {}
        self._copies: dict[int, dict[int, None]] = {}
        # Free blocks, in the order in which they are taken: emptied blocks, the blocks from the first never-used block
        # on, and full blocks (block -> hash of its content; None for content without a hash).
        self._empty: list[int] = []
        self._fresh = 1
        self._freed: OrderedDict[int, int | None] = OrderedDict()

    @property
    def free(self) -> int:
        """The number of blocks that can be allocated, including cached blocks without a user."""
        return self.blocks - 1 - self._used

    @property
    def usage(self) -> float:
        """The share of used blocks, 0..1, as vLLM publishes it."""
        return self._used / (self.blocks - 1)

    def match(self, hashes: Iterable[int]) -> list[int]:
        """Returns the cached blocks of the longest cached prefix of `hashes`, without taking them."""
        cached = self._cached
        return list(map(cached.__getitem__, takewhile(cached.__contains__, hashes)))

    def unused(self, blocks: Iterable[int]) -> int:
        """Returns how many of the cached `blocks` no request uses. Sharing such a block uses a free block."""
        return sum(map(self._freed.__contains__, blocks))

    def share(self, blocks: Iterable[int]) -> None:
        """Counts one more user of these cached blocks, so that they are not evicted."""
        freed, holders = self._freed, self._holders
        free_before = len(freed)
        for block in blocks:
            if block in freed:
                del freed[block]
            else:
                holders[block] = holders.get(block, 1) + 1
        self._used += free_before - len(freed)

    def allocate(self, count: int) -> list[int] | None:
        """Returns `count` blocks without content; None if fewer are free."""
        if count > self.free:
            return None
        self._used += count
        taken: list[int] = []
        if self._empty:
            kept = max(len(self._empty) - count, 0)
            taken = self._empty[kept:]
            del self._empty[kept:]
        if self._fresh < self.blocks:
            first = self._fresh
            self._fresh = min(first + count - len(taken), self.blocks)
            taken += range(first, self._fresh)
        return taken + self._evict(count - len(taken)) if len(taken) < count else taken

    def store(self, blocks: Sequence[int], hashes: Sequence[int]) -> None:
        """Marks blocks as full. Blocks beyond `hashes` have content that no other request can share."""
        self.version += 1
        if self.changes is not None:
            new = [block_hash for block_hash in hashes if block_hash not in self._cached]
            self.changes.stored.update(new)
            self.changes.removed.difference_update(new)
        oldest = list(map(self._cached.setdefault, hashes, blocks))
        if oldest != blocks[: len(oldest)]:
            for block_hash, block in zip(hashes, blocks, strict=False):
                if self._cached[block_hash] != block:
                    self._copies.setdefault(block_hash, {})[block] = None

    def release(self, blocks: Sequence[int], hashes: Sequence[int], full: int) -> None:
        """Removes a user from `blocks`, in token order. The first `full` of them were stored with `hashes`."""
        self._empty += blocks[full:]
        contents = [*hashes[:full], *repeat(None, full - len(hashes))]
        freed, holders = self._freed, self._holders
        free_before = len(freed)
        for block, block_hash in zip(reversed(blocks[:full]), reversed(contents), strict=True):
            if block in holders:
                self._leave(block)
            else:
                freed[block] = block_hash
        self._used -= len(freed) - free_before + len(blocks) - full

    def _evict(self, count: int) -> list[int]:
        """Evicts the full blocks that were freed longest ago."""
        self.version += 1
        freed, cached, copies = self._freed, self._cached, self._copies
        taken = []
        for _ in range(count):
            block, block_hash = freed.popitem(last=False)
            taken.append(block)
            if block_hash is None:
                continue
            if block_hash in copies:
                self._forget_copy(block, block_hash)
            else:
                del cached[block_hash]
                if self.changes is not None:
                    self.changes.stored.discard(block_hash)
                    self.changes.removed.add(block_hash)
        return taken

    def _forget_copy(self, block: int, block_hash: int) -> None:
        """Forgets one of several blocks with the same content."""
        copies = self._copies[block_hash]
        if self._cached[block_hash] == block:
            self._cached[block_hash] = block = next(iter(copies))
        del copies[block]
        if not copies:
            del self._copies[block_hash]

    def _leave(self, block: int) -> None:
        """Removes a user from a block that has several."""
        if self._holders[block] == 2:
            del self._holders[block]
        else:
            self._holders[block] -= 1
