"""Flows in the order of a key that may change at any time."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

Key = tuple[float, ...]


class SortedFlows:
    """A heap of flows whose outdated entries are dropped when they surface; equal keys in the order they were set.

    Setting a key and taking the least are O(log n). All keys of one instance have the same length.
    """

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Key, int]] = {}
        self._heap: list[tuple[tuple[Key, int], str]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, flow: str) -> bool:
        return flow in self._entries

    def set(self, flow: str, *key: float) -> None:
        self._serial += 1
        entry = self._entries[flow] = (key, self._serial)
        heappush(self._heap, (entry, flow))
        if len(self._heap) > 64 + 4 * len(self._entries):
            self._heap = [(entry, name) for name, entry in self._entries.items()]
            heapify(self._heap)

    def discard(self, flow: str) -> None:
        self._entries.pop(flow, None)

    def least(self) -> Key | None:
        """The least key, None without flows."""
        while self._heap and self._entries.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][0][0] if self._heap else None

    def take_below(self, *key: float) -> list[str]:
        """Take out all flows whose key is less than `key`."""
        taken: list[str] = []
        while (least := self.least()) is not None and least < key:
            taken.append(heappop(self._heap)[1])
            del self._entries[taken[-1]]
        return taken

    def __iter__(self) -> Iterator[str]:
        """Flows by key. Close the iterator before changing anything."""
        taken: list[tuple[tuple[Key, int], str]] = []
        try:
            while self._heap:
                if self._entries.get(self._heap[0][1]) != self._heap[0][0]:
                    heappop(self._heap)
                    continue
                # The first is asked for almost always and those behind it hardly ever: it stays where it is until then.
                yield self._heap[0][1]
                taken.append(heappop(self._heap))
        finally:
            for entry in taken:
                heappush(self._heap, entry)
