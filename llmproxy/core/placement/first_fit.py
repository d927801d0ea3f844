"""The request of a band that goes next: the first, in the order of fairness and flow, that fits somewhere."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from llmproxy.core.backends.view import View
from llmproxy.core.domain import DEFAULT, NoCapacity, NoMatch, Placed
from llmproxy.core.placement import NO_CAPACITY, Placement, context_tokens
from llmproxy.core.queueing.blocked import OF_BACKEND
from llmproxy.core.queueing.queue import FLOW_LOOK_MAX, Band, Queued
from llmproxy.core.queueing.usage_limits import UsageLimits


class Found(Struct, frozen=True):
    """A request, its backend, and how many before it fitted nowhere."""

    queued: Queued
    placed: Placed
    passed_over: int


class Limited(Struct, frozen=True):
    """A request whose turn it is, and what keeps it waiting all the same: a usage limit, or its only backend."""

    queued: Queued
    limit: str


class Unmatched:
    """Requests of one band that found no match in this pass: room only shrinks, so their like finds none either."""

    def __init__(self) -> None:
        self._from_tokens: dict[tuple[str, frozenset[str]], int] = {}

    def add(self, queued: Queued, why: NoMatch) -> None:
        tokens = 0 if why.whole_model else context_tokens(queued.request)
        self._from_tokens[queued.request.model, queued.excluded] = tokens

    def covers(self, queued: Queued) -> bool:
        if not self._from_tokens:
            return False
        tokens = self._from_tokens.get((queued.request.model, queued.excluded))
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
) -> Found | Limited | NoCapacity | None:
    """Answer the request that goes next, or that nobody has room, or None where the room is of use to none.

    Where a lower band waits too, nobody is `patient`: whoever would rather wait for a backend that is full takes the
    best of those with room, because the lower band would. Nor is anybody then the probe of a backend that is to be
    tried, as long as there is room elsewhere: the lower band is.
    """
    passed_over = 0
    ready = _warm(views)
    trials = [view for view in ready if view.probed]
    if trials:
        ready = [replace(view, available=False) if view.probed else view for view in ready]
    flows = band.fairness.candidates(now)
    try:
        for flow in flows:
            line = band.first(flow)
            try:
                # A head that fits nowhere must not hold up those behind it while lower bands are served.
                for queued in islice(line, FLOW_LOOK_MAX):
                    if (held := limited(queued, limits)) is not None:
                        return held
                    if queued.request.backend is not None:
                        own = _at_its_own(queued, placement, views, ceiling, passed_over, now)
                        if not isinstance(own, NoMatch):
                            return own
                        passed_over += 1
                        continue
                    if unmatched.covers(queued):
                        continue
                    placed = _as_probe(queued, placement, views, ceiling, now) if trials and patient else None
                    if not isinstance(placed, Placed) and queued.request.band > DEFAULT and (some := _sure(ready)):
                        placed = placement.place(queued.request, some, ceiling, queued.excluded, now)
                    if not isinstance(placed, Placed):
                        placed = placement.place(queued.request, ready, ceiling, queued.excluded, now)
                    if ready is not views and not isinstance(placed, Placed):
                        placed = placement.place(queued.request, views, ceiling, queued.excluded, now)
                    if isinstance(placed, NoMatch) and placed.later and not patient:
                        roomy = [view for view in views if view.has_room(ceiling)]
                        placed = placement.place(queued.request, roomy, ceiling, queued.excluded, now)
                    if isinstance(placed, Placed):
                        return Found(queued, placed, passed_over)
                    if isinstance(placed, NoCapacity):
                        return placed
                    if not placed.later:
                        unmatched.add(queued, placed)
                    passed_over += 1
            finally:
                line.close()
    finally:
        # A policy may answer any iterator; one that looks along a heap puts back what it took when it is closed.
        if (close := getattr(flows, "close", None)) is not None:
            close()
    # Those passed over were not asked about room, and a band that is blocked must stop the pool.
    return None if any(view.has_room(ceiling) for view in views) else NO_CAPACITY


def _warm(views: Sequence[View]) -> Sequence[View]:
    """`views` without room on those that came back lately and have their share by now, beside those that are warmer.

    Where all came back together, all are as warm. Who finds no room elsewhere is not held up: `views` has it.
    """
    warmths = {view.warmth for view in views if view.available}
    if len(warmths) < 2:
        return views
    top = max(warmths)
    return [
        replace(view, available=False) if view.load >= max(1, round(view.limit * view.warmth / top)) else view
        for view in views
    ]


def _sure(views: Sequence[View]) -> Sequence[View]:
    """`views` without room where it is not known that one more would run at once; empty where that is known of all."""
    doubtful = [view.doubtful for view in views]
    if not any(doubtful) or all(doubtful):
        return ()
    return [replace(view, available=False) if doubt else view for view, doubt in zip(views, doubtful, strict=True)]


def _as_probe(
    queued: Queued, placement: Placement, views: Sequence[View], ceiling: float, now: float
) -> Placed | NoCapacity | NoMatch:
    """A place on a backend that is to be tried, whatever it costs there, or why there is none.

    A placement that learns its prices from requests would never learn that a backend is well again without one. What
    is silent or slow is tried with a stream alone: only of a stream is it seen in time that it has to go elsewhere.
    """
    stream = queued.request.stream
    # The others are there for what is compared among all, such as the longest context.
    trial = [
        view if view.probed and (stream or not view.stream_probe) else replace(view, available=False) for view in views
    ]
    return placement.place(queued.request, trial, ceiling, queued.excluded, now)


def _at_its_own(
    queued: Queued, placement: Placement, views: Sequence[View], ceiling: float, passed_over: int, now: float
) -> Found | Limited | NoCapacity | NoMatch:
    """A place on the only backend that may have it, be that a probe or one that came back lately.

    Where that one is full or down and others have room, the request steps aside: it would hide those behind it.
    """
    own = [view for view in views if view.backend == queued.request.backend]
    placed = placement.place(queued.request, own, ceiling, queued.excluded, now)
    if isinstance(placed, NoCapacity) and any(view.has_room(ceiling) for view in views):
        return Limited(queued, f"{OF_BACKEND}{queued.request.backend}")
    return Found(queued, placed, passed_over) if isinstance(placed, Placed) else placed


def limited(queued: Queued, limits: UsageLimits) -> Limited | None:
    """The usage limit that keeps a request waiting whose turn it is, if one does."""
    limit = limits.full(queued.request) if queued.request.limits else None
    return None if limit is None else Limited(queued, limit)


def head(band: Band, now: float) -> Queued:
    """The first request of the first flow."""
    flow = next(iter(band.fairness.candidates(now)))
    return next(band.first(flow))
