"""Requests whose tenant or model has as many in flight as it may: they wait beside their flows, in nobody's way."""

from __future__ import annotations

from collections import Counter
from math import inf

from llmproxy.core.limits import UsageLimits
from llmproxy.core.queue import LazyHeap, Queued

Key = tuple[float, float]
NOBODY: Key = (inf, inf)


class Parking:
    """One line for each usage limit that is reached: the highest band first, then the earliest arrival.

    A request is parked when it would have been its turn, and comes back to its place in its flow when there is room
    under the limit. Those behind it in the flow, which may belong to others, are not held up.
    """

    def __init__(self) -> None:
        self._lines: dict[str, LazyHeap[Key]] = {}
        self._sizes: dict[str, int] = {}
        self.size = 0
        self._by_band: Counter[tuple[int, str]] = Counter()
        self._back: Counter[str] = Counter()

    def park(self, name: str, queued: Queued) -> None:
        queued.parked = name
        self._by_band[queued.request.band, name] += 1
        size = self._sizes[name] = self._sizes.get(name, 0) + 1
        self.size += 1
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = LazyHeap(lambda _, queued: not queued.gone)
        line.push((-queued.request.band, queued.request.arrived_s), queued, size)

    def remove(self, queued: Queued) -> None:
        """A parked request leaves, to its flow or for good."""
        assert queued.parked is not None
        queued.gone = True
        self.size -= 1
        self._by_band[queued.request.band, queued.parked] -= 1
        self._sizes[queued.parked] -= 1
        if not self._sizes[queued.parked]:
            del self._sizes[queued.parked], self._lines[queued.parked]

    def next(self, limits: UsageLimits, lowest: int | None = None) -> list[Queued]:
        """Take out those that may be in flight now.

        For each limit as many as it has room for, less those that came back and still wait; with a band, as many
        again of that band and those above it, because those that came back fitted nowhere.
        """
        back: list[Queued] = []
        for name in list(self._lines):
            line, waiting = self._lines[name], 0 if lowest is not None else self._back[name]
            for _ in range(limits.free(name) - waiting):
                entry = line.least()
                if entry is None or (lowest is not None and entry[2].request.band < lowest):
                    break
                back.append(entry[2])
                self.remove(entry[2])
                self._back[name] += 1
        return back

    def first(self, limits: UsageLimits) -> Key:
        """Of those that may be in flight now: the highest band, negated, and of it the earliest arrival; else inf."""
        heads = (line.least() for name, line in self._lines.items() if limits.free(name))
        return min((entry[0] for entry in heads if entry is not None), default=NOBODY)

    def left(self, name: str) -> None:
        """One that came back from this limit's line left its flow."""
        self._back[name] -= 1
        if not self._back[name]:
            del self._back[name]

    def counts(self) -> dict[tuple[int, str], int]:
        """(Band, limit) -> requests parked."""
        return {where: parked for where, parked in self._by_band.items() if parked}

    def before(self, queued: Queued) -> int | None:
        """How many come back before `queued` does, None where they are too many to count."""
        assert queued.parked is not None
        return self._lines[queued.parked].before(queued)

    def check(self) -> None:
        """Raise AssertionError when the sum differs from its recomputation."""
        assert self.size == sum(self._sizes.values()) == sum(self._by_band.values())
