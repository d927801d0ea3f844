"""Admits, refuses and sheds the requests of one pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Protocol

from llmproxy.core.backends.backend import Backend
from llmproxy.core.backends.view import View
from llmproxy.core.domain import AdmissionKind, Drop, Outcome, Refused, Request, Slo
from llmproxy.core.estimates.line import FirstToken
from llmproxy.core.policy_registry import Faults
from llmproxy.core.queueing.headroom import Headroom
from llmproxy.core.queueing.occupancy import DrainRate
from llmproxy.core.queueing.ordering import orderings
from llmproxy.core.queueing.queue import Queued, head_rank
from llmproxy.core.queueing.usage_limits import UsageLimits
from llmproxy.core.queueing.waiting_room import WaitingRoom
from llmproxy.core.settings import Settings

ARRIVALS = frozenset({AdmissionKind.NEW, AdmissionKind.RESUMED})  # Kinds of requests that were not in the room before.

Ready = Callable[[Sequence[View], int, float, float], Sequence[View]]
"""Filters views to the backends that can accept a request of this band now: (views, band, ceiling, now); see
`Placement.ready`."""


class Takes(Protocol):
    """The external backends, which can take a request while no backend of its pool can."""

    def takes(self, request: Request, excluded: frozenset[str], now: float) -> bool: ...

    def knows(self, model: str) -> bool: ...


SHED_MAX = 64  # Maximum number of requests that are shed for a single request of a higher band.
RETRY_EMPTY_S = 2.0  # `Retry-After` while no backend is up: about the time until a poll finds a backend up again.


class Admission:
    """Admits requests to the waiting room `room`. All arguments but `settings` are shared with the scheduler."""

    def __init__(
        self,
        settings: Settings,
        backends: Mapping[str, Backend],
        room: WaitingRoom,
        headroom: Headroom,
        limits: UsageLimits,
        drain: DrainRate,
        first_token: FirstToken,
        ready: Ready,
        faults: Faults,
    ) -> None:
        self._settings = settings
        self._backends = backends
        self._room = room
        self._headroom = headroom
        self._ready = ready
        self._limits = limits
        self._drain = drain
        self._first_token = first_token
        self._faults = faults
        self.overflow: Takes | None = None
        self._ordering = orderings.get(settings.ordering)(settings)

    def reconfigure(self, settings: Settings) -> None:
        """Applies other settings. The ordering policy stays, because waiting requests were ranked by it."""
        self._settings = settings

    def enter(self, request: Request, excluded: frozenset[str], entry: AdmissionKind, now: float) -> list[Drop]:
        """Admits a request, and returns the requests that were shed for it. Raises Refused, and then changes nothing.

        Limits are not checked again for a request that comes back after a failed attempt or a preemption, or that
        another scheduler admitted: such requests are few, and a refusal would defeat the retry. When a total limit is
        reached, the newest requests of the lowest band are shed for a request of a higher band.
        """
        excluded, on_hold = self._servable(request, excluded, entry, now)
        service_s = self._first_token.at(request.prompt_tokens)
        # Custom policies may raise, also while a band is created, so both calls come before any change.
        first = entry is AdmissionKind.PREEMPTED or request.continued
        rank = head_rank(request) if first else self._ordering.rank(request, service_s)
        band = self._room.bands[request.band]
        shed: list[Drop] = []
        if entry is AdmissionKind.NEW:
            if request.slo is not None and self._settings.refuse_late:
                self._refuse_late(request, request.slo, service_s, now)
            victims = () if self._room.full(request) is None else self._victims(request, now)
            if request.limits:
                self._limits.admit(request, now)
            if victims:
                shed = [self._shed(victim, now) for victim in victims]
        if entry in ARRIVALS:
            if band.on_entered is not None and not request.continued:
                self._faults.notify(band.on_entered, request, now)
            self._headroom.used(request.band, now)
        else:
            self._drain.forget(request.id)
        self._room.enter(request, rank, excluded, now, on_hold=on_hold)
        return shed

    def _servable(
        self, request: Request, excluded: frozenset[str], entry: AdmissionKind, now: float
    ) -> tuple[frozenset[str], bool]:
        """Returns (backends that the request must not use, whether the request is held until a backend is up).

        The set is `excluded` plus `request.avoid`, or only `excluded` if no other backend is up. For a held request,
        the set leaves out excluded backends that are down but may come back. Raises Refused if no backend can take the
        request, and the request is not held.
        """
        if request.backend is not None:
            return excluded, self._waits_for_own_backend(request, request.backend)
        for names in (excluded | {request.avoid}, excluded) if request.avoid else (excluded,):
            for backend in self._backends.values():
                if request.model in backend.served and backend.up and backend.name not in names:
                    return names, False
        able = [backend for backend in self._backends.values() if request.model in backend.served]
        if entry is AdmissionKind.OWNER_LOOKUP:
            # The request refers to state, such as a stored response, that was lost with a process that is gone.
            able = [backend for backend in able if not backend.health.gone and backend.name not in excluded]
        unavailable = {backend.name for backend in able if backend.drained or not backend.health.available(now)}
        if unavailable and self._settings.queue.no_backend_wait_s:
            return excluded - unavailable, True
        if self.overflow is not None:
            if self.overflow.takes(request, excluded, now):
                return excluded, False
            if not (able or excluded) and self._settings.queue.no_backend_wait_s and self.overflow.knows(request.model):
                # No replica lists the model yet, and this request must wait for one.
                return excluded, True
        if excluded:
            raise _all_failed(request, RETRY_EMPTY_S)
        message = f"No backend of `{request.model}` is up. Try again shortly."
        raise Refused(Outcome.REJECTED_NO_BACKENDS, message, RETRY_EMPTY_S)

    def _waits_for_own_backend(self, request: Request, name: str) -> bool:
        """Returns whether a request bound to the backend `name` is held until that backend is up.

        Returns False if the backend is up. Raises Refused if the backend has lost the state to which the request
        refers, or if it is down and requests are not held.
        """
        backend = self._backends.get(name)
        if backend is None or backend.health.gone or request.model not in backend.served:
            raise _lost_reference(request)
        if not backend.up and not self._settings.queue.no_backend_wait_s:
            message = "The backend that stores the response to which this request refers is not up. Try again shortly."
            raise Refused(Outcome.REJECTED_NO_BACKENDS, message, RETRY_EMPTY_S)
        return not backend.up

    def _refuse_late(self, request: Request, slo: Slo, service_s: float, now: float) -> None:
        if slo.ttft_s is None:
            return
        ceiling = self._headroom.ceiling(request.band, now)
        able = [one.view(now) for one in self._backends.values() if request.backend in (None, one.name)]
        seen = self._headroom.views_for(request.band, able, now)
        room_s = 0.0 if self._ready(seen, request.band, ceiling, now) else self._drain.interval_s(now) or 0.0
        late_s = now + room_s + service_s - request.arrived_s - slo.ttft_s
        if late_s > 0.0:
            message = (
                f"The first token is due within {slo.ttft_s:g} s and would come {late_s:.2f} s late even if"
                " this request were served next. Try elsewhere, or later."
            )
            retry_after_s = self._drain.retry_after_s(self._room.ahead_of(request.band), now)
            raise Refused(Outcome.REJECTED_DEADLINE, message, retry_after_s)

    def _victims(self, request: Request, now: float) -> list[Queued]:
        """Returns the requests to shed so that `request` fits. Raises Refused if shedding cannot help."""
        victims: list[Queued] = []
        with closing(self._room.newest_below(request.band)) as below:
            while (full := self._room.full(request, victims)) is not None:
                victim = next(below, None) if full.total and len(victims) < SHED_MAX else None
                if victim is None:
                    message = f"The queue is full: {full.name} ({full.limit}) is reached. Try again later."
                    retry_after_s = self._drain.retry_after_s(self._room.ahead_of(request.band), now)
                    raise Refused(Outcome.REJECTED_CAPACITY, message, retry_after_s)
                victims.append(victim)
        return victims

    def _shed(self, victim: Queued, now: float) -> Drop:
        waited = self._room.leave(victim)
        return Drop(victim.request, Outcome.SHED, self._drain.retry_after_s(len(self._room), now), waited)


def _lost_reference(request: Request) -> Refused:
    message = f"The response to which this request refers is lost: no backend of `{request.model}` stores it any more."
    return Refused(Outcome.BAD_REQUEST, message)


def _all_failed(request: Request, retry_after_s: float) -> Refused:
    message = f"Every backend of `{request.model}` that is up has failed this request."
    return Refused(Outcome.REJECTED_NO_BACKENDS, message, retry_after_s)


def refusal(drop: Drop) -> Refused:
    """Returns the error for the client of a request that was dropped from the waiting room."""
    if drop.outcome is Outcome.EXPIRED_NO_BACKENDS:
        message = f"No backend of `{drop.request.model}` came up before the request's time to wait was over."
    elif drop.outcome is Outcome.BAD_REQUEST:
        return _lost_reference(drop.request)
    elif drop.outcome is Outcome.REJECTED_NO_BACKENDS:
        return _all_failed(drop.request, drop.retry_after_s)
    elif drop.outcome is Outcome.EXPIRED:
        message = "The request's time to wait in the queue was over before a backend had room. Try again later."
    else:
        message = "The request was removed from the queue to make room for one of higher priority. Try again later."
    return Refused(drop.outcome, message, drop.retry_after_s)
