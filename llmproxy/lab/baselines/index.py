"""An approximate prefix index: the blocks recently sent to each backend."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

Block = int | tuple[str, int]  # The id of a block in the trace, or (request id, position) for a block without one.


class BlockIndex:
    """The blocks of each backend in the order of last use. Each block has a bit mask of its backends.

    Each block also has a number that the caller chooses, such as a size or a time. Only the caller drops blocks.
    """

    def __init__(self) -> None:
        self._lists: dict[str, OrderedDict[Block, float]] = {}
        self._bits: dict[str, int] = {}
        self._names: list[str] = []
        self._holders: dict[Block, int] = {}

    def matches(self, blocks: Iterable[Block], *, unbroken: bool) -> dict[str, int]:
        """Maps each backend to the number of a prompt's `blocks` that it has.

        Counting ends at the first block that no backend has; with `unbroken`, at the first that this backend lacks.
        Backends without a block are left out.
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
        # Adjacent blocks mostly have the same holders, so holders are listed once per run of equal masks.
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
        """Records that `backend` has the `blocks` of a prompt. Returns the sum of the numbers of the new blocks.

        The tail is inserted first, so that it is dropped first: a tail is useless without its head.
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
        return len(self._lists.get(backend, ()))

    def oldest(self, backend: str) -> float | None:
        """Returns the number that `insert` got for the least recently used block of `backend`; None without blocks."""
        held = self._lists.get(backend)
        return held[next(iter(held))] if held else None

    def drop_oldest(self, backend: str) -> float:
        """Drops the least recently used block of `backend`. Returns its number. Raises KeyError without blocks."""
        block, value = self._lists[backend].popitem(last=False)
        self._release(block, backend)
        return value

    def remove(self, backend: str, block: Block) -> None:
        """Drops one block. Raises KeyError if `backend` does not have it."""
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
        """Returns all backends that ever had a block, in the order of their first block."""
        return list(self._lists)
