"""The next request of a band: the first that fits somewhere, in the order of fairness policy and flow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from llmproxy.core.backends.view import View
from llmproxy.core.domain import DEFAULT, NoCapacity, NoMatch, Placed
from llmproxy.core.placement.policy import NO_CAPACITY, Placement, context_tokens, could_serve
from llmproxy.core.queueing.blocked import OF_BACKEND
from llmproxy.core.queueing.queue import Band, Queued
from llmproxy.core.queueing.usage_limits import UsageLimits

INVERSION_LOOK_MAX = 64
"""Requests of higher bands that are looked at when one of a lower band is granted."""


class Fit(Struct, frozen=True):
    """A request, its backend, and how many earlier requests fitted nowhere."""

    queued: Queued
    placed: Placed
    passed_over: int


class Limited(Struct, frozen=True):
    """The next request, and what it waits for: a usage limit, or its only backend."""

    queued: Queued
    limit: str


class Unmatched:
    """Requests of one band that found no match in this pass. Room only shrinks, so similar ones find none either.

    `later` names a full backend that one of them should wait for, "" for none.
    """

    def __init__(self) -> None:
        self.later = ""
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
) -> Fit | Limited | NoCapacity | None:
    """The next request with its backend, `NoCapacity` where no backend has room, or None where no request can use it.

    `patient` is False where a lower band waits too. Then a request takes the best backend with room instead of waiting
    for a full one, because otherwise the lower band would take that room. It is no probe either while there is room
    elsewhere, because the lower band provides the probe.
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
                # A head that fits nowhere must not block its flow while lower bands are served.
                for queued in line:
                    if (held := limited(queued, limits)) is not None:
                        return held
                    if queued.request.backend is not None:
                        own = _at_only_backend(queued, placement, views, ceiling, passed_over, now)
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
                        now_ready = placement.ready(views, queued.request.band, ceiling, now)
                        placed = placement.place(queued.request, now_ready, ceiling, queued.excluded, now)
                    if isinstance(placed, Placed):
                        return Fit(queued, placed, passed_over)
                    if isinstance(placed, NoCapacity):
                        return placed
                    if placed.later:
                        queued.later = unmatched.later = placed.later
                    else:
                        unmatched.add(queued, placed)
                    passed_over += 1
            finally:
                line.close()
    finally:
        # A policy may return any iterator. One over a heap puts back what it took when it is closed.
        if (close := getattr(flows, "close", None)) is not None:
            close()
    # The requests passed over were not asked about room, and a blocked band must stop the pool.
    return None if any(view.has_room(ceiling) for view in views) else NO_CAPACITY


def _warm(views: Sequence[View]) -> Sequence[View]:
    """`views` without room on backends in slow start that already have their share, if others are warmer.

    Backends that came back together are equally warm. A request that finds no room here is placed in all `views` after.
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
    """`views` without room on doubtful backends; empty where all or none are doubtful."""
    doubtful = [view.doubtful for view in views]
    if not any(doubtful) or all(doubtful):
        return ()
    return [replace(view, available=False) if doubt else view for view, doubt in zip(views, doubtful, strict=True)]


def _as_probe(
    queued: Queued, placement: Placement, views: Sequence[View], ceiling: float, now: float
) -> Placed | NoCapacity | NoMatch:
    """A place on a backend that needs a probe, whatever its price, or why there is none.

    A placement that learns prices from requests learns only from a probe that a backend is healthy again. A backend
    that hung or was slow and has no readings is probed only with a stream, which shows in time that the request must go
    elsewhere.
    """
    stream = queued.request.stream
    # The other backends are included because some checks compare all of them, such as the longest context.
    trial = [
        view if view.probed and (stream or not view.stream_probe) else replace(view, available=False) for view in views
    ]
    return placement.place(queued.request, trial, ceiling, queued.excluded, now)


def _at_only_backend(
    queued: Queued, placement: Placement, views: Sequence[View], ceiling: float, passed_over: int, now: float
) -> Fit | Limited | NoCapacity | NoMatch:
    """A place on the only backend that may serve the request, even a half-open one or one in slow start.

    If it is full, down or takes no prompt yet while others have room, the request is set aside, so that it does not
    block later ones.
    """
    own = [view for view in views if view.backend == queued.request.backend]
    placed = placement.place(queued.request, own, ceiling, queued.excluded, now)
    if isinstance(placed, NoCapacity) and any(view.has_room(ceiling) for view in views):
        return Limited(queued, f"{OF_BACKEND}{queued.request.backend}")
    return Fit(queued, placed, passed_over) if isinstance(placed, Placed) else placed


def limited(queued: Queued, limits: UsageLimits) -> Limited | None:
    """The usage limit for which the next request must wait, if there is one."""
    limit = limits.full(queued.request) if queued.request.limits else None
    return None if limit is None else Limited(queued, limit)


def passes_over(higher: Iterable[Band], view: View, limits: UsageLimits) -> bool:
    """Whether a request of the bands `higher`, for which a backend has room, could have what a lower band is given.

    Looked at are those that a pass looks at, `INVERSION_LOOK_MAX` at most. Who waits for a usage limit could not.
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
    """The first request of the first flow."""
    flow = next(iter(band.fairness.candidates(now)))
    return next(band.first(flow))
