"""The four Grafana dashboards: overview, waiting room and fairness, replicas and placement, cluster."""

from __future__ import annotations

from llmproxy.tools.export.panel import HERE, Board, Panel

RATE = "[$__rate_interval]"
BAND = f'{HERE},band=~"$band"'
MODEL = f'{BAND},model=~"$model"'
BACKEND = f'{HERE},backend=~"$backend"'
REFUSED = "rejected_.*|expired.*|shed|rate_limited"
TENANT = f'{HERE},direction=~"input|output"'


def rate(metric: str, labels: str, by: str = "") -> str:
    """Returns a PromQL expression: the rate per second of the counter `llmproxy_METRIC`, summed by the labels `by`."""
    return f"sum by ({by}) (rate(llmproxy_{metric}{{{labels}}}{RATE}))"


def quantile(share: float, metric: str, labels: str, by: str) -> str:
    """Returns a PromQL expression for the quantile `share` of the histogram `llmproxy_METRIC`, by the labels `by`."""
    grouped = f"{by}, le" if by else "le"
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', labels, grouped)})"


def quantiles(metric: str, labels: str, by: str) -> tuple[tuple[str, str], ...]:
    """Returns the p50 and the p95 of a histogram, as pairs of a PromQL expression and a legend."""
    return tuple((quantile(share, metric, labels, by), f"p{share * 100:.0f} {{{{{by}}}}}") for share in (0.5, 0.95))


def gauge(metric: str, labels: str, by: str, how: str = "sum") -> str:
    """Returns a PromQL expression for the gauge `llmproxy_METRIC`, by the labels `by`.

    `how` aggregates: sum, min or max.
    """
    return f"{how} by ({by}) (llmproxy_{metric}{{{labels}}})"


def share(part: str, whole: str) -> str:
    """Returns a PromQL expression for `part` divided by `whole`. It is 0, and not missing, if `part` has no series."""
    return f"(({part}) or 0 * ({whole})) / ({whole})"


def known_prefix(of: str) -> str:
    """Returns a PromQL expression for the share of the prompt tokens of kind `of` that were both expected and cached.

    `of` is `expected` or `cached`.
    """
    both, one = (rate("prefix_tokens_total", f'{BACKEND},kind="{kind}"', "backend") for kind in ("both", of))
    return f"{both} / {one}"


def bias() -> str:
    """Returns a PromQL expression for predicted seconds divided by observed seconds."""
    predicted, observed = (
        rate("prediction_seconds_total", f'{BACKEND},kind="{kind}"', "backend, time")
        for kind in ("predicted", "observed")
    )
    return f"{predicted} / {observed}"


