"""Snapshots for operators: waiting requests, the reasons why they wait, and the free slots of the backends.

The cost of a snapshot is proportional to the flows shown (at most FLOWS_MAX per band), not to the waiting requests.
Reading the order of flows may make the policy `slo` update itself a little earlier.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice

from llmproxy.core.backends.view import View
from llmproxy.core.domain import Explained, Learned, Waited, WaitReason
from llmproxy.core.estimates.line import FirstToken
from llmproxy.core.placement.policy import Placement
from llmproxy.core.queueing.headroom import Headroom
from llmproxy.core.queueing.queue import FLOW_LOOK_MAX, Band, Queued
from llmproxy.core.queueing.waiting_room import WaitingRoom
from llmproxy.core.settings import Settings

FLOWS_MAX = 100  # Maximum number of flows shown per band, in the order of the fairness policy.
TOTAL_FLOWS_MAX = 1_000  # Maximum number of flows shown over all pools.

LIMITS_MAX = 1_000  # Maximum number of usage limits shown; limits with the most requests in flight come first.


EXTERNAL = "external"
"""The role of an external backend."""


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """The state of a backend, as `/admin/backends` shows it."""

    name: str
    url: str
    role: str
    source: str  # Where the address of the backend was found: the configuration or a discovery source.
    state: str  # Administrative or health state.
    in_flight: int
    since_s: float  # Time of its joining, leaving, or last drain, undrain or readiness change, on the loop's clock.


@dataclass(frozen=True, slots=True)
class HeadSnapshot:
    """The first waiting request of a flow. Times are in seconds."""

    id: str
    label: str
    age_s: float
    left_s: float  # Seconds that it may still wait.
    prompt_tokens: int
    # Objective for the first token, less the wait so far and the expected time to the first token. Negative: it will be
    # late. None without such an objective.
    slack_s: float | None
    weight: float  # Weight of the request's flow among the flows of its band.


@dataclass(frozen=True, slots=True)
class FlowSnapshot:
    """The number of waiting requests of a flow, the first of them, and the flow's account."""

    flow: str
    waiting: int
    oldest_age_s: float  # Largest age among the first FLOW_LOOK_MAX requests, in seconds.
    head: HeadSnapshot
    standing: tuple[tuple[str, float], ...]  # Counters of the fairness policy.


@dataclass(frozen=True, slots=True)
class BandSnapshot:
    """The ceiling, the minimum share and the waiting requests of one band of a pool."""

    level: int
    ceiling: float
    min_share: float
    waiting: int  # Requests in flows and rests of streams, without the blocked ones.
    blocked: Mapping[str, int]  # Usage limit or backend -> number of requests that it blocks.
    flows: int  # Flows with waiting requests.
    shown: tuple[FlowSnapshot, ...]  # The first flows in the order of the fairness policy.
    places: int = 0  # Slots of the available backends for this band and lower bands; the rest is for higher bands.
    reason: WaitReason | None = None  # Why the first request waits; None if none waits.
    continued: int = 0  # Number of rests of broken streams in `waiting`. They go before all flows.


@dataclass(frozen=True, slots=True)
class BackendSnapshot:
    """The state of a backend, and the bands whose requests it would accept now."""

    view: View
    room_for: tuple[int, ...]  # Bands whose requests the backend would accept now.


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """The waiting requests and the backends of a pool."""

    pool: str
    alive: bool  # Whether a backend is up.
    held: bool  # Whether no backend is up, and requests are held until one is.
    leases: int  # Number of leases on replicas, which are the requests in flight there.
    preempting: int  # Leases that are being preempted.
    bands: tuple[BandSnapshot, ...]
    backends: tuple[BackendSnapshot, ...]
    # Backend -> its time for the same work relative to the pool; see `OutlierDetection.paces`.
    paces: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LimitSnapshot:
    """The present use of one usage limit of a tenant or model."""

    name: str
    in_flight: int
    in_flight_max: int | None
    requests_left: float | None  # Requests left of the rate per minute; None without such a rate.
    tokens_left: float | None  # Tokens left of the rate per minute; None without such a rate.


@dataclass(frozen=True, slots=True)
class Snapshot:
    pools: tuple[PoolSnapshot, ...]
    limits: tuple[LimitSnapshot, ...]
    limits_more: int  # Number of usage limits that are left out.


@dataclass(frozen=True, slots=True)
class PoolChoices:
    """The last placement decisions of a pool with their prices, for `/debug/explain`."""

    pool: str
    choices: tuple[Explained, ...]  # The newest first.
    learned: Learned | None  # Learned speeds of the pool and its backends; None if the placement learns none.


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a waiting request in the queue."""

    pool: str
    id: str
    label: str
    band: int
    flow: str
    ahead_in_bands: int  # Requests in the flows of higher bands of the pool, without the blocked ones.
    # Requests ahead of it in its flow, or in the queue of `blocked_by`; None if there are too many to count.
    ahead_in_flow: int | None
    waited_s: float
    left_s: float
    blocked_by: str | None  # The usage limit or the backend that blocks the request; None if it is not blocked.
    waited: Waited | None


@dataclass(frozen=True, slots=True)
class PoolInspector:
    """Creates the snapshots of one pool from the state of its scheduler at `now`."""

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
        """Returns the snapshot of the pool with at most `flows_max` flows, from the highest band down."""
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
        held = not alive and self.settings.queue.no_backend_wait_s > 0.0
        return PoolSnapshot(self.pool, alive, held, leases, preempting, tuple(bands), tuple(backends))

    def _reason(
        self,
        band: BandSnapshot,
        bands: Sequence[BandSnapshot],
        views: Sequence[View],
        ready: Mapping[int, Sequence[View]],
        alive: bool,
    ) -> WaitReason | None:
        if not band.waiting:
            return None
        if not alive:
            return WaitReason.NO_BACKEND
        if any(other.waiting and other.level > band.level for other in bands):
            return WaitReason.HIGHER_BAND
        if ready.get(band.level):
            return WaitReason.NO_MATCH
        if any(view.has_room(band.ceiling) for view in views):
            # The last slots of a pool may be reserved for higher bands too.
            return WaitReason.PROMPTS if band.level in ready else WaitReason.CEILING
        return WaitReason.CEILING if any(view.has_room(1.0) for view in views) else WaitReason.FULL

    def position(self, queued: Queued) -> Position:
        request = queued.request
        return Position(
            pool=self.pool,
            id=request.id,
            label=request.label,
            band=request.band,
            flow=request.flow,
            ahead_in_bands=sum(self.room.bands[level].size for level in self.room.levels() if level > request.band),
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
        band = self.room.bands[level]
        with closing(_candidates(band, self.now)) as flows:
            names = list(islice(flows, flows_max))
        shown = tuple(self._flow(band, name) for name in names)
        return BandSnapshot(level, ceiling, min_share, band.size, blocked, band.flows, shown, continued=band.continued)

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


def _candidates(band: Band, now: float) -> Generator[str, None, None]:
    # Policies may return any iterator, but only a generator can be closed.
    yield from band.fairness.candidates(now)
