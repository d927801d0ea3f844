"""The waiting room of one pool: its requests, their order and their deadlines."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from math import inf

from llmproxy.core.domain import Request, Waited, WaitReason
from llmproxy.core.policy_registry import Faults
from llmproxy.core.queueing.blocked import OF_BACKEND, BlockedRequests
from llmproxy.core.queueing.claims import Claims
from llmproxy.core.queueing.deadlines import Deadlines
from llmproxy.core.queueing.fairness import policies
from llmproxy.core.queueing.lazy_heap import LazyHeap
from llmproxy.core.queueing.occupancy import DrainRate, Full, Occupancy
from llmproxy.core.queueing.ordering import Rank
from llmproxy.core.queueing.queue import Band, Queued, waits
from llmproxy.core.queueing.usage_limits import UsageLimits
from llmproxy.core.settings import Settings


class _Bands(dict[int, Band]):
    """The bands by priority level, created at the first use."""

    def __init__(self, make: Callable[[int], Band]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, level: int) -> Band:
        return self._make(level)


class WaitingRoom:
    """The waiting requests of one pool and their deadlines. A request waits in a flow of its band, or is blocked."""

    def __init__(
        self,
        settings: Settings,
        occupancy: Occupancy,
        limits: UsageLimits,
        faults: Faults,
        room_on: Callable[[str, int, float], int],
        drain: DrainRate,
    ) -> None:
        self._settings = settings
        self.room_on = room_on  # (Backend, band, now) -> how many more requests of the band fit on the backend.
        self._faults = faults
        self._occupancy, self._limits = occupancy, limits  # Shared by all pools of the process.
        self._drain = drain
        # Band -> (time, reason) of the last decision that made the band wait.
        self._wait_reasons: dict[int, tuple[float, WaitReason]] = {}
        self.claims = Claims()
        self.bands = _Bands(self.make_band)  # Priority level -> band, created at the first use.
        # For shedding: band -> its requests, the newest first, rests of streams last. Sorted only when needed.
        self._newest: dict[int, LazyHeap[float, Queued]] = {}
        self._unsorted: list[Queued] = []
        self.blocked = BlockedRequests()
        self._labels: dict[str, str] = {}  # Label -> id of the last request with this label.
        self.waiting: dict[str, Queued] = {}  # Request id -> waiting request.
        self.deadlines = Deadlines(settings.queue.no_backend_wait_s, self.waiting)
        self.prompt_tokens = self.output_tokens = 0  # The expected tokens of all waiting requests.
        self.order: list[int] = []  # All bands, highest first.

    def reconfigure(self, settings: Settings, now: float) -> None:
        """Applies new settings. Bands and their requests stay."""
        self._settings = settings
        self.deadlines.reconfigure(settings.queue.no_backend_wait_s, now)

    def __len__(self) -> int:
        return len(self.waiting)

    def make_band(self, level: int) -> Band:
        fairness = policies.get(self._settings.fairness)(self._settings)
        band = self.bands[level] = Band(fairness, self._faults, self.claims)
        self._newest[level] = LazyHeap(waits)
        self.order = sorted(self.bands, reverse=True)
        return band

    def levels(self) -> list[int]:
        """Returns the bands with requests in their flows, highest first."""
        return [level for level in self.order if self.bands[level].size]

    def any_below(self, level: int) -> bool:
        """Returns whether a request of a band below `level` waits, in its flow or blocked."""
        for lower in self.order:
            if lower < level and self.bands[lower].size:
                return True
        return self.blocked.size > 0 and self.blocked.any_below(level)

    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Returns (band, requests in its flows) of the bands in `levels`, highest first."""
        found: tuple[tuple[int, int], ...] = ()
        for level in self.order:
            if size := self.bands[level].size:
                found = (*found, (level, size))
        return found

    def ahead_of(self, level: int) -> int:
        """Returns the number of requests in flows of band `level` and above, which may go before a new one of `level`.

        Blocked requests are not counted.
        """
        return sum(band.size for other, band in self.bands.items() if other >= level)

    # --- in and out --------------------------------------------------------------------------------------------------

    def enter(
        self, request: Request, rank: Rank, excluded: frozenset[str], now: float, *, on_hold: bool = False
    ) -> None:
        """Adds `request`. `on_hold`: none of its backends is up, so it waits for at most `no_backend_wait_s`."""
        queued = Queued(request, rank, excluded, on_hold=on_hold)
        self.waiting[request.id] = queued
        self._labels[request.label] = request.id
        self._occupancy.enter(request, now)
        self.prompt_tokens += request.prompt_tokens
        self.output_tokens += request.output_tokens
        left_s = request.deadline_s - now
        if on_hold:
            left_s = min(left_s, self._settings.queue.no_backend_wait_s)
        self.deadlines.enter(queued, now, left_s)
        self._unsorted.append(queued)
        if len(self._unsorted) > 64 + 2 * len(self.waiting):
            self._unsorted = [one for one in self._unsorted if not one.gone]
            # While all requests leave in the pass after their arrival, no push cleans the heaps.
            self.deadlines.clean()
            for newest in self._newest.values():
                newest.clean()
        self.bands[request.band].push(queued, now)

    def leave(self, queued: Queued) -> Waited | None:
        """Removes a request. Returns why it waited, None if no scheduling pass made it wait."""
        request = queued.request
        # Most requests do not wait, so `waited` is rarely called.
        waited = self.waited(queued) if self._wait_reasons or queued.back_from or queued.blocked_by else None
        del self.waiting[request.id]
        if self._labels.get(request.label) == request.id:
            del self._labels[request.label]
        if queued.blocked_by is None and queued.back_from is None:
            self.bands[request.band].remove(queued)
        else:
            self._take_out(queued)
        self._occupancy.leave(request)
        self.prompt_tokens -= request.prompt_tokens
        self.output_tokens -= request.output_tokens
        return waited

    def set_wait_reason(self, level: int, reason: WaitReason, now: float) -> None:
        self._wait_reasons[level] = now, reason

    def waited(self, queued: Queued) -> Waited | None:
        """Returns why a request waits, for log and debug pages; None as long as no scheduling pass made it wait."""
        since_s = self._occupancy.since_s(queued.request)
        line = queued.blocked_by or queued.back_from
        if line is None:
            decided_s, reason = self._wait_reasons.get(queued.request.band, (-inf, WaitReason.FULL))
            if decided_s < since_s:
                return None
            by_choice = reason is WaitReason.NO_MATCH and queued.later
            rule = f"{WaitReason.LATER}: {queued.later}" if by_choice else reason.value
        elif line.startswith(OF_BACKEND):
            rule = f"{line.removeprefix(OF_BACKEND)}, which alone can serve it, has no room"
        else:
            rule = f"the limit {line} is used up"
        return Waited(rule, self._drain.granted_since(since_s))

    def full(self, request: Request, without: Sequence[Queued] = ()) -> Full | None:
        """Returns the limit that `request` would exceed if the requests `without` had left; None if it fits."""
        return self._occupancy.full(request, [queued.request for queued in without] if without else ())

    def newest_below(self, level: int) -> Generator[Queued, None, None]:
        """Yields the requests of bands below `level`: the lowest band first, and in a band the newest request first and
        the rests of streams last.

        Close the iterator before any other change of the waiting room.
        """
        unsorted, self._unsorted = self._unsorted, []
        for queued in unsorted:
            if not queued.gone:
                age = inf if queued.request.continued else -queued.request.arrived_s
                self._newest[queued.request.band].push(age, queued, len(self.waiting))
        for lower in reversed(self.order):
            if lower < level:
                yield from self._newest[lower]

    # --- blocked requests ----------------------------------------------------------------------------------

    def block(self, queued: Queued, limit: str) -> None:
        """Moves a request from its flow to the blocked requests of `limit`, a usage limit or `backend:NAME`."""
        self._take_out(queued)
        self.blocked.block(limit, self._copy(queued))

    def refresh(self, now: float) -> None:
        """Sorts requests again whose ranks have changed with time, and moves blocked requests back to their flows."""
        if self.blocked.size:
            self.readmit(now)
        for band in self.bands.values():
            band.ranked_s = now
            if band.turns.entries:
                band.refresh(now)

    def readmit(self, now: float, lowest: int | None = None) -> int:
        """Moves blocked requests that may be granted back to their flows. Returns how many."""
        if not self.blocked.size:
            return 0
        back = self.blocked.next(lambda line, band: self._free(line, band, now), lowest)
        for blocked in back:
            copy = self._copy(blocked)
            copy.back_from = blocked.blocked_by
            self.bands[blocked.request.band].push(copy, now)
        return len(back)

    def _free(self, line: str, band: int, now: float) -> int:
        if line.startswith(OF_BACKEND):
            return self.room_on(line.removeprefix(OF_BACKEND), band, now)
        return self._limits.free(line)

    def _take_out(self, queued: Queued) -> None:
        if queued.blocked_by is not None:
            self.blocked.remove(queued)
        else:
            self.bands[queued.request.band].remove(queued)
            if queued.back_from is not None:
                self.blocked.left(queued.back_from)

    def _copy(self, queued: Queued) -> Queued:
        copy = Queued(queued.request, queued.rank, queued.excluded, queued.due_s, on_hold=queued.on_hold)
        self.waiting[queued.request.id] = copy
        self.deadlines.reenter(copy)
        self._unsorted.append(copy)
        return copy

    # --- inspection --------------------------------------------------------------------------------------------------

    def requests(self) -> Iterator[Request]:
        """Yields the requests that wait in flows, the highest band first."""
        for level in self.order:
            yield from self.bands[level].requests()

    def find(self, name: str) -> Queued | None:
        """Returns the last request labelled `name`, else the request with the id `name`, else None."""
        return self.waiting.get(self._labels.get(name, name))

    def before(self, queued: Queued) -> int | None:
        """Returns the number of requests before `queued` in its flow or blocked queue; None if too many to count."""
        if queued.blocked_by is not None:
            return self.blocked.before(queued)
        return self.bands[queued.request.band].before(queued)

    def check(self, now: float) -> None:
        self._occupancy.check()
        waiting = [queued.request for queued in self.waiting.values()]
        assert self.prompt_tokens == sum(request.prompt_tokens for request in waiting)
        assert self.output_tokens == sum(request.output_tokens for request in waiting)
        for band in self.bands.values():
            band.check(now)
        blocked = [queued.request.id for queued in self.waiting.values() if queued.blocked_by is not None]
        self.blocked.check()
        assert len(blocked) == self.blocked.size
        queued = [request.id for request in self.requests()]
        assert sorted(queued + blocked) == sorted(self.waiting), "the bands and the index of waiting requests differ"
        assert set(self._labels.values()) <= self.waiting.keys(), "a request that left is still known by its label"
        assert not any(one.gone for one in self.waiting.values()), "a request that left is still waiting"
        assert self.claims.backends == {one.request.id: one.later for one in self.waiting.values() if one.later}
