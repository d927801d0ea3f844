"""The current state as one JSON document, built at most once a second for all readers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from gzip import compress
from heapq import nlargest
from itertools import islice
from math import isfinite
from typing import Any

import orjson

from llmproxy import __version__
from llmproxy.core.domain import BackendPace
from llmproxy.core.pools import Pools
from llmproxy.core.snapshot import BackendSnapshot, BackendStatus, FlowSnapshot, PoolSnapshot, Snapshot
from llmproxy.observe.live.events import EJECTED, STATE_EVENTS, Event
from llmproxy.observe.live.minute import KINDS, FlowSums, quantile
from llmproxy.observe.live.recorder import SHARES, Recorder
from llmproxy.observe.live.summary import summary_of

FLOWS_WAITING_MAX = 100  # The maximum number of waiting flows in a document, for all pools together.
FLOWS_MAX = 100  # The maximum number of flows of the last minute in a document.
BACKENDS_MAX = 500
ADAPTERS_MAX = 50
LIMITS_MAX = 100
EVENTS_MAX = 40


class LiveSnapshot:
    """Builds the JSON document of the current second.

    `instance` is the name of this process. `clock` is the clock of the history, and `wall` returns the Unix time.
    `cluster` returns the leader and the members of the cluster; None without a cluster.
    """

    def __init__(
        self, recorder: Recorder, instance: str, clock: Callable[[], float], wall: Callable[[], float],
        cluster: Callable[[], Mapping[str, object] | None] = lambda: None,
    ) -> None:  # fmt: skip
        self._recorder = recorder
        self._instance = instance
        self._clock = clock
        self._wall = wall
        self._cluster = cluster
        self._second = -2
        self._plain = b""
        self._packed: bytes | None = None

    def document(self, *, packed: bool = False) -> bytes:
        """Returns the document as JSON, compressed by gzip if `packed`.

        The result is cached until the history has a new second.
        """
        if self._second != self._recorder.history.last_s or not self._plain:
            self._second = self._recorder.history.last_s
            self._plain, self._packed = dumped(self.content()), None
        if not packed:
            return self._plain
        if self._packed is None:
            self._packed = compress(self._plain, 1)
        return self._packed

    @property
    def epoch_s(self) -> float:
        """The Unix time in seconds at which the history's clock was 0."""
        return self._wall() - self._clock()

    def content(self) -> dict[str, Any]:
        """Returns the document as a dict.

        Durations are in seconds; `now_s` and event times are on the history's clock.
        """
        recorder, now = self._recorder, self._clock()
        pools = recorder.dispatcher.pools
        seen = pools.snapshot(now, FLOWS_WAITING_MAX)
        statuses = recorder.statuses()
        changes = self._changes()
        why = {name: event.why for name, event in changes.items()}
        paces = {pace.backend: pace for learned in pools.learned(now).values() for pace in learned.backends}
        cluster = self._cluster()
        level, text = summary_of(
            seen.pools, statuses, why, dict(recorder.band_names()), recorder.dispatcher.nameless, [*paces.values()],
            minute=recorder.minute.total, led=cluster is None or cluster["leader"] is not None,
        )  # fmt: skip
        minute = recorder.minute
        return {
            "version": __version__,
            "instance": self._instance,
            "now_s": round(now, 3),
            "unix_s": round(self._wall(), 3),
            "second": recorder.history.last_s,
            "summary": {"level": level, "text": text},
            "placement": pools.settings.placement,
            "fairness": pools.settings.fairness,
            "cluster": cluster,
            "minute": {
                "span_s": minute.span_s,
                **{kind: minute.total.kind(kind) for kind in KINDS},
                "outcomes": dict(minute.total.outcomes),
                "retries": minute.total.retries,
                "preemptions": minute.total.preemptions,
            },
            "nameless": recorder.dispatcher.nameless,
            "inversions": recorder.dispatcher.inversions,
            "bands": self._bands(seen, pools.longest_s(now)),
            "pools": [self._pool(pool) for pool in seen.pools],
            "backends": self._backends(seen, statuses, changes, paces, now),
            "more_backends": max(0, len(statuses) - BACKENDS_MAX),
            "flows": self._flows(seen),
            "limits": [_limit(limit) for limit in seen.limits[:LIMITS_MAX]],
            "more_limits": seen.limits_more + max(0, len(seen.limits) - LIMITS_MAX),
            "events": [
                event_fields(event, self.epoch_s) for event in islice(recorder.events.newest_first(), EVENTS_MAX)
            ],
            "row": {name: _rounded(value, 5) for name, value in recorder.history.latest().items() if value == value},
        }

    def _changes(self) -> dict[str, Event]:
        """Maps each backend to the event that began its current state; after repeated ejections, to the first."""
        found: dict[str, Event] = {}
        settled: set[str] = set()
        for event in self._recorder.events.newest_first():
            backend = event.backend
            if backend is None or event.name not in STATE_EVENTS or backend in settled:
                continue
            if event.name != EJECTED:
                settled.add(backend)
            if backend not in found or event.name == EJECTED:
                found[backend] = event
        return found

    def _bands(self, seen: Snapshot, longest_s: Mapping[int, float]) -> list[dict[str, Any]]:
        recorder, total = self._recorder, self._recorder.minute.total
        levels = {*recorder.band_names(), *(band.level for pool in seen.pools for band in pool.bands)}
        shown = []
        for level in sorted(levels, reverse=True):
            name = recorder.band(level)
            parts = [band for pool in seen.pools for band in pool.bands if band.level == level]
            sums = total.band(name)
            shown.append(
                {
                    "band": name,
                    "level": level,
                    "waiting": sum(band.waiting for band in parts),
                    "blocked": sum(sum(band.blocked.values()) for band in parts),
                    "oldest_s": round(longest_s.get(level, 0.0), 3),
                    "grants_per_s": round(recorder.grants_per_s.get(level, 0.0), 2),
                    "reasons": sorted({band.reason for band in parts if band.reason is not None}),
                    "ended": {kind: sums.kinds[kind] for kind in KINDS},
                    "wait_s": _quantiles(sums.wait_s),
                    "ttft_s": _quantiles(sums.ttft_s),
                    "tpot_s": _quantiles(sums.tpot_s),
                    "objectives": {"met": sums.met, "missed": sums.missed},
                }
            )
        return shown

    def _pool(self, pool: PoolSnapshot) -> dict[str, Any]:
        return {
            "pool": pool.pool,
            "alive": pool.alive,
            "held": pool.held,
            "in_flight": pool.leases,
            "being_preempted": pool.preempting,
            "backends": [one.view.backend for one in pool.backends[:BACKENDS_MAX]],
            "bands": [
                {
                    "band": self._recorder.band(band.level),
                    "waiting": band.waiting,
                    "ceiling": _rounded(band.ceiling, 3),
                    "places": band.places,
                    "min_share": band.min_share,
                    "reason": band.reason,
                    "oldest_s": round(max((flow.oldest_age_s for flow in band.shown), default=0.0), 3),
                    "blocked": dict(islice(band.blocked.items(), LIMITS_MAX)),
                    "flows": [_flow(flow) for flow in band.shown],
                    "more_flows": band.flows - len(band.shown),
                }
                for band in pool.bands
            ],
        }

    def _backends(
        self,
        seen: Snapshot,
        statuses: Sequence[BackendStatus],
        changes: dict[str, Event],
        paces: Mapping[str, BackendPace],
        now: float,
    ) -> list[dict[str, Any]]:
        pool_of = {one.view.backend: (pool, one) for pool in seen.pools for one in pool.backends}
        shown = []
        for status in statuses[:BACKENDS_MAX]:
            pool, one = pool_of.get(status.name, (None, None))
            shown.append(self._backend(status, pool, one, paces.get(status.name), changes.get(status.name), now))
        return shown

    def _backend(
        self,
        status: BackendStatus,
        pool: PoolSnapshot | None,
        seen: BackendSnapshot | None,
        pace: BackendPace | None,
        change: Event | None,
        now: float,
    ) -> dict[str, Any]:
        recorder, name = self._recorder, status.name
        view = seen.view if seen is not None else recorder.dispatcher.pools.backends[name].view(now)
        reading, minute = view.reading, recorder.minute
        sums = minute.total.backend(name)
        since_s = max(status.since_s, change.at_s if change is not None else 0.0)
        # While a replica is not up, only tokens since its last change count.
        prompt_s, output_s = minute.tokens_per_s(name, None if status.state == "up" else since_s)
        return {
            "backend": name,
            "url": status.url,
            "role": status.role,
            "source": status.source,
            "state": status.state,
            "why": change.why if change is not None and status.state != "up" else "",
            "since_s": round(now - since_s, 1),
            "pool": pool.pool if pool is not None else None,
            "external": _external(recorder.dispatcher.pools, name, now),
            "in_flight": status.in_flight,
            "load": view.load,
            "limit": view.limit,
            "places": {
                recorder.band(band.level): view.slots(band.ceiling) for band in (pool.bands if pool is not None else ())
            },
            "kv_used": _rounded(view.kv_used, 4) if reading is not None else None,
            "running": reading.running if reading is not None else None,
            "waiting": view.waiting,
            "reading_age_s": round(now - reading.taken_at_s, 2) if reading is not None else None,
            "room_for": [recorder.band(level) for level in seen.room_for] if seen is not None else [],
            "output_tokens_per_s": round(output_s, 1),
            "input_tokens_per_s": round(prompt_s, 1),
            "ended": sums.ends,
            "failed": sums.failures,
            "hit_share": _rounded(sums.cached / sums.prompt, 4) if sums.prompt else None,
            "expected_share": _rounded(sums.expected / sums.prompt, 4) if sums.prompt else None,
            "ttft_s": _rounded(sums.ttft_s, 5),
            "tpot_s": _rounded(sums.tpot_s, 5),
            "prompts_slower": _rounded(pace.prefill_factor, 3) if pace is not None else None,
            "tokens_slower": _rounded(pool.paces.get(name), 3) if pool is not None else None,
            "busy_share": _rounded(pace.busy_share, 3) if pace is not None else None,
            "indexed_share": (
                _rounded(pace.indexed_blocks / pace.indexed_blocks_max, 4)
                if pace is not None and pace.indexed_blocks_max
                else None
            ),
            "models": sorted(view.served)[:ADAPTERS_MAX],
            "adapters": sorted(view.resident)[:ADAPTERS_MAX],
            "adapters_max": view.max_adapters,
        }

    def _flows(self, seen: Snapshot) -> list[dict[str, Any]]:
        """Returns the flows of the last minute and the waiting flows.

        Each has its share of the tokens of its band, and its share of the weights in its band.
        """
        recorder, minute = self._recorder, self._recorder.minute
        total = minute.total
        waiting: dict[tuple[str, str], FlowSnapshot] = {
            (recorder.band(band.level), flow.flow): flow
            for pool in seen.pools
            for band in pool.bands
            for flow in band.shown
        }
        known = {**dict.fromkeys(waiting, FlowSums()), **total.flows}
        weight_of = {key: waiting[key].head.weight if key in waiting else sums.weight for key, sums in known.items()}
        tokens: Counter[str] = Counter()
        weights: dict[str, float] = {}
        for (band, flow), sums in known.items():
            tokens[band] += sums.tokens
            weights[band] = weights.get(band, 0.0) + weight_of[band, flow]
        shown = []
        for band, flow in nlargest(FLOWS_MAX, known, key=lambda key: (key in waiting, known[key].tokens)):
            sums, waits = known[band, flow], waiting.get((band, flow))
            shown.append(
                {
                    "band": band,
                    "flow": flow,
                    "tokens_per_s": round(sums.tokens / minute.span_s, 2),
                    "ended": sums.ends,
                    "share": _rounded(sums.tokens / tokens[band], 4) if tokens[band] else None,
                    "due": _rounded(weight_of[band, flow] / weights[band], 4),
                    "weight": weight_of[band, flow],
                    "waiting": waits.waiting if waits is not None else 0,
                    "oldest_s": round(waits.oldest_age_s, 3) if waits is not None else 0.0,
                    "standing": _standing(waits) if waits is not None else {},
                }
            )
        return shown


