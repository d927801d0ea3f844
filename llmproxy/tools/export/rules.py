"""Recording and alert rules for Prometheus. `docs/reference/alerts.md` has a paragraph for each alert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RUNBOOK = "https://github.com/llmproxy-lb/llmproxy/blob/main/docs/reference/alerts.md#"
ERROR_BUDGET = 0.001  # The share of requests that may fail: an objective of 99.9 %.
OBJECTIVE_MISSED_MAX = 0.1  # The share of critical requests that may miss their objective.
FAILURES_MIN = 5
"""The minimum number of failures in the long window for an alert: a single failure is a large share of a quiet hour."""

FAILED = (
    "rejected_capacity|rejected_no_backends|expired|expired_no_backends|connect_failed|upstream_timeout|broken_stream|"
    "internal"
)
"""The outcomes that use up the error budget, in addition to `upstream_status` with 5xx.

With 4xx the client is at fault.
"""
NOT_OURS = "cancelled|bad_request|too_large|unauthorized|unknown_model|rate_limited|upstream_status"
"""The outcomes that the error ratio does not count, because clients caused them.

`_ended` adds `upstream_status` with 5xx again.
"""
WINDOWS = ("5m", "30m", "1h", "6h", "3d")

PROXY = "job, instance"


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert rule."""

    name: str
    expression: str
    # How long the expression must hold (`for`), such as 5m; "" for an alert at once.
    lasts: str
    # The label `severity`: page (react now), ticket (in working hours) or info.
    severity: str
    summary: str
    description: str
    # The label `window`, which distinguishes rules of the same name; "" for none.
    window: str = ""

    def rule(self) -> dict[str, Any]:
        return {
            "alert": self.name,
            "expr": self.expression,
            **({"for": self.lasts} if self.lasts else {}),
            "labels": {"severity": self.severity, **({"window": self.window} if self.window else {})},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": f"{RUNBOOK}{self.name.lower()}",
            },
        }


_FAILED, _COUNTED = f'outcome=~"{FAILED}"', f'outcome!~"{NOT_OURS}"'


def _ended(function: str, window: str, outcomes: str, by: str = "job, band", band: str = 'band=~".*"') -> str:
    found = f"{function}(llmproxy_requests_total{{{outcomes},{band}}}[{window}])"
    server = f'{function}(llmproxy_requests_total{{outcome="upstream_status",code="5xx",{band}}}[{window}])'
    return f"sum by ({by}) ({found} or {server})"


def _errors(window: str) -> str:
    """Returns a PromQL expression for the error ratio of each band in the last `window`.

    Failures before a band is known have the band `none`, and are divided by all requests.
    """
    named, none = 'band!="none"', 'band="none"'
    of_band = _ended("rate", window, _COUNTED, band=named)
    return (
        f"({_ended('rate', window, _FAILED, band=named)} or 0 * {of_band}) / {of_band}"
        f" or {_ended('rate', window, _FAILED, band=none)}"
        f" / on (job) group_left () {_ended('rate', window, _COUNTED, 'job')}"
    )


def _missed(window: str) -> str:
    missed = f'sum by (job, band) (rate(llmproxy_objectives_total{{result="missed"}}[{window}]))'
    judged = f"sum by (job, band) (rate(llmproxy_objectives_total[{window}]))"
    return f"({missed} or 0 * {judged}) / {judged}"


def _p95(metric: str) -> str:
    return f"histogram_quantile(0.95, sum by (job, band, le) (rate(llmproxy_{metric}_bucket[5m])))"


RECORDED = (
    *((f"llmproxy:errors:ratio_rate{window}", _errors(window)) for window in WINDOWS),
    *((f"llmproxy:objective_missed:ratio_rate{window}", _missed(window)) for window in ("5m", "1h")),
    ("llmproxy:queue_wait:p95_5m", _p95("queue_wait_seconds")),
    ("llmproxy:ttft:p95_5m", _p95("time_to_first_token_seconds")),
)
"""The name and the PromQL expression of each recording rule. The recorded series have the labels `job` and `band`."""


