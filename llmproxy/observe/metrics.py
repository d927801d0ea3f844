"""All metrics of the proxy; `docs/reference/metrics.md` explains each.

Most counters and histograms change when a request ends. Most gauges are computed from `LiveState` at a scrape, so that
they agree with the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from llmproxy import __version__
from llmproxy.core.domain import Trouble, Verdict
from llmproxy.core.scaling.need import Need
from llmproxy.observe import logs
from llmproxy.observe.exit import UNKNOWN_MODEL
from llmproxy.observe.exit_fields import exit_recorder
from llmproxy.observe.series import SeriesCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

LABELS_MAX = 200
"""The maximum number of values of the labels `model`, `tenant` and `limit`, and of `pool` in `replica_start_seconds`.

Further values count as `other`, which is one of these values.
"""

OTHER = "other"

WAIT_BUCKETS_S = (0.001, 0.005, 0.02, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TTFT_BUCKETS_S = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0)
TOKEN_BUCKETS_S = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
GAP_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
REQUEST_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1800.0)
START_BUCKETS_S = (5.0, 10.0, 20.0, 40.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0, 1200.0, 1800.0)
DECISION_BUCKETS_S = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)


@dataclass(frozen=True, slots=True)
class QueueState:
    """The waiting requests of one band and their body bytes. `longest_s` is how long the oldest has waited."""

    band: str
    requests: int
    bytes: int
    longest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class BackendState:
    """A backend at a scrape. A value from the engine is None before the first scrape, and if it is stale."""

    backend: str
    in_flight: int
    limit: int
    saturation: float  # Load divided by `limit`; 1 is full.
    available: bool
    drained: bool = False
    running: int | None = None
    waiting: int | None = None
    kv_used: float | None = None  # 0..1
    reading_age_s: float | None = None  # Since the last successful scrape began, also if its values are stale.
    ejected: bool = False
    down: bool = False
    pool: str = ""  # "" before the first model list.
    day_left: float | None = None  # The money that an external backend may still cost today; None for others.


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The state of the cluster, as one member sees it."""

    leads: bool  # Whether this member is the leader.
    led: bool  # Whether there is a leader that this member can ask.
    epoch: int  # The number of the leader's term.
    members: int  # The number of members that the leader knows.
    changes: int  # How often this member began to lead or to follow.
    gap_s: float | None  # The seconds without a leader before the current leader.
    lock_away: bool  # Whether the lock of the cluster does not answer.


@dataclass(frozen=True, slots=True)
class LiveState:
    """The state from which the gauges are computed at a scrape."""

    queues: tuple[QueueState, ...] = ()
    blocked: Mapping[str, int] = field(default_factory=dict)  # Usage limit or backend -> requests that it blocks.
    backends: tuple[BackendState, ...] = ()
    buffered_body_bytes: int = 0
    work_s: Mapping[str, float] = field(default_factory=dict)  # Pool -> seconds of queued work.
    inversions: int = 0  # Priority inversions since the start.
    needs: Mapping[str, Need] = field(default_factory=dict)  # Pool -> needed replicas.
    cluster: ClusterState | None = None


_BACKEND_GAUGES: tuple[tuple[str, str, Callable[[BackendState], float | None]], ...] = (
    ("in_flight_requests", "Requests sent to the backend and not ended.", lambda b: b.in_flight),
    ("backend_saturation", "Load over limit; 1 is full.", lambda b: b.saturation),
    ("backend_limit", "Requests the backend is thought to run at once.", lambda b: b.limit),
    ("backend_available", "1 while the backend is healthy and may be given work.", lambda b: b.available),
    ("backend_drained", "1 while the backend is drained, leaving or not ready.", lambda b: b.drained),
    ("backend_ejected", "1 while outlier detection has ejected the backend, half open included.", lambda b: b.ejected),
    ("backend_down", "1 while polls find that the backend does not answer, or is unhealthy.", lambda b: b.down),
    ("backend_running", "Requests running in the engine, by the last scrape.", lambda b: b.running),
    ("backend_waiting", "Requests waiting in the engine, by the last scrape.", lambda b: b.waiting),
    ("backend_kv_used_ratio", "KV cache in use, 0 to 1, by the last scrape.", lambda b: b.kv_used),
    ("external_day_left", "Money that an external backend may still cost today.", lambda b: b.day_left),
    ("backend_reading_age_seconds", "Time since the last scrape of the engine began.", lambda b: b.reading_age_s),
)


