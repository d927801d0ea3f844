"""Snapshots for operators: what waits, why it waits, and which backends have room.

A snapshot costs what it shows, not what waits: at most `FLOWS_MAX` flows of each band, and the first requests of each.
A fairness policy is asked for its order as in a decision. One that updates itself when asked (`locality_fair_share`)
may do so a little earlier; its bounds hold at any time.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice

from llmproxy.core.backends.view import View
from llmproxy.core.domain import Explained, Learned, Reason, Waited
from llmproxy.core.estimates.line import FirstToken
from llmproxy.core.placement.policy import Placement
from llmproxy.core.queueing.headroom import Headroom
from llmproxy.core.queueing.queue import FLOW_LOOK_MAX, Band, Queued
from llmproxy.core.queueing.waiting_room import WaitingRoom
from llmproxy.core.settings import Settings

FLOWS_MAX = 100
"""Flows shown of one band, those first that its fairness policy prefers."""
TOTAL_FLOWS_MAX = 1_000
"""Flows shown over all pools; a process with more shows a part, and says so."""

LIMITS_MAX = 1_000
"""Usage limits shown, those first that most is in flight under."""


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """One backend as an operator sees it.

    `role` is what it is meant to compute, `source` says where its address comes from, `state` is its administrative or
    health state. `since_s` is the time, on the clock of the loop, when it joined or was last drained or undrained.
    `group` is the group of replicas that an autoscaler scales as one.
    """

    name: str
    url: str
    role: str
    source: str
    state: str
    in_flight: int
    since_s: float
    group: str | None = None


@dataclass(frozen=True, slots=True)
class HeadSnapshot:
    """The first request of a flow. `left_s` is how long it may still wait, `weight` the share of the flow.

    `slack_s` is what its objective for the first token leaves after the time waited and the expected service; below 0
    it will be late. None without such an objective.
    """

    id: str
    label: str
    age_s: float
    left_s: float
    prompt_tokens: int
    slack_s: float | None
    weight: float


@dataclass(frozen=True, slots=True)
class FlowSnapshot:
    """`oldest_age_s` is that of its first `FLOW_LOOK_MAX` requests; `standing` what the fairness policy holds of it."""

    flow: str
    waiting: int
    oldest_age_s: float
    head: HeadSnapshot
    standing: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class BandSnapshot:
    """`waiting` counts requests in flows, `blocked` those beside them, by the usage limit that they wait for.

    `flows` is how many flows wait, `shown` the first of them in the order in which the policy would take them.
    `reason` says why the first of them waits, None while nobody waits in a flow. `places` is how many sequences of the
    band and those below it the available backends take, the rest is kept for higher bands.
    """

    level: int
    ceiling: float
    min_share: float
    waiting: int
    blocked: Mapping[str, int]
    flows: int
    shown: tuple[FlowSnapshot, ...]
    places: int = 0
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class BackendSnapshot:
    """One backend, and the bands (`room_for`) of which it would take one more request now."""

    view: View
    room_for: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """One pool. `held` says that it has no backend that is up, and that what waits is kept until one is.

    `leases` are the requests in flight, `preempting` those of them that were asked to give their room back. `paces` are
    as in `OutlierDetection.paces`.
    """

    pool: str
    alive: bool
    held: bool
    leases: int
    preempting: int
    bands: tuple[BandSnapshot, ...]
    backends: tuple[BackendSnapshot, ...]
    paces: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LimitSnapshot:
    """One usage limit: requests in flight under it, the most it allows, and what is left of its rates now."""

    name: str
    in_flight: int
    in_flight_max: int | None
    requests_left: float | None
    tokens_left: float | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All of them; `limits_more` usage limits are left out."""

    pools: tuple[PoolSnapshot, ...]
    limits: tuple[LimitSnapshot, ...]
    limits_more: int


@dataclass(frozen=True, slots=True)
class PoolChoices:
    """The last choices of a backend in one pool, the newest first, and what they rest on; `learned` is None where a
    placement has no prices."""

    pool: str
    choices: tuple[Explained, ...]
    learned: Learned | None


@dataclass(frozen=True, slots=True)
class Position:
    """Where one waiting request stands.

    `ahead_in_bands` requests wait in higher bands of its pool, `ahead_in_flow` before it in its flow, or in its line
    where it is `blocked_by` a usage limit or its backend; None where they are too many to count. `waited` says why.
    """

    pool: str
    id: str
    label: str
    band: int
    flow: str
    ahead_in_bands: int
    ahead_in_flow: int | None
    waited_s: float
    left_s: float
    blocked_by: str | None
    waited: Waited | None


