"""Finds the next request of a band: the first that fits on a backend, by the order of the flows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from itertools import islice
from math import inf
from types import GeneratorType

from msgspec import Struct
from msgspec.structs import replace

from llmproxy.core.backends.view import View, rooms
from llmproxy.core.domain import DEFAULT, NoCapacity, NoMatch, Placed
from llmproxy.core.placement.policy import NO_CAPACITY, Placement, context_tokens, could_serve
from llmproxy.core.queueing.blocked import OF_BACKEND
from llmproxy.core.queueing.queue import NONE_CLOSED, Band, Queued
from llmproxy.core.queueing.usage_limits import UsageLimits

INVERSION_LOOK_MAX = 64  # Requests of higher bands that are checked when a request of a lower band is granted.


class Fit(Struct, frozen=True):
    """A request, its backend, and the number of earlier requests that were tried and fit on no backend."""

    queued: Queued
    placed: Placed
    passed_over: int


class Limited(Struct, frozen=True):
    """The next request, which waits for a usage limit or for the only backend that may serve it."""

    queued: Queued
    limit: str


class Unmatched(Struct):
    """Requests that found no backend in this scheduling pass.

    The number of free slots only falls during a pass, so later requests of the same kind find no backend either.
    """

    # (Model, excluded backends) -> requests with this many context tokens or more have no match.
    from_tokens: dict[tuple[str, frozenset[str]], int] = {}
    looks: int = 0  # How many more requests that wait for a chosen backend are tried again.
    closed: set[str] = set()  # Backends without room that requests wait for.
    later: list[Queued] = []  # Requests that wait for such a backend since the last call, for `Band.sort`.
    later_most: int = 0  # Maximum length of `later`.
    lines: int = 0  # Lines that were walked since the last call.
    # Requests without a match that failed on other backends before.
    retries: list[Queued] = []

    def add(self, queued: Queued, why: NoMatch) -> None:
        if queued.excluded:
            self.retries.append(queued)
        tokens = 0 if why.whole_model else context_tokens(queued.request)
        self.from_tokens[queued.request.model, queued.excluded] = tokens

    def covers_all(self, band: Band) -> bool:
        """Returns whether no waiting request of a band finds a backend, because none with room serves its model."""
        if len(self.from_tokens) < len(band.kinds):
            return False
        return all(not bound and self.from_tokens.get((model, out)) == 0 for model, out, bound in band.kinds)

    def covers(self, queued: Queued) -> bool:
        tokens = self.from_tokens.get((queued.request.model, queued.excluded))
        return tokens is not None and context_tokens(queued.request) >= tokens


def first_fit(
    band: Band,
    placement: Placement,
    views: Sequence[View],
    ceiling: float,
    limits: UsageLimits,
    unmatched: Unmatched,
    now: float,
    *,
    patient: bool,
) -> Fit | Limited | NoCapacity | None:
    """Returns the next request of `band` with its backend; None if no request can use the free slots.

    Returns Limited if the next request waits for a usage limit or for its only backend. Returns NoCapacity if no
    backend has a free slot for the band. Requests that match no backend are added to `unmatched`. So are requests that
    should wait for a backend without room (`later`); the search ends when there are `later_most` of them. Of the
    requests that waited for such a backend before, `looks` are tried again, and at least the first for each such
    backend; all of them if not `patient`.

    Each request is tried on: 1. a backend that needs a probe, if `patient`; 2. for a band above `default`, the backends
    of step 3 that are not `doubtful`; 3. backends that need no probe and have not used up their share in slow start; 4.
    all backends.

    `patient` is False if a lower band waits too. Then a request takes the best backend with a free slot instead of
    waiting for a full one, because the lower band would take that slot. The request becomes a probe only if no other
    backend has a free slot, because a request of the lower band can be the probe.
    """
    passed_over = 0
    ready = _warm(views)
    trials = False
    for view in ready:
        trials = trials or view.probed
    if trials:
        ready = [replace(view, available=False) if view.probed else view for view in ready]
    lines = band.lines(now, unmatched.closed if patient and not unmatched.looks else NONE_CLOSED)
    try:
        for line in lines:
            unmatched.lines += 1
            if unmatched.from_tokens and unmatched.covers_all(band):
                # There may be thousands of flows.
                break
            # A head that fits nowhere must not block its flow while lower bands are served.
            for queued in line:
                if queued.later and patient and not unmatched.looks and queued.later in unmatched.closed:
                    continue
                if queued.request.limits and (blocked := limited(queued, limits)) is not None:
                    return blocked
                if queued.request.backend is not None:
                    own = _at_only_backend(queued, placement, views, ceiling, passed_over, now)
                    if not isinstance(own, NoMatch):
                        return own
                    passed_over += 1
                    continue
                if unmatched.from_tokens and unmatched.covers(queued):
                    continue
                placed = _as_probe(queued, placement, views, ceiling, now) if trials and patient else None
                if not isinstance(placed, Placed) and queued.request.band > DEFAULT and (some := _sure(ready)):
                    placed = placement.place(queued.request, some, ceiling, queued.excluded, now)
                if not isinstance(placed, Placed):
                    placed = placement.place(queued.request, ready, ceiling, queued.excluded, now)
                if ready is not views and not isinstance(placed, Placed):
                    placed = placement.place(queued.request, views, ceiling, queued.excluded, now)
                if isinstance(placed, NoMatch) and placed.later and not patient:
                    now_ready = placement.ready(views, queued.request.band, ceiling, now)
                    placed = placement.place(queued.request, now_ready, ceiling, queued.excluded, now)
                if isinstance(placed, Placed):
                    return Fit(queued, placed, passed_over)
                if isinstance(placed, NoCapacity):
                    return placed
                if placed.later:
                    unmatched.closed.add(placed.later)
                    if queued.later and unmatched.looks:
                        unmatched.looks -= 1
                    if queued.later != placed.later:
                        band.wait_for(queued, placed, now)
                        unmatched.later.append(queued)
                        if len(unmatched.later) >= unmatched.later_most:
                            return None
                    continue
                unmatched.add(queued, placed)
                passed_over += 1
    finally:
        if isinstance(lines, GeneratorType):
            lines.close()
    # If no backend has room for this band, the scheduler must stop here, before lower bands.
    return None if True in rooms(views, ceiling) else NO_CAPACITY


def _warm(views: Sequence[View]) -> Sequence[View]:
    """Returns `views`, with backends in slow start closed if they have used up their share and others are warmer.

    Backends that came back together are equally warm. A request that finds no slot here is tried on all `views` later.
    """
    least, top = inf, -inf
    for view in views:
        if view.available and view.warmth < least:
            least = view.warmth
        if view.available and view.warmth > top:
            top = view.warmth
    if least >= top:
        return views
    return [
        replace(view, available=False) if view.load >= max(1, round(view.limit * view.warmth / top)) else view
        for view in views
    ]


def _sure(views: Sequence[View]) -> Sequence[View]:
    """Returns `views` with the doubtful backends closed; empty if all or none are doubtful."""
    doubtful = [view.doubtful for view in views]
    if not any(doubtful) or all(doubtful):
        return ()
    return [replace(view, available=False) if doubt else view for view, doubt in zip(views, doubtful, strict=True)]


def _as_probe(
    queued: Queued, placement: Placement, views: Sequence[View], ceiling: float, now: float
) -> Placed | NoCapacity | NoMatch:
    """Returns a placement on a backend that needs a probe, whatever its price, or why there is none.

    Only a probe teaches a placement with learned prices that the backend is fast again. If a backend hung or was slow,
    and has no metrics, its probe must be a stream, because a stream shows early that the request must be retried
    elsewhere.
    """
    stream = queued.request.stream
    # The other backends are passed too, because some checks compare all backends, such as the longest context.
    trial = [
        view if view.probed and (stream or not view.stream_probe) else replace(view, available=False) for view in views
    ]
    return placement.place(queued.request, trial, ceiling, queued.excluded, now)


def _at_only_backend(
    queued: Queued, placement: Placement, views: Sequence[View], ceiling: float, passed_over: int, now: float
) -> Fit | Limited | NoCapacity | NoMatch:
    """Returns a placement on the only backend that may serve the request, even as a probe or in slow start.

    Returns Limited if that backend is full, down or closed to prompts while others have free slots. The request then
    leaves its flow, so that it does not block later requests.
    """
    own = [view for view in views if view.backend == queued.request.backend]
    placed = placement.place(queued.request, own, ceiling, queued.excluded, now)
    if isinstance(placed, NoCapacity) and True in rooms(views, ceiling):
        return Limited(queued, f"{OF_BACKEND}{queued.request.backend}")
    return Fit(queued, placed, passed_over) if isinstance(placed, Placed) else placed


def limited(queued: Queued, limits: UsageLimits) -> Limited | None:
    """Returns the usage limit that is full, so the request must wait; None if no limit of the request is full."""
    limit = limits.full(queued.request) if queued.request.limits else None
    return None if limit is None else Limited(queued, limit)


def passes_over(higher: Iterable[Band], view: View, limits: UsageLimits) -> bool:
    """Returns whether the backend that a lower band gets could serve a waiting request of the `higher` bands.

    Checks the first requests of each flow, at most `INVERSION_LOOK_MAX`. Requests at a usage limit do not count.
    """
    looks = INVERSION_LOOK_MAX
    for band in higher:
        with closing(band.heads()) as waiting:
            for queued in islice(waiting, looks):
                looks -= 1
                if could_serve(queued.request, queued.excluded, view) and limited(queued, limits) is None:
                    return True
    return False


def head(band: Band, now: float) -> Queued:
    """Returns the first request of the first flow."""
    lines = band.lines(now)
    return next(iter(next(lines)))