OVERVIEW = Board(
    "llmproxy-overview",
    "llmproxy: overview",
    "Requests, errors and times by band, and the process itself.",
    (
        Panel("Requests", "Requests that ended per second.", ((rate("requests_total", MODEL), "requests"),), "reqps",
              "stat"),
        Panel("Completed", "Share of the requests that ended which were answered to their end.",
              ((share(rate("requests_total", f'{MODEL},outcome="completed"'), rate("requests_total", MODEL)),
                "completed"),), "percentunit", "stat"),
        Panel("Waiting", "Requests in the waiting room now.", ((gauge("queued_requests", BAND, ""), "waiting"),),
              kind="stat"),
        Panel("Oldest", "Longest time that a waiting request has waited.",
              ((gauge("oldest_waiting_seconds", BAND, "", "max"), "oldest"),), "s", "stat"),
        Panel("Backends", "Backends that may get requests.", ((gauge("backend_available", BACKEND, ""), "available"),),
              kind="stat"),
        Panel("Inversions", "Grants to a lower band that a higher one could have had, in the range shown. Must be 0.",
              ((f"sum(increase(llmproxy_priority_inversions_total{{{HERE}}}[$__range]))", "inversions"),), kind="stat"),
        Panel("Requests by outcome", "Requests that ended per second; each has one outcome.",
              ((rate("requests_total", MODEL, "outcome"), "{{outcome}}"),), "reqps", stacked=True),
        Panel("Requests by class of status", "2xx, 4xx, 5xx as the client got it; none: the client had left.",
              ((rate("requests_total", MODEL, "code"), "{{code}}"),), "reqps", stacked=True),
        Panel("Requests by band", "Requests that ended per second, by band.",
              ((rate("requests_total", MODEL, "band"), "{{band}}"),), "reqps", stacked=True),
        Panel("Errors by band", "Share of requests that failed for reasons that are not the client's, over 5 minutes. "
              "The recording rule of `llmproxy export alerts`.",
              (('llmproxy:errors:ratio_rate5m{job=~"$job",band=~"$band"}', "{{band}}"),), "percentunit"),
        Panel("Objectives missed", "Share of the requests with an objective that missed it, by band.",
              ((share(rate("objectives_total", f'{BAND},result="missed"', "band"),
                      rate("objectives_total", BAND, "band")),
                "{{band}}"),), "percentunit"),
        Panel("Time to first token", "From arrival to the first byte of streams, by band.",
              quantiles("time_to_first_token_seconds", MODEL, "band"), "s"),
        Panel("Time per output token", "Mean time per token after the first, completed streams, by band.",
              quantiles("time_per_output_token_seconds", MODEL, "band"), "s"),
        Panel("Duration", "From arrival to the last byte, completed requests, by band.",
              quantiles("request_seconds", MODEL, "band"), "s"),
        Panel("Longest gap in a stream", "The longest wait between two chunks of a stream, by band.",
              ((quantile(0.95, "inter_chunk_seconds", f'{BAND},gap="max"', "band"), "p95 {{band}}"),), "s"),
        Panel("Tokens", "Tokens per second as the engines counted them.",
              ((rate("tokens_total", f'{HERE},model=~"$model"', "direction"), "{{direction}}"),)),
        Panel("Requests by model", "Requests that ended per second, by the name in the request.",
              ((rate("requests_total", MODEL, "model"), "{{model}}"),), "reqps", stacked=True),
        Panel("In flight", "Requests that were sent to backends and have not ended.",
              ((gauge("in_flight_requests", BACKEND, "backend"), "{{backend}}"),), stacked=True),
        Panel("Retries and losses", "Attempts after a failed one, continued streams, lost lines and spans.",
              ((rate("retries_total", HERE), "retries"),
               (rate("continued_streams_total", HERE), "continued streams"),
               (rate("log_lines_lost_total", HERE), "log lines lost"),
               (rate("decision_log_lines_lost_total", HERE), "decisions lost"),
               (rate("spans_lost_total", HERE), "spans lost"),
               (rate("workers_lost_total", HERE), "workers lost"))),
        Panel("Processor", "Cores in use by the scheduler process; 1 is all that one process can use.",
              ((f"rate(process_cpu_seconds_total{{{HERE}}}{RATE})", "{{instance}}"),)),
        Panel("Memory", "Resident memory of the scheduler process.",
              ((f"process_resident_memory_bytes{{{HERE}}}", "{{instance}}"),), "bytes"),
        Panel("Open files", "File descriptors in use and allowed.",
              ((f"process_open_fds{{{HERE}}}", "{{instance}}"),
               (f"process_max_fds{{{HERE}}}", "allowed {{instance}}"))),
        Panel("Versions", "Version of each proxy.",
              ((f"sum by (job, instance, version) (llmproxy_build_info{{{HERE}}})", ""),), kind="table"),
        Panel("Configuration in use", "1 while the configuration that was read last is in use.",
              ((gauge("config_last_reload_successful", HERE, "instance", "min"), "{{instance}}"),)),
    ),
)  # fmt: skip