class _LiveCollector(Collector):
    """Exports the gauges. Also drops the series of removed backends: each new address would add some without end.

    The series are not dropped at the removal, because the records of the last requests come later.
    """

    def __init__(self, state: Callable[[], LiveState], series: SeriesCollector) -> None:
        self._state = state
        self._series = series

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        state = self._state()
        self._series.keep("backend", {one.backend for one in state.backends})
        return _gauges(state)

    def describe(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        # Registering asks for the names, and the state may not exist yet at that time.
        return _gauges(LiveState(cluster=ClusterState(False, False, 0, 0, 0, 0.0, False)))


def _gauges(state: LiveState) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
    queues = state.queues
    yield _gauge("queued_requests", "Requests waiting for a backend.", "band", ((q.band, q.requests) for q in queues))
    yield _gauge("queued_bytes", "Body bytes of waiting requests.", "band", ((q.band, q.bytes) for q in queues))
    longest_text = "How long a request of the band has waited at most."
    yield _gauge("oldest_waiting_seconds", longest_text, "band", ((q.band, q.longest_s) for q in queues))
    yield _gauge("queue_backlog_seconds", "Seconds of work that wait for the pool.", "pool", state.work_s.items())
    yield from _scale(state.needs)
    inversions_text = "Grants that a waiting request of a higher band could have had."
    yield CounterMetricFamily("llmproxy_priority_inversions", inversions_text, value=state.inversions)
    held_text = "Body bytes that arrive, wait or were sent out."
    yield GaugeMetricFamily("llmproxy_buffered_body_bytes", held_text, value=state.buffered_body_bytes)
    yield _gauge(
        "blocked_requests", "Requests blocked by a usage limit or their only backend.", "limit", _most(state.blocked)
    )
    for name, text, value_of in _BACKEND_GAUGES:
        yield _gauge(name, text, "backend", ((one.backend, value_of(one)) for one in state.backends))
    info_text = "Always 1; the pool of the backend is in the label."
    info = GaugeMetricFamily("llmproxy_backend_info", info_text, labels=["backend", "pool"])
    for one in state.backends:
        info.add_metric([one.backend, one.pool], 1)
    yield info
    if state.cluster is not None:
        yield from _cluster(state.cluster)


_CLUSTER_GAUGES: tuple[tuple[str, str, Callable[[ClusterState], float | None]], ...] = (
    ("leader", "1 at the member that schedules for the cluster.", lambda one: one.leads),
    ("has_leader", "1 while there is a leader that this member can ask.", lambda one: one.led),
    ("epoch", "The epoch: the number of the leader's term, which only rises.", lambda one: one.epoch),
    ("members", "Members that the leader knows.", lambda one: one.members),
    ("last_leaderless_seconds", "Time without a leader before the current leader.", lambda one: one.gap_s),
    ("lock_unreachable", "1 while the lock of the cluster cannot be asked.", lambda one: one.lock_away),
)


def _cluster(state: ClusterState) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
    for name, text, value_of in _CLUSTER_GAUGES:
        if (value := value_of(state)) is not None:
            yield GaugeMetricFamily(f"llmproxy_cluster_{name}", text, value=value)
    changes_text = "Leaders that this member followed, or times that it began to lead."
    yield CounterMetricFamily("llmproxy_cluster_leader_changes", changes_text, value=state.changes)


def _scale(needs: Mapping[str, Need]) -> Iterator[GaugeMetricFamily]:
    values: tuple[tuple[str, str, Callable[[Need], float]], ...] = (
        ("scale_desired_replicas", "Replicas that the pool should have.", lambda need: need.desired),
        ("scale_need_replicas", "Replicas that the pool needs, neither rounded nor bounded.", lambda need: need.need),
        ("scale_estimate_valid", "1 if enough is known to estimate the need of the pool.", lambda need: need.sure),
    )
    for name, text, value_of in values:
        yield _gauge(name, text, "pool", ((pool, value_of(need)) for pool, need in needs.items()))
    term_text = "Replicas that each part of the work alone would need."
    terms = GaugeMetricFamily("llmproxy_scale_term_replicas", term_text, labels=["pool", "term"])
    role_text = "Replicas of a role that the pool should have, not rounded, if it has roles."
    roles = GaugeMetricFamily("llmproxy_scale_role_need_replicas", role_text, labels=["pool", "role"])
    for pool, need in needs.items():
        for term, replicas in need.terms.items():
            terms.add_metric([pool, term], replicas)
        for role, of_role in need.roles.items():
            roles.add_metric([pool, role], of_role.need)
    yield from (terms, roles)
    capacity = ((pool, need.capacity.requests_per_s) for pool, need in needs.items() if need.capacity is not None)
    text = "Requests per second that a replica can serve, at the current mix of requests."
    yield _gauge("replica_capacity_requests_per_second", text, "pool", capacity)


def _gauge(name: str, text: str, label: str, values: Iterable[tuple[str, float | None]]) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(f"llmproxy_{name}", text, labels=[label])
    for labelled, value in values:
        if value is not None:
            gauge.add_metric([labelled], value)
    return gauge


def _most(blocked: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yields each limit with its count, the largest first. Limits beyond LABELS_MAX are added up as `other`."""
    ordered = sorted(blocked.items(), key=lambda one: (-one[1], one[0]))
    named = LABELS_MAX - 1
    yield from ordered[:named]
    if len(ordered) > named:
        yield OTHER, sum(waiting for _, waiting in ordered[named:])


class Capped:
    """Limits a label to LABELS_MAX values. Returns `other` for further values. The values in `known` always stay."""

    def __init__(self, *known: str) -> None:
        self._known = {*known, OTHER}

    def __call__(self, value: str) -> str:
        if value not in self._known:
            if len(self._known) >= LABELS_MAX:
                return OTHER
            self._known.add(value)
        return value


_COUNTERS = (
    ("requests_total", "outcome code band model", "Requests ended, by their one outcome."),
    ("attempts_total", "backend verdict", "Attempts ended, by their verdict about the backend."),
    ("retries_total", "", "Attempts that followed a failed attempt."),
    ("continued_streams_total", "how", "Streams that another replica continued after theirs failed."),
    ("preemptions_total", "band", "Leases preempted for a request of a higher band."),
    ("disaggregation_total", "mode", "Requests in pools with roles, by how they were served or what kept them whole."),
    ("objectives_total", "band result", "Requests that kept or missed their objective."),
    ("unknown_objectives_total", "", "Requests whose header named an unknown objective."),
    ("tenant_requests_total", "tenant outcome", "Requests of tenants ended, by their one outcome."),
    ("tenant_tokens_total", "tenant direction", "Tokens of tenants as the engines counted them."),
    ("log_lines_lost_total", "", "Lines that standard error could not take."),
    ("tokens_total", "direction model", "Tokens as the engines counted them."),
    ("external_cost_total", "backend", "Cost of ended requests on an external backend, in the currency of its prices."),
    ("prefix_tokens_total", "backend kind", "Prompt tokens: expected to be cached, cached, or both."),
    ("poll_failures_total", "backend reason", "Polls that failed."),
    ("adapter_changes_total", "backend action result", "Orders to backends to load or unload an adapter."),
    ("config_reloads_total", "result", "Times the configuration was read again."),
    ("workers_lost_total", "", "Relay workers that died."),
    ("discovery_lookups_total", "source result", "Lookups of sources of backends."),
    ("prediction_seconds_total", "backend time kind", "Sums of predicted and observed times."),
    ("predictions_covered_total", "backend time", "Times that did not exceed their predicted p90."),
)
"""Name, labels and help of each counter. `exit_fields` defines how requests change it."""
_HISTOGRAMS: tuple[tuple[str, str, str, tuple[float, ...]], ...] = (
    ("queue_wait_seconds", "band", "Wait for a backend, over all attempts.", WAIT_BUCKETS_S),
    ("tenant_queue_wait_seconds", "tenant", "Wait for a backend, over all attempts, by tenant.", WAIT_BUCKETS_S),
    ("time_to_first_token_seconds", "band model", "From arrival to the first body byte, streams only.", TTFT_BUCKETS_S),
    ("time_per_output_token_seconds", "band model", "Mean time per token after the first, completed streams only.",
     TOKEN_BUCKETS_S),
    ("inter_chunk_seconds", "band gap", "Mean and longest wait between chunks of a stream.", GAP_BUCKETS_S),
    ("prefill_seconds", "", "From the grant of a prefill to its answer, of split requests.", TTFT_BUCKETS_S),
    ("handover_seconds", "", "From the answer of a prefill to the first token.", TTFT_BUCKETS_S),
    ("request_seconds", "band model", "From arrival to the end, completed requests only.", REQUEST_BUCKETS_S),
    ("prediction_error_ratio", "backend time", "Difference of predicted and observed times, as a part of the observed.",
     ()),
    ("decision_seconds", "", "Time of a decision pass.", DECISION_BUCKETS_S),
    ("replica_start_seconds", "pool", "From the first failed poll of a new backend until it serves.", START_BUCKETS_S),
)  # fmt: skip


def _result(ok: bool) -> str:
    return "success" if ok else "failure"


class Metrics:
    """The metrics of one process, in a registry of their own.

    Each scrape calls `state`, on the thread of the scrape.
    """

    def __init__(self, state: Callable[[], LiveState]) -> None:
        # The library would add a time of creation to every series, a third more lines of no use.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        series = SeriesCollector()
        # First, because it drops series.
        registry.register(_LiveCollector(state, series))
        self._counts = {
            name: series.counter(f"llmproxy_{name}", text, *labels.split()) for name, labels, text in _COUNTERS
        }
        distributions = {
            name: series.distribution(f"llmproxy_{name}", text, buckets, *labels.split())
            for name, labels, text, buckets in _HISTOGRAMS
        }
        # Gets the seconds of each scheduling pass.
        self.decided = distributions["decision_seconds"][()].observe
        self._starts, self._pool = distributions["replica_start_seconds"], Capped()
        self.record = exit_recorder({**self._counts, **distributions}, Capped(UNKNOWN_MODEL), Capped())
        """Counts one finished request. Called exactly once for each request."""
        registry.register(series)
        # These are counters of the library, because the threads of the decision log and of the spans change them too.
        self._decisions_lost = Counter(
            "llmproxy_decision_log_lines_lost_total", "Lines that the decision log could not take.", registry=registry
        )
        self._spans_lost = Counter("llmproxy_spans_lost_total", "Spans that were not sent.", registry=registry)
        self._reloaded_at = Gauge(
            "llmproxy_config_last_reload_timestamp_seconds", "Time of the last successful reload.", registry=registry
        )
        self._reloaded_at.set_to_current_time()
        self._reload_ok = Gauge(
            "llmproxy_config_last_reload_successful", "1 if the last reload was successful.", registry=registry
        )
        self._reload_ok.set(1)
        info = Gauge("llmproxy_build_info", "Always 1; the version is in the label.", ["version"], registry=registry)
        info.labels(__version__).set(1)
        ProcessCollector(registry=registry)

    def attempted(self, backend: str, verdict: Verdict) -> None:
        self._counts["attempts_total"][backend, verdict._value_] += 1

    def poll_failed(self, backend: str, trouble: Trouble) -> None:
        self._counts["poll_failures_total"][backend, trouble.value] += 1

    def adapter_changed(self, backend: str, action: str, ok: bool) -> None:
        """Counts a request to a backend to `load` or `unload` an adapter. `ok`: whether the backend did so."""
        self._counts["adapter_changes_total"][backend, action, _result(ok)] += 1

    def reloaded(self, ok: bool) -> None:
        """Counts a reload of the configuration. `ok`: whether the new configuration is in use."""
        self._counts["config_reloads_total"][_result(ok),] += 1
        self._reload_ok.set(ok)
        if ok:
            self._reloaded_at.set_to_current_time()

    def replica_started(self, pool: str, took_s: float) -> None:
        """Records that a new backend of `pool` began to serve `took_s` seconds after its first failed poll."""
        self._starts[self._pool(pool),].observe(took_s)

    def source_queried(self, source: str, ok: bool) -> None:
        """Counts a query of a source of backends. `ok`: whether the source answered."""
        self._counts["discovery_lookups_total"][source, _result(ok)] += 1

    def worker_lost(self) -> None:
        self._counts["workers_lost_total"][()] += 1

    def decisions_lost(self, lines: int) -> None:
        """Counts lines that the decision log lost. May be called from any thread."""
        self._decisions_lost.inc(lines)

    def spans_lost(self, spans: int) -> None:
        """Counts spans that were not sent. May be called from any thread."""
        self._spans_lost.inc(spans)

    def log_lines_lost(self, lines: int) -> None:
        """Counts log lines that could not be written to standard error."""
        self._counts["log_lines_lost_total"][()] += lines

    def page(self) -> bytes:
        """Returns the metrics page, as text of the type `CONTENT_TYPE`."""
        self.log_lines_lost(logs.take_lines_lost())
        return generate_latest(self.registry)