@dataclass(frozen=True, slots=True)
class Look:
    """A look at one pool at the time `now`: what a scheduler has, for the functions of this module."""

    pool: str
    now: float
    settings: Settings
    room: WaitingRoom
    headroom: Headroom
    placement: Placement
    first_token: FirstToken

    def shown(
        self, views: Sequence[View], *, alive: bool, leases: int, preempting: int, flows_max: int
    ) -> PoolSnapshot:
        """The pool; at most `flows_max` flows are shown, the highest bands first."""
        levels = sorted({*self.room.order, *self.settings.ceilings}, reverse=True)
        blocked = self.room.blocked.counts()
        bands = []
        for level in levels:
            of_band = {limit: count for (band, limit), count in blocked.items() if band == level}
            bands.append(self._band(level, of_band, min(FLOWS_MAX, flows_max)))
            flows_max -= len(bands[-1].shown)
        ready = {
            level: self.placement.ready(
                self.headroom.views_for(level, views, self.now), level, self.headroom.ceiling(level, self.now), self.now
            )
            for level in levels
            if not self.headroom.keeps_slot(level, views, self.now)
        }
        backends = [BackendSnapshot(view, tuple(level for level in ready if view in ready[level])) for view in views]
        bands = [
            replace(
                band,
                places=self.headroom.places(band.level, views, self.now),
                reason=self._reason(band, bands, views, ready, alive),
            )
            for band in bands
        ]
        held = not alive and self.settings.queue.hold_s > 0.0
        return PoolSnapshot(self.pool, alive, held, leases, preempting, tuple(bands), tuple(backends))

    def _reason(
        self,
        band: BandSnapshot,
        bands: Sequence[BandSnapshot],
        views: Sequence[View],
        ready: Mapping[int, Sequence[View]],
        alive: bool,
    ) -> Reason | None:
        if not band.waiting:
            return None
        if not alive:
            return Reason.NO_BACKEND
        if any(other.waiting and other.level > band.level for other in bands):
            return Reason.HIGHER_BAND
        if ready.get(band.level):
            return Reason.NO_MATCH
        if any(view.has_room(band.ceiling) for view in views):
            # The last slots of a pool may be kept for higher bands too.
            return Reason.PROMPTS if band.level in ready else Reason.CEILING
        return Reason.CEILING if any(view.has_room(1.0) for view in views) else Reason.FULL

    def position(self, queued: Queued) -> Position:
        request = queued.request
        return Position(
            pool=self.pool,
            id=request.id,
            label=request.label,
            band=request.band,
            flow=request.flow,
            ahead_in_bands=sum(self.room.band(level).size for level in self.room.levels() if level > request.band),
            ahead_in_flow=self.room.before(queued),
            waited_s=self.now - request.arrived_s,
            left_s=self.room.deadlines.left_s(queued, self.now),
            blocked_by=queued.blocked_by,
            waited=self.room.waited(queued),
        )

    def _band(self, level: int, blocked: Mapping[str, int], flows_max: int) -> BandSnapshot:
        ceiling, min_share = self.headroom.ceiling(level, self.now), self.settings.min_shares.get(level, 0.0)
        if level not in self.room.order:
            return BandSnapshot(level, ceiling, min_share, 0, blocked, 0, ())
        band = self.room.band(level)
        with closing(_offered(band, self.now)) as flows:
            names = list(islice(flows, flows_max))
        shown = tuple(self._flow(band, name) for name in names)
        return BandSnapshot(level, ceiling, min_share, band.size, blocked, band.flows, shown)

    def _flow(self, band: Band, flow: str) -> FlowSnapshot:
        with closing(band.first(flow)) as line:
            first = list(islice(line, FLOW_LOOK_MAX))
        oldest_age_s = self.now - min(queued.request.arrived_s for queued in first)
        return FlowSnapshot(
            flow, band.waiting_in(flow), oldest_age_s, self._head(first[0]), band.fairness.standing(flow)
        )

    def _head(self, queued: Queued) -> HeadSnapshot:
        request = queued.request
        age_s, slack_s = self.now - request.arrived_s, None
        if request.slo is not None and request.slo.ttft_s is not None:
            slack_s = request.slo.ttft_s - age_s - self.first_token.at(request.prompt_tokens)
        left_s = self.room.deadlines.left_s(queued, self.now)
        return HeadSnapshot(request.id, request.label, age_s, left_s, request.prompt_tokens, slack_s, request.weight)


def _offered(band: Band, now: float) -> Generator[str, None, None]:
    # Policies may answer any iterator; only a generator can be closed, which is what ends the looking.
    yield from band.fairness.candidates(now)
