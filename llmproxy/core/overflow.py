"""Overflow: requests that wait too long, or whose replicas are all down, go to paid endpoints elsewhere."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from itertools import islice
from math import inf

from llmproxy.core.backends.backend import Backend
from llmproxy.core.domain import Grant, GrantReason, Placed, Request, Usage, Verdict
from llmproxy.core.lease_events import Returned
from llmproxy.core.leases import LeaseObserver, LeaseRecord, Leases
from llmproxy.core.placement.first_fit import limited
from llmproxy.core.queueing.day_budgets import DayBudgets
from llmproxy.core.queueing.queue import Queued
from llmproxy.core.queueing.rate_limits import charged_usage, expected_usage
from llmproxy.core.queueing.usage_limits import UsageLimits
from llmproxy.core.queueing.waiting_room import WaitingRoom
from llmproxy.core.settings import External

LOOK_MAX = 64
"""Maximum number of waiting requests of a band that are examined for each grant. Bounds the time of a pass."""
FREE = {
    Verdict.CONNECT_FAILED, Verdict.LOCAL_FAILURE, Verdict.BUSY, Verdict.UNAUTHORIZED, Verdict.NOT_SERVED,
    Verdict.DRAINING, Verdict.PREEMPTED,
}  # fmt: skip
"""Ends of attempts that cost nothing. Other attempts without a usage may have been computed, and cost as expected."""


class MoneyObserver(LeaseObserver):
    """Counts the cost of requests against `max_per_day` of their external backend: the expected cost from the grant
    on, and the cost of the real tokens at the end.
    """

    def __init__(self, days: DayBudgets) -> None:
        self._days = days
        self._reserved: dict[int, float] = {}

    def booked(self, lease: LeaseRecord, now: float) -> None:  # noqa: ARG002
        cost = self._reserved[lease.number] = expected_cost(lease.backend, lease.request)
        self._days.reserve_money(lease.backend.name, cost)

    def returned(self, lease: LeaseRecord, event: Returned, now: float) -> None:
        backend = lease.backend
        self._days.reserve_money(backend.name, -self._reserved.pop(lease.number))
        if backend.external is not None:
            cost = attempt_cost(backend.external, lease.request, event.verdict, event.usage)
            self._days.spend(backend.name, cost, now)


def attempt_cost(external: External, request: Request, verdict: Verdict, usage: Usage | None) -> float:
    """Returns the cost of an ended attempt. Without a usage, it costs as expected if it may have been computed."""
    used = charged_usage(request, verdict, usage)
    if used is None:
        if verdict in FREE:
            return 0.0
        used = expected_usage(request)
    return external.cost(used)


def expected_cost(backend: Backend, request: Request) -> float:
    """Returns the expected cost of a request on an external backend."""
    assert backend.external is not None
    return backend.external.cost(expected_usage(request))


class Overflow:
    """Chooses the waiting requests of one pool that go to external backends. Runs after each pass over the replicas.

    Args:
        externals: The external backends of all pools, the preferred one first.
        backends: The replicas of the pool.
        leases: Opens the leases on external backends.
    """

    def __init__(
        self,
        externals: Mapping[str, Backend],
        backends: Mapping[str, Backend],
        room: WaitingRoom,
        limits: UsageLimits,
        leases: Leases,
    ) -> None:
        self.externals = externals
        self._backends, self._room, self._limits, self.leases = backends, room, limits, leases
        self._due_s = inf  # The earliest time at which an examined request has waited long enough.

    def grants(self, now: float) -> Iterator[Grant]:
        """Yields grants of external backends for the waiting requests that may go there now, the highest band first."""
        self._due_s = inf
        for level in self._room.order:
            while self._room.bands[level].size and (found := self._first(level, now)) is not None:
                yield self._book(*found, now)

    def changes_at(self, now: float) -> float | None:
        """Returns when a request may go to an external backend without an event; None if only an event can cause it."""
        times = [time for one in self.externals.values() if (time := one.health.changes_at(now)) is not None]
        soonest_s = min([self._due_s, *times])
        return None if soonest_s == inf else soonest_s

    def takes(self, request: Request, excluded: frozenset[str], now: float) -> bool:
        """Returns whether an external backend takes a request while no replica is up."""
        return any(self._able(backend, request, excluded, now) for backend in self.externals.values())

    def knows(self, model: str) -> bool:
        """Returns whether an external backend has a model, even if it takes no request now."""
        return any(one.external is not None and model in one.external.models for one in self.externals.values())

    def _first(self, level: int, now: float) -> tuple[Queued, Backend] | None:
        with closing(self._in_order(level, now)) as waiting:
            for queued in islice(waiting, LOOK_MAX):
                request = queued.request
                if not request.overflows or limited(queued, self._limits) is not None:
                    continue
                down = not any(
                    one.up and request.model in one.served and one.name not in queued.excluded
                    for one in self._backends.values()
                )
                for backend in self.externals.values():
                    if self._able(backend, request, queued.excluded, now):
                        assert backend.external is not None
                        due_s = now if down else request.arrived_s + backend.external.only_above_wait_s
                        if due_s <= now:
                            return queued, backend
                        self._due_s = min(self._due_s, due_s)
        return None

    def _in_order(self, level: int, now: float) -> Generator[Queued, None, None]:
        """Yields the requests of a band in the order in which replicas would get them."""
        lines = self._room.bands[level].lines(now)
        try:
            for line in lines:
                yield from line
        finally:
            if (close := getattr(lines, "close", None)) is not None:
                close()

    def _able(self, backend: Backend, request: Request, excluded: frozenset[str], now: float) -> bool:
        external = backend.external
        assert external is not None
        return (
            request.overflows
            and not request.continued
            and request.backend is None
            and (request.adapter or request.model) in external.models
            and request.band >= external.from_band
            and backend.name not in excluded
            and backend.up
            and backend.health.available(now)
            and backend.own_in_flight + request.sequences <= backend.limit.value
            and expected_cost(backend, request) <= self._limits.days.money_left(backend.name, external.max_per_day, now)
        )

    def _book(self, queued: Queued, backend: Backend, now: float) -> Grant:
        request, room = queued.request, self._room
        band, left_s = room.bands[request.band], room.deadlines.own_left_s(queued, now)
        standing, sizes, flows = band.fairness.standing(request.flow), room.sizes(), band.flows
        why = GrantReason(sizes, flows, standing, 0, waited=room.leave(queued), probe=backend.health.ejected)
        placed = Placed(backend.name, 0.0, (("waited", now - request.arrived_s),), 1)
        lease = self.leases.book(request, placed, backend, now)
        return Grant(lease, request, placed, now, len(room), why, left_s)
