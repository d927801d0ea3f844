"""The paged KV cache of vLLM V1 as a model: blocks, reference counts, chained hashes and LRU eviction. Pure.

What is modelled follows vLLM V1's block pool: one null block is set aside, only full blocks are cached, a freed block
keeps its content until its room is needed, and a request's blocks are freed tail first, so that the shared head of
a prompt lives longest. Room is taken first from blocks without content, then from the block freed longest ago. A
request keeps its block when another one has the same content: the oldest copy is handed out, the others are spare.
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


@dataclass(slots=True)
class Changes:
    """The hashes that became cached and those that went, each by what happened to it last."""

    stored: set[int] = field(default_factory=set)
    removed: set[int] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.stored or self.removed)


class KvCache:
    """`blocks` blocks in all, of which one is never used, as in vLLM.

    Every call costs time in the blocks it names, never in the size of the cache. `changes`, unless None, gathers what
    vLLM publishes as KV events: of several copies of a block only the first stored and the last removed.
    While `version` stays the same, so does every answer of `match`.
    """

    def __init__(self, blocks: int) -> None:
        if blocks < 2:
            raise ValueError(f"a KV cache needs at least 2 blocks, one of which stays unused; got {blocks}")
        self.blocks = blocks
        self.changes: Changes | None = None
        self.version = 0
        self._used = 0
        # Only what more than one request holds is counted, since most blocks have one holder or none.
        self._holders: dict[int, int] = {}
        # The oldest block with some content, and, where there are any, the younger ones in order.
        self._cached: dict[int, int] = {}
        self._copies: dict[int, dict[int, None]] = {}
        # Three kinds of free blocks, in the order in which they are taken: emptied, never used, and full ones with the
        # hash of their content, None where it has none.
        self._empty: list[int] = []
        self._fresh = 1
        self._freed: OrderedDict[int, int | None] = OrderedDict()

    @property
    def free(self) -> int:
        """Blocks that an allocation may take; cached ones that no request uses count as free."""
        return self.blocks - 1 - self._used

    @property
    def usage(self) -> float:
        """Used share, 0..1, as vLLM publishes it."""
        return self._used / (self.blocks - 1)

    def match(self, hashes: Iterable[int]) -> list[int]:
        """The cached blocks of the longest known prefix of `hashes`; nothing is taken yet."""
        cached = self._cached
        return list(map(cached.__getitem__, takewhile(cached.__contains__, hashes)))

    def unused(self, blocks: Iterable[int]) -> int:
        """How many of the cached `blocks` are free, so that taking them makes the free ones fewer."""
        return sum(map(self._freed.__contains__, blocks))

    def share(self, blocks: Iterable[int]) -> None:
        """Take cached blocks for one more request."""
        freed, holders = self._freed, self._holders
        free_before = len(freed)
        for block in blocks:
            if block in freed:
                del freed[block]
            else:
                holders[block] = holders.get(block, 1) + 1
        self._used += free_before - len(freed)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks without content, or None where fewer are free."""
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
        """Blocks became full; those beyond `hashes` with content that no other request can have."""
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
        """A request lets go of its blocks, in the order of its tokens; the first `full` were stored with `hashes`."""
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
        """Take the full blocks that were freed longest ago."""
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
        """One of the two or more blocks with the same content goes."""
        copies = self._copies[block_hash]
        if self._cached[block_hash] == block:
            self._cached[block_hash] = block = next(iter(copies))
        del copies[block]
        if not copies:
            del self._copies[block_hash]

    def _leave(self, block: int) -> None:
        """One of a block's two or more holders leaves."""
        if self._holders[block] == 2:
            del self._holders[block]
        else:
            self._holders[block] -= 1