CLUSTER = Board(
    "llmproxy-cluster",
    "llmproxy: cluster",
    "Proxies that schedule as one: the leader, and the time without a leader.",
    (
        Panel("Cluster", "The leader, whether each member has a leader, the number of members, and whether the "
              "lock is unreachable.",
              ((gauge("cluster_leader", HERE, "instance", "max"), "{{instance}} leads"),
               (gauge("cluster_has_leader", HERE, "instance", "min"), "{{instance}} has a leader"),
               (gauge("cluster_members", HERE, "instance", "max"), "members by {{instance}}"),
               (gauge("cluster_lock_unreachable", HERE, "instance", "max"), "{{instance}} misses the lock"))),
        Panel("Changes of the leader", "Epoch and changes of the leader, and seconds without a leader before the last "
              "change.",
              ((gauge("cluster_epoch", HERE, "job", "max"), "epoch"),
               (f"increase(llmproxy_cluster_leader_changes_total{{{HERE}}}{RATE})", "changes {{instance}}"),
               (gauge("cluster_last_leaderless_seconds", HERE, "instance", "max"), "leaderless {{instance}}"))),
    ),
)  # fmt: skip

WAITING = Board(
    "llmproxy-waiting",
    "llmproxy: waiting room and fairness",
    "Waiting requests and their wait, priority between bands, and the shares of tenants.",
    (
        Panel("Waiting by band", "Requests in the waiting room.",
              ((gauge("queued_requests", BAND, "band"), "{{band}}"),), stacked=True),
        Panel("Oldest by band", "Longest time that a waiting request has waited.",
              ((gauge("oldest_waiting_seconds", BAND, "band", "max"), "{{band}}"),), "s"),
        Panel("Work that waits", "Seconds until the waiting requests would be served if no others came, by pool: a "
              "signal for autoscaling.", ((gauge("queue_backlog_seconds", HERE, "pool", "max"), "{{pool}}"),), "s"),
        Panel("Replicas needed", "Replicas that the work of a pool needs, and the desired number. Both keep the "
              "present number while the estimate is not valid.",
              ((gauge("scale_need_replicas", HERE, "pool", "max"), "{{pool}} need"),
               (gauge("scale_desired_replicas", HERE, "pool", "max"), "{{pool}} desired"),
               (gauge("scale_estimate_valid", HERE, "pool", "max"), "{{pool}} estimate valid"))),
        Panel("Why so many replicas", "Replicas that each part of the work would need alone.",
              ((gauge("scale_term_replicas", HERE, "pool, term", "max"), "{{pool}} {{term}}"),)),
        Panel("Replicas needed by role", "Replicas needed for prompts and for answers, in pools with roles.",
              ((gauge("scale_role_need_replicas", HERE, "pool, role", "max"), "{{pool}} {{role}}"),)),
        Panel("Start of replicas", "Time from the first failed poll of a new backend until it serves.",
              quantiles("replica_start_seconds", HERE, "pool"), "s"),
        Panel("Capacity of a replica", "Requests per second, of the present kind, that one replica can serve.",
              ((gauge("replica_capacity_requests_per_second", HERE, "pool", "max"), "{{pool}}"),), "reqps"),
        Panel("Queue wait by band", "Time waiting for a backend. Higher bands must wait less.",
              quantiles("queue_wait_seconds", BAND, "band"), "s"),
        Panel("Inversions", "Grants to a lower band that a waiting request of a higher one could have had. Must be 0.",
              ((rate("priority_inversions_total", HERE, "instance"), "{{instance}}"),)),
        Panel("Preemptions", "Requests that a higher band preempted at their backend, before they answered.",
              ((rate("preemptions_total", BAND, "band"), "{{band}}"),)),
        Panel("Refused and expired", "Requests per second that got no backend.",
              ((rate("requests_total", f'{MODEL},outcome=~"{REFUSED}"', "outcome"), "{{outcome}}"),), "reqps",
              stacked=True),
        Panel("Blocked", "Waiting requests whose tenant or model is at its `in_flight`, or whose only backend is full.",
              ((f'topk(10, {gauge("blocked_requests", HERE, "limit")})', "{{limit}}"),)),
        Panel("Objectives kept", "Requests with an objective that kept or missed it, per second.",
              ((rate("objectives_total", BAND, "band, result"), "{{band}} {{result}}"),), "reqps"),
        Panel("Queue wait by tenant", "95th percentile of the tenants that wait longest.",
              ((f'topk(10, {quantile(0.95, "tenant_queue_wait_seconds", HERE, "tenant")})', "{{tenant}}"),), "s"),
        Panel("Tokens by tenant", "Tokens per second, prompts and answers, of the ten largest tenants.",
              ((f'topk(10, {rate("tenant_tokens_total", TENANT, "tenant")})', "{{tenant}}"),),
              stacked=True),
        Panel("Share by tenant", "Share of the tokens of all tenants. Compare the shares with the weights.",
              ((f'topk(10, {rate("tenant_tokens_total", TENANT, "tenant")} / scalar('
                f'{rate("tenant_tokens_total", TENANT)}))', "{{tenant}}"),), "percentunit"),
        Panel("Requests by tenant", "Requests of tenants that ended per second, by outcome.",
              ((rate("tenant_requests_total", HERE, "tenant, outcome"), "{{tenant}} {{outcome}}"),), "reqps"),
        Panel("Cost of external backends", "Money per hour, and the rest of the day, in the currency of the prices.",
              ((f'3600 * {rate("external_cost_total", BACKEND, "backend")}', "{{backend}} per hour"),
               (gauge("external_day_left", BACKEND, "backend", "min"), "{{backend}} left today"))),
        Panel("Unknown objectives", "Requests per second whose header named an objective that is not configured.",
              ((rate("unknown_objectives_total", HERE), "unknown"),), "reqps"),
        Panel("Bytes in memory", "Request bodies: waiting by band, and all in the process.",
              ((gauge("queued_bytes", BAND, "band"), "waiting {{band}}"),
               (gauge("buffered_body_bytes", HERE, "instance"), "held {{instance}}")), "bytes"),
        Panel("Decision time", "Duration of one decision pass of a scheduler.",
              ((quantile(0.5, "decision_seconds", HERE, ""), "p50"),
               (quantile(0.99, "decision_seconds", HERE, ""), "p99")), "s"),
        Panel("Prefill and decode apart", "Requests per second in pools with roles: split, whole, or why not split.",
              ((rate("disaggregation_total", HERE, "mode"), "{{mode}}"),), "reqps", stacked=True),
    ),
)  # fmt: skip

