"""Heaps with lazy deletion: an outdated entry stays in the heap until it reaches the top, or until the heap is cleaned.

A heap is cleaned when outdated entries are the majority.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar

BEFORE_LOOK_MAX = 20_000  # Positions in larger heaps are not computed, because this takes milliseconds.

Key = TypeVar("Key", bound=tuple[float, ...] | float)
Item = TypeVar("Item")
HeapEntry = tuple[Key, int, Item]  # (Key, serial number of the push, item). Equal keys are in push order.


class LazyHeap(Generic[Key, Item]):
    """A priority queue. A removed entry stays in the heap until it reaches the top, or until the heap is cleaned.

    An entry is valid while `counts(entry)` is true. Other entries are skipped.
    """

    __slots__ = ("_counts", "_serial", "entries")

    def __init__(self, counts: Callable[[HeapEntry[Key, Item]], bool]) -> None:
        self.entries: list[HeapEntry[Key, Item]] = []
        self._counts = counts
        self._serial = count()

    def push(self, key: Key, item: Item, live: int) -> HeapEntry[Key, Item]:
        """Adds an entry and returns it. Cleans up first if far more than `live`, a bound of the valid ones, exist."""
        if len(self.entries) >= 64 + 2 * live:
            self.clean()
        entry = (key, next(self._serial), item)
        heappush(self.entries, entry)
        return entry

    def clean(self) -> None:
        """Drops the entries that are not valid."""
        self.entries = [entry for entry in self.entries if self._counts(entry)]
        heapify(self.entries)

    def least(self) -> HeapEntry[Key, Item] | None:
        """Returns the least valid entry, None without one."""
        entries = self.entries
        while entries and not self._counts(entries[0]):
            heappop(entries)
        return entries[0] if entries else None

    def pop(self) -> Item:
        """Removes the entry that `least` has just returned, and returns its item."""
        return heappop(self.entries)[2]

    def before(self, item: Item) -> int | None:
        """Returns the number of entries before the entry of `item`, None in a heap above BEFORE_LOOK_MAX entries."""
        if len(self.entries) > BEFORE_LOOK_MAX:
            return None
        own = next(entry for entry in self.entries if entry[2] is item and self._counts(entry))
        return sum(1 for entry in self.entries if entry[:2] < own[:2] and self._counts(entry))

    def below(self, key: Key) -> int | None:
        """Returns the number of entries with a lesser key, None in a heap above BEFORE_LOOK_MAX entries."""
        if len(self.entries) > BEFORE_LOOK_MAX:
            return None
        return sum(1 for entry in self.entries if entry[:1] < (key,) and self._counts(entry))

    def __iter__(self) -> Generator[Item, None, None]:
        """Yields the valid items, least key first. Close the iterator before changing the heap."""
        return self.first(sys.maxsize)

    def first(self, most: int) -> Generator[Item, None, None]:
        """Yields at most `most` valid items, least key first. Close the iterator before changing the heap."""
        taken: list[HeapEntry[Key, Item]] = []
        try:
            while len(taken) < most and (entry := self.least()) is not None:
                # Callers almost always use the first item only, so it is popped when the next one is requested.
                yield entry[2]
                taken.append(heappop(self.entries))
        finally:
            for entry in taken:
                heappush(self.entries, entry)


class KeyedHeap:
    """Names (flows, request ids) ordered by a key that may change. Equal keys are in the order of their last change.

    Setting a key and taking the least are O(log n). All keys of one heap have the same length. Changed keys are sorted
    when the least of several names is needed, because a single name needs no order.
    """

    def __init__(self) -> None:
        self.current: dict[str, HeapEntry[tuple[float, ...], str]] = {}
        """Name -> the name's valid entry. Deleting a key of this dict removes the name from the heap."""
        self._unsorted: list[HeapEntry[tuple[float, ...], str]] = []
        self._heap: LazyHeap[tuple[float, ...], str] = LazyHeap(self._is_current)

    def set(self, name: str, *key: float) -> None:
        entry = self.current[name] = key, 0, name
        if len(self.current) == 1:
            self._unsorted.clear()
        self._unsorted.append(entry)
        if len(self._unsorted) > 64 + 2 * len(self.current):
            self._unsorted = [one for one in self._unsorted if self._is_current(one)]

    def least_first(self, default: float) -> float:
        """Returns the first number of the least key, or `default` if the heap is empty."""
        if len(self.current) > 1:
            entry = self._sorted().least()
            return default if entry is None else entry[0][0]
        for only in self.current.values():
            return only[0][0]
        return default

    def take_below(self, *key: float) -> list[str]:
        """Removes and returns all names whose key is less than `key`."""
        taken: list[str] = []
        heap = self._sorted()
        while (least := heap.least()) is not None and least[0] < key:
            taken.append(heap.pop())
            del self.current[taken[-1]]
        return taken

    def __iter__(self) -> Iterator[str]:
        """Yields the names by key. Close the iterator before changing the heap."""
        if len(self.current) < 2:
            return iter(tuple(self.current))
        return self._sorted().first(sys.maxsize)

    def _sorted(self) -> LazyHeap[tuple[float, ...], str]:
        unsorted, self._unsorted = self._unsorted, []
        for entry in unsorted:
            if self.current.get(entry[2]) is entry:
                self.current[entry[2]] = self._heap.push(entry[0], entry[2], 2 * len(self.current))
        return self._heap

    def _is_current(self, entry: HeapEntry[tuple[float, ...], str]) -> bool:
        return self.current.get(entry[2]) is entry
