"""An approximate prefix index: the prompt blocks that each backend has probably cached.

A prompt is a chain of block hashes. Each hash covers its block and all earlier blocks, so equal hashes mean equal
prompts up to that block. For each backend, the index has about as many recently used blocks as fit into the KV cache.
So a match predicts the cached part of a prompt.

Blocks are stored in *generations*. A used block moves to the youngest generation, and a full generation is followed by
a new one. To free space, the oldest generation is dropped as a whole. So the index approximates LRU (Mattson et al.,
"Evaluation techniques for storage hierarchies", 1970): it never exceeds the capacity, and always has the most recently
used blocks that fill 7/8 of the capacity.

The blocks of a chain move together, and tails are dropped before their heads, as in vLLM's free list. So the indexed
part of a chain is always a prefix of the chain, lies in generations of growing age, and is found by bisection.

A block takes 63 bytes per backend in a full generation, which exactly fills a CPython dict, and at most 90 on average.
`benchmarks/parts/placement.py` measures the memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

CAPACITY_BLOCKS = 4_000  # Until the capacity is known: the KV cache of an 8B model on 80 GB, in blocks of 512 bytes.
CAPACITY_BLOCKS_MAX = 1 << 18  # 134 MB of text. Bounds the memory (24 MB) and the longest call (`forget`, 10 ms).

_GENERATIONS_MIN = 8
# An error by this factor means that entries were evicted; smaller errors have other reasons, such as a template.
_FAR_ABOVE = 2.0
# At full capacity, shrinking and recovering balance if one prediction in 33 fails.
_SHRINK = 1 / 16
_RECOVER = 1 / 512
_SHARE_MIN = 1 / 16

_Generation = dict[int, None]


class PrefixIndex:
    """The blocks that each backend of one pool has probably cached.

    The time of a call grows with its arguments and the number of backends, not with the size of the index. The
    exceptions are `forget`, and the drop of a generation: an eighth of a backend's blocks, after as many new blocks.
    Hashes may be any integers. `record` and `resize` add a new backend.
    """

    def __init__(self, capacity_blocks: int = CAPACITY_BLOCKS) -> None:
        """`capacity_blocks` is the capacity of a backend before `resize`."""
        self._capacity_blocks = capacity_blocks
        self._recent: dict[str, _RecentBlocks] = {}

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """Maps backends to the number of the prompt's first blocks that they have cached, if any."""
        found = {}
        if hashes:
            for backend, recent in self._recent.items():
                blocks = recent.matched(hashes)
                if blocks:
                    found[backend] = blocks
        return found

    def record(self, backend: str, hashes: Sequence[int]) -> None:
        """Records that `backend` has computed a chain of blocks. Of a long chain, only the head is stored."""
        (self._recent.get(backend) or self._recent_blocks(backend)).touch(hashes)

    def forget(self, backend: str) -> None:
        """Drops the blocks, the size and the calibration of a backend that restarted or left."""
        self._recent.pop(backend, None)

    def resize(self, backend: str, blocks: int) -> None:
        """Sets the number of prompt blocks that fit into the KV cache of `backend`."""
        self._recent_blocks(backend).resize(blocks)

    def calibrate(self, backend: str, predicted: float, real: float) -> None:
        """Learns from the predicted and the real cached part of one prompt, both in the same unit.

        A prediction that is far too high reduces the limit of the index by up to 1/16, so that entries are dropped
        sooner. Any other prediction raises it by 1/512 of the capacity.
        """
        recent = self._recent.get(backend)
        if recent is not None and predicted > 0:
            recent.calibrate(predicted, real)

    def size(self, backend: str) -> int:
        recent = self._recent.get(backend)
        return 0 if recent is None else recent.size

    def limit(self, backend: str) -> int:
        """Returns the maximum number of indexed blocks of `backend`: its capacity, reduced by calibration."""
        recent = self._recent.get(backend)
        return self._capacity_blocks if recent is None else recent.limit

    def room(self, backend: str) -> int:
        """Returns how many more blocks of `backend` fit below 7/8 of its limit, to which a full index is cut."""
        # `limit` and `size` are inlined: this runs for each backend and each request.
        recent = self._recent.get(backend)
        size, limit = (0, self._capacity_blocks) if recent is None else (recent.size, recent.limit)
        return max(0, limit - limit // _GENERATIONS_MIN - size)

    def check(self) -> None:
        """Raises AssertionError unless the counts agree with the indexed blocks."""
        for recent in self._recent.values():
            recent.check()

    def _recent_blocks(self, backend: str) -> _RecentBlocks:
        recent = self._recent.get(backend)
        if recent is None:
            recent = self._recent[backend] = _RecentBlocks(self._capacity_blocks)
        return recent


class _RecentBlocks:
    """The recent blocks of one backend, in generations, the youngest last."""

    def __init__(self, capacity_blocks: int) -> None:
        self.size = 0
        self._share = 1.0
        self._generations: list[_Generation] = [{}]
        self.resize(capacity_blocks)

    def matched(self, hashes: Sequence[int]) -> int:
        at, end = 0, len(hashes)
        for generation in reversed(self._generations):
            if hashes[at] in generation:
                at = _run_end(generation, hashes, at, end)
                if at == end:
                    break
        return at

    def touch(self, hashes: Sequence[int]) -> None:
        """Moves a chain to the youngest generation, tail first, so that no head is older than its tail."""
        end = min(len(hashes), self.limit)
        while end:
            youngest = self._generations[-1]
            room = self._generation_blocks - len(youngest)
            if room <= 0:
                self._rotate()
                continue
            begin = max(0, end - room)
            here = _run_end(youngest, hashes, begin, end) if hashes[begin] in youngest else begin
            if here < end:
                self._take(self._generations[-2::-1], hashes, here, end)
                before = len(youngest)
                youngest.update(dict.fromkeys(hashes[here:end]))
                self.size += len(youngest) - before
            end = begin
        if self.size > self.limit:
            self._make_room()

    def resize(self, blocks: int) -> None:
        self.capacity_blocks = min(max(1, blocks), CAPACITY_BLOCKS_MAX)
        self._limit()

    def calibrate(self, predicted: float, real: float) -> None:
        if real * _FAR_ABOVE < predicted:
            self._share = max(_SHARE_MIN, self._share * (1 - _SHRINK * (1 - real / predicted)))
        else:
            self._share = min(1.0, self._share + _RECOVER)
        self._limit()

    def check(self) -> None:
        assert self.size == sum(map(len, self._generations)), "the indexed blocks are miscounted"
        assert self.size <= self.limit, "the index is larger than its limit"
        assert self._generations, "there is no generation to put a block into"

    def _limit(self) -> None:
        self.limit = max(1, int(self.capacity_blocks * self._share))
        self._generation_blocks = _generation_blocks(self.limit)
        self._make_room()

    def _make_room(self) -> None:
        while self.size > self.limit:
            self.size -= len(self._generations.pop(0))
        if not self._generations:
            self._generations.append({})

    def _rotate(self) -> None:
        """Begins a new generation. Small neighbouring generations are merged, so that there are never many."""
        joined = self._generations[:1]
        for generation in self._generations[1:]:
            if len(joined[-1]) + len(generation) <= self._generation_blocks:
                joined[-1] = {**joined[-1], **generation}
            else:
                joined.append(generation)
        joined.append({})
        self._generations = joined

    def _take(self, generations: Iterable[_Generation], hashes: Sequence[int], at: int, end: int) -> None:
        """Removes `hashes[at:end]` from `generations`, the youngest first."""
        for generation in generations:
            if at == end:
                break
            if hashes[at] in generation:
                before, begin = len(generation), at
                at = _run_end(generation, hashes, at, end)
                for block in hashes[begin:at]:
                    generation.pop(block, None)
                self.size -= before - len(generation)


class InUse:
    """The blocks of the prompts in flight on one backend. Blocks shared by several prompts are stored once."""

    def __init__(self) -> None:
        self._users: dict[int, int] = {}

    def matched(self, hashes: Sequence[int]) -> int:
        """Returns the length of the longest prefix, in blocks, that a prompt shares with prompts in flight."""
        users = self._users
        if not hashes or hashes[0] not in users:
            return 0
        return _run_end(users, hashes, 0, len(hashes))

    def add(self, hashes: Sequence[int]) -> None:
        users = self._users
        for block in hashes:
            users[block] = users.get(block, 0) + 1

    def remove(self, hashes: Sequence[int]) -> None:
        users = self._users
        for block in hashes:
            left = users[block] - 1
            if left:
                users[block] = left
            else:
                del users[block]


def _run_end(generation: Mapping[int, object], hashes: Sequence[int], at: int, end: int) -> int:
    """Returns the index after the last of `hashes[at:end]` that `generation` has.

    `hashes[at]` must be in `generation`, and no hash may be in it after a missing one.
    """
    while end - at > 1:
        middle = (at + end) >> 1
        if hashes[middle] in generation:
            at = middle
        else:
            end = middle
    return end


def _generation_blocks(limit: int) -> int:
    """Returns the largest number, up to an eighth of `limit`, of blocks that exactly fill a dict of 2**n slots."""
    most = limit // _GENERATIONS_MIN
    slots = 8
    while 4 * slots // 3 <= most:
        slots *= 2
    return 2 * slots // 3 if most >= 2 * slots // 3 else max(1, most)
