"""The one heap of the waiting room: outdated entries stay in it until they reach the top, and are dropped there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar

BEFORE_LOOK_MAX = 20_000
"""Entries that are counted to say how many come before one of them: some milliseconds of work."""

Key = TypeVar("Key", bound=tuple[float, ...] | float)
Item = TypeVar("Item")
HeapEntry = tuple[Key, int, Item]
"""Key, serial number of the push, item: equal keys come in the order of their pushes."""


class LazyHeap(Generic[Key, Item]):
    """A priority queue. A push is O(log n), and leaving is free: `counts` says whether an entry still counts."""

    __slots__ = ("_counts", "_entries", "_serial")

    def __init__(self, counts: Callable[[HeapEntry[Key, Item]], bool]) -> None:
        self._entries: list[HeapEntry[Key, Item]] = []
        self._counts = counts
        self._serial = count()

    def push(self, key: Key, item: Item, live: int) -> HeapEntry[Key, Item]:
        """Put in an entry and return it. About `live` entries count; many more than that are cleared out first."""
        if len(self._entries) >= 64 + 2 * live:
            self._entries = [entry for entry in self._entries if self._counts(entry)]
            heapify(self._entries)
        entry = (key, next(self._serial), item)
        heappush(self._entries, entry)
        return entry

    def least(self) -> HeapEntry[Key, Item] | None:
        """The least entry that counts."""
        entries = self._entries
        while entries and not self._counts(entries[0]):
            heappop(entries)
        return entries[0] if entries else None

    def pop(self) -> Item:
        """Take out the entry that `least` has just returned."""
        return heappop(self._entries)[2]

    def before(self, item: Item) -> int | None:
        """How many entries come before that of `item`, None when there are more than BEFORE_LOOK_MAX to count."""
        if len(self._entries) > BEFORE_LOOK_MAX:
            return None
        own = next(entry for entry in self._entries if entry[2] is item and self._counts(entry))
        return sum(1 for entry in self._entries if entry[:2] < own[:2] and self._counts(entry))

    def below(self, key: Key) -> int | None:
        """How many entries have a lesser key, None when there are more than BEFORE_LOOK_MAX to count."""
        if len(self._entries) > BEFORE_LOOK_MAX:
            return None
        return sum(1 for entry in self._entries if entry[:1] < (key,) and self._counts(entry))

    def __iter__(self) -> Generator[Item, None, None]:
        """The items that count, least key first. Close the iterator before changing anything."""
        return self.first(sys.maxsize)

    def first(self, most: int) -> Generator[Item, None, None]:
        """At most so many items that count, least key first. Close the iterator before changing anything."""
        taken: list[HeapEntry[Key, Item]] = []
        try:
            while len(taken) < most and (entry := self.least()) is not None:
                # Callers almost always want the first item alone, so it stays in the heap until they ask for more.
                yield entry[2]
                taken.append(heappop(self._entries))
        finally:
            for entry in taken:
                heappush(self._entries, entry)


class KeyedHeap:
    """Names (flows, request ids) in the order of a key that may change; equal keys in the order in which they were set.

    Setting a key and taking the least are O(log n). All keys of one heap have the same length.
    """

    def __init__(self) -> None:
        self._current: dict[str, HeapEntry[tuple[float, ...], str]] = {}
        self._heap: LazyHeap[tuple[float, ...], str] = LazyHeap(self._is_current)

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, name: str) -> bool:
        return name in self._current

    def set(self, name: str, *key: float) -> None:
        self._current[name] = self._heap.push(key, name, 2 * len(self._current))

    def discard(self, name: str) -> None:
        self._current.pop(name, None)

    def least(self) -> tuple[float, ...] | None:
        """The least key, None when the heap is empty."""
        entry = self._heap.least()
        return None if entry is None else entry[0]

    def take_below(self, *key: float) -> list[str]:
        """Take out all names whose key is less than `key`."""
        taken: list[str] = []
        while (least := self.least()) is not None and least < key:
            taken.append(self._heap.pop())
            del self._current[taken[-1]]
        return taken

    def __iter__(self) -> Iterator[str]:
        """Names by key. Close the iterator before changing anything."""
        return self._heap.first(sys.maxsize)

    def _is_current(self, entry: HeapEntry[tuple[float, ...], str]) -> bool:
        return self._current.get(entry[2]) is entry