REPLICAS = Board(
    "llmproxy-replicas",
    "llmproxy: replicas and placement",
    "State and load of each backend, and the accuracy of predictions and the prefix index.",
    (
        Panel("Available", "1: healthy, and may get requests.",
              ((gauge("backend_available", BACKEND, "backend", "min"), "{{backend}}"),), kind="state-timeline"),
        Panel("Down", "1: polls of the backend fail: no answer, or an unhealthy one.",
              ((gauge("backend_down", BACKEND, "backend", "max"), "{{backend}}"),), kind="state-timeline"),
        Panel("Ejected", "1: ejected, because requests failed, hung or became slow there.",
              ((gauge("backend_ejected", BACKEND, "backend", "max"), "{{backend}}"),), kind="state-timeline"),
        Panel("Drained", "1: drained, leaving, or a pod that is not ready; gets no new requests.",
              ((gauge("backend_drained", BACKEND, "backend", "max"), "{{backend}}"),), kind="state-timeline"),
        Panel("Saturation", "Load divided by the limit; 1 is full.",
              ((gauge("backend_saturation", BACKEND, "backend", "max"), "{{backend}}"),), "percentunit"),
        Panel("In flight and limit", "Requests in flight, and how many the backend runs at once.",
              ((gauge("in_flight_requests", BACKEND, "backend"), "{{backend}}"),
               (gauge("backend_limit", BACKEND, "backend", "max"), "limit {{backend}}"))),
        Panel("Running in the engine", "By the last scrape of the engine's metrics.",
              ((gauge("backend_running", BACKEND, "backend", "max"), "{{backend}}"),)),
        Panel("Waiting in the engine", "Above 0 for long: the limit is too high, and requests wait in the engine, "
              "which does not reorder them.", ((gauge("backend_waiting", BACKEND, "backend", "max"), "{{backend}}"),)),
        Panel("KV-cache", "Part of the KV-cache in use.",
              ((gauge("backend_kv_used_ratio", BACKEND, "backend", "max"), "{{backend}}"),), "percentunit"),
        Panel("Age of scrapes", "Time since the last scrape of the engine began.",
              ((gauge("backend_reading_age_seconds", BACKEND, "backend", "max"), "{{backend}}"),), "s"),
        Panel("Saturation by pool", "Mean of the backends of a pool that are available.",
              ((f"avg by (pool) ((llmproxy_backend_saturation{{{BACKEND}}} and on (job, instance, backend) "
                "llmproxy_backend_available == 1) * on (job, instance, backend) group_left (pool) "
                "llmproxy_backend_info)", "{{pool}}"),), "percentunit"),
        Panel("Backends by pool", "Which backend serves which pool now.",
              ((f"sum by (pool, backend) (llmproxy_backend_info{{{BACKEND}}})", ""),), kind="table"),
        Panel("Attempts", "Attempts that ended per second, by backend.",
              ((rate("attempts_total", BACKEND, "backend"), "{{backend}}"),), "ops", stacked=True),
        Panel("Attempts by verdict", "Verdicts of attempts about their backends, per second, except served.",
              ((rate("attempts_total", f'{BACKEND},verdict!="served"', "backend, verdict"),
                "{{backend}} {{verdict}}"),), "ops"),
        Panel("Stages of split requests", "From the grant of the prefill to its answer; then to the first token.",
              (*((query, f"prefill {name}") for query, name in quantiles("prefill_seconds", HERE, "instance")),
               *((query, f"handover {name}") for query, name in quantiles("handover_seconds", HERE, "instance"))), "s"),
        Panel("Failed polls", "Readings of backends that failed, per second.",
              ((rate("poll_failures_total", BACKEND, "backend, reason"), "{{backend}} {{reason}}"),), "ops"),
        Panel("Looks at sources of backends", "Queries of DNS, files and Kubernetes per second, by their success.",
              ((rate("discovery_lookups_total", HERE, "source, result"), "{{source}} {{result}}"),), "ops"),
        Panel("Expected blocks that were cached", "Share of the prompt tokens expected in a cache that were cached.",
              ((known_prefix("expected"), "{{backend}}"),), "percentunit"),
        Panel("Cached blocks that were known", "Share of the cached prompt tokens that were expected.",
              ((known_prefix("cached"), "{{backend}}"),), "percentunit"),
        Panel("Cached prompt tokens", "Prompt tokens per second from the prefix cache.",
              ((rate("prefix_tokens_total", f'{BACKEND},kind="cached"', "backend"), "{{backend}}"),)),
        Panel("Error of predictions", "Mean absolute error as a part of what was observed: 0.2 is 20 %.",
              ((f'{rate("prediction_error_ratio_sum", BACKEND, "backend, time")} / '
                f'{rate("prediction_error_ratio_count", BACKEND, "backend, time")}', "{{backend}} {{time}}"),),
              "percentunit"),
        Panel("Coverage of the p90", "Share of times that did not exceed their predicted p90; 0.9 is right.",
              ((f'{rate("predictions_covered_total", BACKEND, "time")} / '
                f'{rate("prediction_error_ratio_count", BACKEND, "time")}', "{{time}}"),), "percentunit"),
        Panel("Bias of predictions", "Predicted over observed: above 1 too pessimistic, below 1 too optimistic.",
              ((bias(), "{{backend}} {{time}}"),)),
        Panel("Orders to change adapters", "Loads and unloads per second, by their success.",
              ((rate("adapter_changes_total", BACKEND, "backend, action, result"),
                "{{backend}} {{action}} {{result}}"),),
              "ops"),
    ),
)  # fmt: skip

BOARDS = (OVERVIEW, WAITING, REPLICAS, CLUSTER)