def dumped(content: object) -> bytes:
    """Returns `content` as JSON, also if it has names from clients that are not UTF-8."""
    try:
        return orjson.dumps(content)
    except TypeError:
        return json.dumps(content, allow_nan=False).encode()


def _flow(flow: FlowSnapshot) -> dict[str, Any]:
    head = flow.head
    return {
        "flow": flow.flow,
        "waiting": flow.waiting,
        "oldest_s": round(flow.oldest_age_s, 3),
        "standing": _standing(flow),
        "head": {
            "id": head.id,
            "request": head.label,
            "age_s": round(head.age_s, 3),
            "left_s": _rounded(head.left_s, 3),
            "prompt_tokens": head.prompt_tokens,
            "slack_s": _rounded(head.slack_s, 3),
            "weight": head.weight,
        },
    }


def _external(pools: Pools, name: str, now: float) -> dict[str, float] | None:
    """Returns the daily limit of an external backend and the money that is left; None for any other backend."""
    external, left = pools.backends[name].external, pools.money_left(name, now)
    if external is None or left is None:
        return None
    return {"max_per_day": external.max_per_day, "left": round(left, 6)}


def _standing(flow: FlowSnapshot) -> dict[str, float | None]:
    return {name: _rounded(value, 3) for name, value in flow.standing}


def _limit(limit: Any) -> dict[str, Any]:
    return {
        "limit": limit.name,
        "in_flight": limit.in_flight,
        "in_flight_max": limit.in_flight_max,
        "requests_left": _rounded(limit.requests_left, 1),
        "tokens_left": _rounded(limit.tokens_left, 1),
    }


def event_fields(event: Event, epoch_s: float) -> dict[str, Any]:
    """Returns an event as JSON fields. `time` is in UTC (ISO 8601).

    `epoch_s` is the Unix time at which the history's clock was 0.
    """
    at = datetime.fromtimestamp(epoch_s + event.at_s, UTC)
    return {
        "serial": event.serial,
        "time": at.isoformat(timespec="milliseconds"),
        "at_s": round(event.at_s, 3),
        "level": event.level,
        "event": event.name,
        "backend": event.backend,
        "why": event.why,
        "text": event.text,
    }


def _quantiles(buckets: Counter[int]) -> dict[str, float | None]:
    return {name: _rounded(quantile(buckets, share), 5) for name, share in SHARES.items()}


def _rounded(value: float | None, digits: int) -> float | None:
    """Returns a rounded value; None for infinity and NaN, which JSON does not have."""
    return None if value is None or not isfinite(value) else round(value, digits)