def _burn(long: str, short: str, times: float, lasts: str, severity: str) -> Alert:
    most = f"{times:g} * {ERROR_BUDGET}"
    return Alert(
        "LlmproxyErrorBudgetBurn",
        f"llmproxy:errors:ratio_rate{long} > {most} and llmproxy:errors:ratio_rate{short} > {most}"
        f" and {_ended('increase', long, _FAILED)} >= {FAILURES_MIN}",
        lasts,
        severity,
        "Band {{ $labels.band }} of {{ $labels.job }} uses up its error budget",
        f"{{{{ $value | humanizePercentage }}}} of the requests of the last {long} failed, which is more than "
        f"{times:g} times what an objective of {1 - ERROR_BUDGET:.1%} allows.",
        window=long,
    )


ALERTS = (
    _burn("1h", "5m", 14.4, "2m", "page"),
    _burn("6h", "30m", 6, "5m", "page"),
    _burn("3d", "6h", 1, "1h", "ticket"),
    Alert(
        "LlmproxyObjectiveBurn",
        f'llmproxy:objective_missed:ratio_rate1h{{band="critical"}} > {OBJECTIVE_MISSED_MAX}'
        f' and llmproxy:objective_missed:ratio_rate5m{{band="critical"}} > {OBJECTIVE_MISSED_MAX}'
        f' and sum by (job, band) (increase(llmproxy_objectives_total{{result="missed"}}[1h])) >= {FAILURES_MIN}',
        "2m", "page", "Critical requests of {{ $labels.job }} miss their objective",
        "{{ $value | humanizePercentage }} of the critical requests with an objective missed it in the last hour.",
    ),
    Alert(
        "LlmproxyNoBackend",
        f"(sum by ({PROXY}) (llmproxy_backend_available) or 0 * sum by ({PROXY}) (llmproxy_build_info)) == 0",
        "1m", "page", "{{ $labels.instance }} has no backend",
        "No backend can get requests. Requests are held for `queue.no_backend_wait_s`, and then refused.",
    ),
    Alert(
        "LlmproxyCriticalWaits",
        'llmproxy:queue_wait:p95_5m{band="critical"} > 2',
        "5m", "page", "Critical requests of {{ $labels.job }} wait",
        "One critical request in twenty waits longer than {{ $value | humanizeDuration }} for a backend.",
    ),
    Alert(
        "LlmproxyPoolSaturated",
        f"min by ({PROXY}, pool) ((llmproxy_backend_saturation and on ({PROXY}, backend) llmproxy_backend_available"
        f" == 1) * on ({PROXY}, backend) group_left (pool) llmproxy_backend_info) >= 1"
        f" and on ({PROXY}) sum by ({PROXY}) (llmproxy_queued_requests) > 0",
        "10m", "ticket", "All backends of {{ $labels.pool }} are full",
        "Every available backend of the pool has been full for ten minutes, and requests wait.",
    ),
    Alert(
        "LlmproxyStarvation",
        # Not by instance: in a cluster the leader has the queue, and each member counts its own clients.
        "sum by (job, band) (llmproxy_queued_requests) > 0 unless"
        ' sum by (job, band) (increase(llmproxy_requests_total{outcome="completed"}[10m])) > 0',
        "10m", "ticket", "Band {{ $labels.band }} of {{ $labels.job }} starves",
        "{{ $value }} requests of the band wait, and none was completed in ten minutes.",
    ),
    Alert(
        "LlmproxyInversion",
        "increase(llmproxy_priority_inversions_total[15m]) > 0",
        "", "ticket", "{{ $labels.instance }} served a lower band first",
        "A lower band was granted room that a waiting request of a higher band could have had. This is a bug.",
    ),
    Alert(
        "LlmproxyBackendDown",
        f"llmproxy_backend_down == 1 and on ({PROXY}, backend) llmproxy_backend_drained == 0",
        "5m", "ticket", "Backend {{ $labels.backend }} is down",
        "The backend does not answer the polls of {{ $labels.instance }}, and is not drained.",
    ),
    Alert(
        "LlmproxyBackendEjected",
        # A backend that died is ejected too, by the failures of its running requests.
        f"avg_over_time(llmproxy_backend_ejected[15m]) > 0.5 unless on ({PROXY}, backend) llmproxy_backend_down == 1",
        "", "ticket", "Backend {{ $labels.backend }} is ejected",
        "The backend was ejected for most of the last 15 minutes, because requests failed, hung or became slow there.",
    ),
    Alert(
        "LlmproxyKvPressure",
        "avg_over_time(llmproxy_backend_kv_used_ratio[10m]) > 0.95",
        "5m", "ticket", "The KV-cache of {{ $labels.backend }} is full",
        "{{ $value | humanizePercentage }} of the KV cache was in use in the last ten minutes: the engine preempts.",
    ),
    Alert(
        "LlmproxyEngineQueues",
        "avg_over_time(llmproxy_backend_waiting[5m]) > 2",
        "5m", "ticket", "Requests wait inside {{ $labels.backend }}",
        "{{ $value }} requests wait in the engine, where their order cannot be changed any more.",
    ),
    Alert(
        "LlmproxyReadingStale",
        f"llmproxy_backend_reading_age_seconds > 15 and on ({PROXY}, backend) llmproxy_backend_drained == 0",
        "2m", "ticket", "The scraped metrics of {{ $labels.backend }} are old",
        "The engine's metrics were last read {{ $value | humanizeDuration }} ago, and the backend is not drained.",
    ),
    Alert(
        "LlmproxyConfigReloadFailed",
        "llmproxy_config_last_reload_successful == 0",
        "5m", "ticket", "{{ $labels.instance }} does not use its configuration file",
        "The configuration that was read last is wrong, and the one before it is in use.",
    ),
    Alert(
        "LlmproxyWorkerLost",
        "increase(llmproxy_workers_lost_total[15m]) > 0",
        "", "ticket", "A relay worker of {{ $labels.instance }} died",
        "Its requests were cut, and another worker was started.",
    ),
    Alert(
        "LlmproxyNoLeader",
        "llmproxy_cluster_has_leader == 0",
        "30s", "page", "{{ $labels.instance }} has no leader to ask for leases",
        "Its requests are held, and refused after cluster.lock_s and 5 s.",
    ),
    Alert(
        "LlmproxyTwoLeaders",
        "sum by (job) (llmproxy_cluster_leader) > 1",
        "1m", "page", "{{ $value }} members of {{ $labels.job }} lead at once",
        "Each decides without the other. More than one cluster under one job looks the same.",
    ),
    Alert(
        "LlmproxyClusterLockUnreachable",
        "max by (job, instance) (llmproxy_cluster_lock_unreachable) == 1",
        "1m", "ticket", "The lock of the cluster does not answer {{ $labels.instance }}",
        "A leader that cannot renew the lock stops scheduling.",
    ),
    Alert(
        "LlmproxyLogLost",
        "increase(llmproxy_log_lines_lost_total[15m]) > 0 or increase(llmproxy_decision_log_lines_lost_total[15m]) > 0",
        "", "ticket", "{{ $labels.instance }} loses lines of its log",
        "{{ $value }} lines of the log or of the decision log could not be written in the last 15 minutes.",
    ),
    Alert(
        "LlmproxyPredictionsOff",
        f"sum by ({PROXY}, time) (rate(llmproxy_predictions_covered_total[30m]))"
        f" / sum by ({PROXY}, time) (rate(llmproxy_prediction_error_ratio_count[30m])) < 0.7"
        f" and sum by ({PROXY}, time) (increase(llmproxy_prediction_error_ratio_count[30m])) > 100",
        "15m", "info", "Predictions of {{ $labels.time }} are too short",
        "{{ $value | humanizePercentage }} of the times kept their predicted p90, and it should be 90 %.",
    ),
    Alert(
        "LlmproxyAbsent",
        "absent(llmproxy_build_info)",
        "5m", "page", "Prometheus reads no llmproxy",
        "No target answers with the metrics of llmproxy.",
    ),
)  # fmt: skip


def rules() -> dict[str, Any]:
    recorded = [{"record": name, "expr": expression} for name, expression in RECORDED]
    alerts = [alert.rule() for alert in ALERTS]
    return {"groups": [{"name": "llmproxy-recorded", "rules": recorded}, {"name": "llmproxy", "rules": alerts}]}
