"""Requests that wait beside their flows, in nobody's way: for a usage limit, or for the only backend they may go to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import inf

from llmproxy.core.queueing.lazy_heap import LazyHeap
from llmproxy.core.queueing.queue import Queued, waits
from llmproxy.core.queueing.usage_limits import UsageLimits

Key = tuple[float, float]
NOBODY: Key = (inf, inf)
OF_BACKEND = "backend:"
"""Begins the names of the lines for backends; those of usage limits begin with `tenant:` or `model:`."""


class BlockedRequests:
    """One line for each usage limit that is reached and each backend without room: highest band, then earliest arrival.

    A request is parked when it would have been its turn, and comes back to its place in its flow when there is room
    under the limit, or on its backend.
    Those behind it in the flow, which may belong to others, are not held up.
    """

    def __init__(self) -> None:
        self._lines: dict[str, LazyHeap[Key, Queued]] = {}
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
            line = self._lines[name] = LazyHeap(waits)
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

    def next(self, free: Callable[[str, int], int], lowest: int | None = None) -> list[Queued]:
        """Take out those that may be in flight now; `free` says how many more, of a line and the band of its first.

        For each line as many as there is room for, less those that came back and still wait; with a band, as many
        again of that band and those above it, because those that came back fitted nowhere.
        """
        back: list[Queued] = []
        for name in list(self._lines):
            line, waiting = self._lines[name], 0 if lowest is not None else self._back[name]
            first = line.least()
            for _ in range(0 if first is None else free(name, first[2].request.band) - waiting):
                entry = line.least()
                if entry is None or (lowest is not None and entry[2].request.band < lowest):
                    break
                back.append(entry[2])
                self.remove(entry[2])
                self._back[name] += 1
        return back

    def first(self, limits: UsageLimits) -> Key:
        """Of those whose limit has room: the highest band, negated, and of it the earliest arrival; else inf."""
        names = (name for name in self._lines if not name.startswith(OF_BACKEND) and limits.free(name))
        heads = (self._lines[name].least() for name in names)
        return min((entry[0] for entry in heads if entry is not None), default=NOBODY)

    def left(self, name: str) -> None:
        """One that came back from this line left its flow."""
        self._back[name] -= 1
        if not self._back[name]:
            del self._back[name]

    def counts(self) -> dict[tuple[int, str], int]:
        """(Band, line) -> requests parked."""
        return {where: parked for where, parked in self._by_band.items() if parked}

    def before(self, queued: Queued) -> int | None:
        """How many come back before `queued` does, None where they are too many to count."""
        assert queued.parked is not None
        return self._lines[queued.parked].before(queued)

    def check(self) -> None:
        """Raise AssertionError when the sum differs from its recomputation."""
        assert self.size == sum(self._sizes.values()) == sum(self._by_band.values())
