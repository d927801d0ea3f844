"""An approximate prefix index, as routers keep one: which backend was lately sent which blocks of prompts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

Block = int | tuple[str, int]
"""A block's id as the trace gives it, or (request, position) where it gives none."""


class BlockIndex:
    """One list per backend in the order of last use, and for each block the set of its holders as a bit mask.

    The lists keep one number with each block, whose meaning is the owner's (a size, a time). Nothing is dropped unless
    the owner says so.
    """

    def __init__(self) -> None:
        self._lists: dict[str, OrderedDict[Block, float]] = {}
        self._bits: dict[str, int] = {}
        self._names: list[str] = []
        self._holders: dict[Block, int] = {}

    def matches(self, blocks: Iterable[Block], *, unbroken: bool) -> dict[str, int]:
        """How many of a prompt's `blocks` each backend holds, from the first until one that no backend holds.

        With `unbroken` a backend's count ends at the first block that it lacks. Backends without any are left out.
        """
        counts: dict[str, int] = {}
        unbroken_holders = -1
        for holders, length in self._runs(blocks):
            counted = holders & unbroken_holders
            if unbroken:
                unbroken_holders = counted
            while counted:
                lowest = counted & -counted
                name = self._names[lowest.bit_length() - 1]
                counts[name] = counts.get(name, 0) + length
                counted ^= lowest
        return counts

    def _runs(self, blocks: Iterable[Block]) -> Iterator[tuple[int, int]]:
        # Neighbours mostly have the same holders: a look at each block, but at each holder only once per run.
        holders, length = 0, 0
        for block in blocks:
            mask = self._holders.get(block, 0)
            if mask != holders:
                if length:
                    yield holders, length
                holders, length = mask, 0
            if not mask:
                return
            length += 1
        if length:
            yield holders, length

    def insert(self, backend: str, blocks: dict[Block, int] | dict[Block, float]) -> float:
        """Note that `backend` has `blocks` of one prompt; answer the sum of the numbers of those that are new there.

        Written from the tail, so that a prompt's head is always younger than its tail: without its head no tail is of
        use, and the oldest are dropped first.
        """
        if backend not in self._bits:
            self._bits[backend] = 1 << len(self._names)
            self._names.append(backend)
        held, bit, holders, added = (
            self._lists.setdefault(backend, OrderedDict()),
            self._bits[backend],
            self._holders,
            0.0,
        )
        for block in reversed(blocks):
            if block in held:
                held.move_to_end(block)
            else:
                holders[block] = holders.get(block, 0) | bit
                added += blocks[block]
            held[block] = blocks[block]
        return added

    def size(self, backend: str) -> int:
        """How many blocks the list of `backend` holds."""
        return len(self._lists.get(backend, ()))

    def oldest(self, backend: str) -> float | None:
        """The number kept with the least lately used block of `backend`, None when it has none."""
        held = self._lists.get(backend)
        return held[next(iter(held))] if held else None

    def drop_oldest(self, backend: str) -> float:
        """Forget the least lately used block of `backend`; answer its number. Raises KeyError when it has none."""
        block, value = self._lists[backend].popitem(last=False)
        self._release(block, backend)
        return value

    def remove(self, backend: str, block: Block) -> None:
        """Forget one block. Raises KeyError when `backend` does not hold it."""
        del self._lists[backend][block]
        self._release(block, backend)

    def forget(self, backend: str) -> None:
        for block in self._lists.pop(backend, ()):
            self._release(block, backend)

    def _release(self, block: Block, backend: str) -> None:
        left = self._holders[block] ^ self._bits[backend]
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]

    def backends(self) -> list[str]:
        """Those that hold, or held, anything, in the order in which they were first seen."""
        return list(self._lists)
