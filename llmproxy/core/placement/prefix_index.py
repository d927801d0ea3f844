"""Which backend holds which blocks of prompts, as far as a proxy can know it: a prefix index. Pure.

A prompt is a chain of block hashes, each of which stands for its block and all before it; equal hashes mean equal
prompts up to there. The index keeps, per backend, the blocks that it was lately sent, about as many as its KV-cache
holds, so that a match predicts what the engine will find cached.

Recency is kept in *generations*. A touched block moves to the youngest one; a full generation gets a younger one in
front of it; room is made by dropping the oldest as a whole. What is held is then always the upper end of the exact LRU
order (Mattson et al., "Evaluation techniques for storage hierarchies", 1970): everything among the last 7/8 of the
capacity and nothing beyond all of it. A chain is touched as a whole, so a block is never older than one that follows
it, and tails go before their heads, as in vLLM's free list: the held part of a chain is always a prefix of it, lies in
generations of growing age, and is found by bisection. A list per block would double the memory and buy nothing, as
the true capacity is not known to an eighth.

Memory, per block and backend: a key of 36 bytes and an entry of 27 to 54. Generations are as large as a dict of
CPython is when it is exactly full, and never more than half empty on average. `benchmarks/placement.py` measures it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

# Held until the true capacity is told: the KV-cache of an 8B model on an 80 GB device, in blocks of 512 bytes.
CAPACITY_BLOCKS = 4_000
# Bounds the memory (24 MB) and the longest call (forgetting a backend, 10 ms): 134 MB of text, 30 M tokens.
CAPACITY_BLOCKS_MAX = 1 << 18

_GENERATIONS_MIN = 8
_FAR_ABOVE = 2.0  # A prediction may be off by a block, a template and the bytes of a token; not by this factor.
# At the full capacity the two balance where one prediction in 33 fails.
_SHRINK = 1 / 16
_RECOVER = 1 / 512
_SHARE_MIN = 1 / 16

_Generation = dict[int, None]


class PrefixIndex:
    """The blocks that each backend of one pool is believed to hold.

    Every call costs time in the blocks that it names and in the backends that it asks about, and none that grows with
    what is held, but `forget` and the drop of a generation (an eighth of a backend's blocks, after as many new ones).
    Hashes are any integers. A backend is known from the first call that names it until it is forgotten.
    """

    def __init__(self, capacity_blocks: int = CAPACITY_BLOCKS) -> None:
        """`capacity_blocks` holds for backends whose own is not told."""
        self._capacity_blocks = capacity_blocks
        self._recent: dict[str, _Recent] = {}
        self._told: dict[str, _Told] = {}

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """How many of a prompt's blocks, from the first one on and unbroken, each backend holds; none is left out."""
        found = {}
        if hashes:
            for backend, recent in self._recent.items():
                blocks = recent.matched(hashes)
                if blocks:
                    found[backend] = blocks
            for backend, told in self._told.items():
                blocks = told.matched(hashes)
                if blocks:
                    found[backend] = blocks
        return found

    def record(self, backend: str, hashes: Sequence[int]) -> None:
        """`backend` has computed these blocks, all of one chain from its first block on; told at the first byte.

        Of a chain longer than the capacity the head is kept.
        """
        if backend not in self._told:
            self._of(backend).touch(hashes)

    def drop(self, backend: str, hashes: Sequence[int], kept: int = 0) -> None:
        """Undo a record: `backend` holds no more than the first `kept` blocks of this chain.

        A dropped block that a longer chain runs over may still be counted for that chain, whose answer proves it.
        """
        recent = self._recent.get(backend)
        if recent is not None:
            recent.drop(hashes, kept)

    def forget(self, backend: str) -> None:
        """The backend restarted or left: it holds nothing, and what was told and learned of it is void."""
        self._recent.pop(backend, None)
        self._told.pop(backend, None)

    def resize(self, backend: str, blocks: int) -> None:
        """The KV-cache of `backend` holds this many blocks of a prompt."""
        if backend in self._told:
            self._told[backend].resize(blocks)
        else:
            self._of(backend).resize(blocks)

    def calibrate(self, backend: str, predicted: float, real: float) -> None:
        """What was predicted to be cached of one prompt and what was, in any one unit.

        Where the prediction is far above, what is held is cut by up to 1/16, so that entries age faster; where it is
        right, 1/512 of the capacity comes back.
        """
        recent = self._recent.get(backend)
        if recent is not None and predicted > 0:
            recent.calibrate(predicted, real)

    def stored(self, backend: str, hashes: Iterable[int]) -> None:
        """The engine itself says that it cached these blocks; from now on only its own word counts."""
        if backend not in self._told:
            recent = self._recent.pop(backend, None)
            self._told[backend] = _Told(self._capacity_blocks if recent is None else recent.capacity_blocks)
        self._told[backend].stored(hashes)

    def removed(self, backend: str, hashes: Iterable[int]) -> None:
        """The engine itself says that it no longer holds these blocks."""
        self.stored(backend, ())
        self._told[backend].removed(hashes)

    def size(self, backend: str) -> int:
        """How many blocks `backend` is believed to hold."""
        held = self._told.get(backend) or self._recent.get(backend)
        return 0 if held is None else held.held

    def limit(self, backend: str) -> int:
        """How many blocks `backend` is believed to hold at most: its capacity, cut by what calibration learned."""
        held = self._told.get(backend) or self._recent.get(backend)
        return self._capacity_blocks if held is None else held.limit

    def check(self) -> None:
        """Raise AssertionError unless the books agree with what is held."""
        for recent in self._recent.values():
            recent.check()

    def _of(self, backend: str) -> _Recent:
        recent = self._recent.get(backend)
        if recent is None:
            recent = self._recent[backend] = _Recent(self._capacity_blocks)
        return recent


class _Recent:
    """The blocks that one backend was lately sent, in generations, the youngest last."""

    def __init__(self, capacity_blocks: int) -> None:
        self.held = 0
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
        """Move a chain to the youngest generation, from its tail on, so that no head is older than its tail."""
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
                self.held += len(youngest) - before
            end = begin
        self._make_room()

    def drop(self, hashes: Sequence[int], kept: int) -> None:
        self._take(self._generations[::-1], hashes, kept, len(hashes))

    def resize(self, blocks: int) -> None:
        self.capacity_blocks = _bounded(blocks)
        self._limit()

    def calibrate(self, predicted: float, real: float) -> None:
        if real * _FAR_ABOVE < predicted:
            self._share = max(_SHARE_MIN, self._share * (1 - _SHRINK * (1 - real / predicted)))
        else:
            self._share = min(1.0, self._share + _RECOVER)
        self._limit()

    def check(self) -> None:
        assert self.held == sum(map(len, self._generations)), "the held blocks are miscounted"
        assert self.held <= self.limit, "more is held than fits"
        assert self._generations, "there is no generation to put a block into"

    def _limit(self) -> None:
        self.limit = max(1, int(self.capacity_blocks * self._share))
        self._generation_blocks = _generation_blocks(self.limit)
        self._make_room()

    def _make_room(self) -> None:
        while self.held > self.limit:
            self.held -= len(self._generations.pop(0))
        if not self._generations:
            self._generations.append({})

    def _rotate(self) -> None:
        """Begin a generation. Neighbours that touches have thinned out are joined, so that there are never many."""
        joined = self._generations[:1]
        for generation in self._generations[1:]:
            if len(joined[-1]) + len(generation) <= self._generation_blocks:
                joined[-1] = {**joined[-1], **generation}
            else:
                joined.append(generation)
        joined.append({})
        self._generations = joined

    def _take(self, generations: Iterable[_Generation], hashes: Sequence[int], at: int, end: int) -> None:
        """Remove `hashes[at:end]` from `generations`, the youngest first."""
        for generation in generations:
            if at == end:
                break
            if hashes[at] in generation:
                before, begin = len(generation), at
                at = _run_end(generation, hashes, at, end)
                for block in hashes[begin:at]:
                    generation.pop(block, None)
                self.held -= before - len(generation)


class _Told:
    """The blocks of one backend by its own word, in no order: the engine evicts, nothing here does."""

    def __init__(self, capacity_blocks: int) -> None:
        self._blocks: set[int] = set()
        self.resize(capacity_blocks)

    @property
    def held(self) -> int:
        return len(self._blocks)

    def matched(self, hashes: Sequence[int]) -> int:
        # An engine may lose a head before its tail (sliding windows do), so each block is looked at.
        held = self._blocks
        for at, block in enumerate(hashes):
            if block not in held:
                return at
        return len(hashes)

    def stored(self, hashes: Iterable[int]) -> None:
        self._blocks.update(hashes)
        self._bound()

    def removed(self, hashes: Iterable[int]) -> None:
        self._blocks.difference_update(hashes)

    def resize(self, blocks: int) -> None:
        self.limit = _bounded(blocks)
        self._bound()

    def _bound(self) -> None:
        # More than fits was stored, so some word of a removal was lost, and nobody can say which.
        if len(self._blocks) > self.limit:
            self._blocks = set()


class InUse:
    """The blocks of the prompts in flight at one backend. Those that several share take room in its cache only once."""

    def __init__(self) -> None:
        self._users: dict[int, int] = {}

    def matched(self, hashes: Sequence[int]) -> int:
        """How many of a prompt's blocks, from the first one on, are in use."""
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
    """The position after the blocks from `at` on that lie in `generation`, which holds the one at `at`."""
    while end - at > 1:
        middle = (at + end) >> 1
        if hashes[middle] in generation:
            at = middle
        else:
            end = middle
    return end


def _bounded(blocks: int) -> int:
    return min(max(1, blocks), CAPACITY_BLOCKS_MAX)


def _generation_blocks(limit: int) -> int:
    """The most blocks, but no more than an eighth of `limit`, at which a dict's table of 2**n slots is just full."""
    most = limit // _GENERATIONS_MIN
    slots = 8
    while 4 * slots // 3 <= most:
        slots *= 2
    return 2 * slots // 3 if most >= 2 * slots // 3 else max(1, most)
