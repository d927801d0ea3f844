"""Words of other routers, and of vLLM itself, that people bring along: what to write here instead of them."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

PRODUCTION_STACK = "the production-stack router"
VLLM_ROUTER = "vllm-router and SGLang's gateway"
DYNAMO = "Dynamo"
ENDPOINT_PICKER = "the endpoint picker of llm-d"
LITELLM = "LiteLLM"
VLLM = "`vllm serve`"

_ROWS = (
    # Where the servers are.
    (
        "--service-discovery",
        f"{PRODUCTION_STACK} and vllm-router",
        "leave static out, servers are named with `--backend http://gpu-0:8000`; in the place of k8s, write"
        " `--backend dns+http://vllm.svc:8000` for all addresses of a name, or `--discovery-file backends.yaml` for a"
        " list that changes",
    ),
    (
        "--k8s-* --selector --service-discovery-*",
        f"{PRODUCTION_STACK} and vllm-router",
        "pods are found through a headless Service, with `--backend dns+http://vllm.svc:8000`",
    ),
    (
        "--pool-* --endpoint-selector --endpoint-target-ports",
        ENDPOINT_PICKER,
        "pods are found through a headless Service, with `--backend dns+http://vllm.svc:8000`",
    ),
    (
        "--static-models --static-model-types --static-model-labels",
        PRODUCTION_STACK,
        "leave it out, models are learned from each server",
    ),
    (
        "--static-aliases",
        PRODUCTION_STACK,
        "name aliases in the file of --config, as in `models: [{name: gpt-4, target: llama-3.1-8b}]`",
    ),
    ("--model-path --tokenizer-* --chat-template", VLLM_ROUTER, "leave it out, no tokenizer is needed here"),
    (
        "--prefill --decode --prefill-* --decode-* --pd-disaggregation --vllm-pd-disaggregation",
        f"{PRODUCTION_STACK}, {VLLM_ROUTER}",
        "servers that only prefill or only decode are not supported; those that do both are given with"
        " `--backend http://gpu-0:8000`",
    ),
    (
        "--dp-aware --intra-node-data-parallel-size",
        VLLM_ROUTER,
        "leave it out, a server with several ranks is one backend and divides its requests itself",
    ),
    (
        "--worker-startup-*",
        VLLM_ROUTER,
        "leave it out, the proxy listens at once and holds requests while no server is up (`--queue-hold-s 30`)",
    ),
    # Where a request goes.
    (
        "--session-key",
        PRODUCTION_STACK,
        "the requests of a session are kept together with `--placement session --scheduling-session header:x-user-id`",
    ),
    (
        "--prefix-min-match-length --kv-aware-threshold --lmcache-*",
        PRODUCTION_STACK,
        "leave it out, `--placement cost` weighs a cached prefix against queues, in seconds",
    ),
    (
        "--cache-threshold --balance-*-threshold --max-tree-size --eviction-interval* --bucket-*",
        VLLM_ROUTER,
        "leave it out, `--placement cost` weighs a cached prefix against queues, in seconds",
    ),
    (
        "--router-mode",
        DYNAMO,
        "`--placement cost` is the nearest to kv; others are `--placement round_robin` and `--placement random`",
    ),
    (
        "--router-queue-policy",
        DYNAMO,
        "`--scheduling-ordering fcfs` or `--scheduling-ordering shortest`, which is the nearest to wspt",
    ),
    (
        "--router-queue-threshold",
        DYNAMO,
        "leave it out, a request always waits here until a server has room",
    ),
    ("--router-*", DYNAMO, "leave it out, `--placement cost` learns its weights from what it sees"),
    # How much, how long, how often.
    (
        "--max-concurrent-requests --rate-limit-tokens-per-second",
        VLLM_ROUTER,
        "how many requests a server runs at once is learned; the file of --config can say it, as in"
        " `backends: [{url: http://gpu-0:8000, max_in_flight: 256}]`",
    ),
    ("--disable-retries", VLLM_ROUTER, "`--retry-extra-attempts 0`"),
    (
        "--retry-initial-backoff-ms --retry-max-backoff-ms --retry-backoff-multiplier --retry-jitter-factor",
        VLLM_ROUTER,
        "leave it out, a new attempt goes to another server as soon as one has room; `--retry-extra-attempts 2` says"
        " how many there are",
    ),
    (
        "--disable-circuit-breaker",
        VLLM_ROUTER,
        "nothing is ejected with `--health-failures 1000000 --health-hung-s null --health-slow-factor null`",
    ),
    (
        "--cb-timeout-duration-secs",
        VLLM_ROUTER,
        "every ejection lasts a minute with `--health-backoff-s 60 --health-backoff-max-s 60`",
    ),
    (
        "--cb-success-threshold --cb-window-duration-secs",
        VLLM_ROUTER,
        "leave it out, `--health-failures 3` in a row eject a server",
    ),
    (
        "--health-check-timeout-secs --static-backend-health-check-timeout-*",
        f"{PRODUCTION_STACK} and vllm-router",
        "`--poll-timeout-s 5`",
    ),
    (
        "--health-check-* --health-success-threshold --static-backend-health-check*",
        f"{PRODUCTION_STACK} and vllm-router",
        "leave it out, every server is read all the time, with no request of its own (`--poll-interval-s 0.2`)",
    ),
    ("--refresh-metrics-interval", ENDPOINT_PICKER, "`--poll-interval-s 0.2`"),
    ("--metrics-staleness-threshold", ENDPOINT_PICKER, "`--poll-stale-after-s 5`"),
    ("--backend-connect-timeout", PRODUCTION_STACK, "`--timeouts-connect-s 5`"),
    ("--backend-read-timeout", PRODUCTION_STACK, "`--timeouts-stall-s 300`"),
    (
        "--graceful-shutdown-timeout --shutdown-grace-period-secs",
        f"{PRODUCTION_STACK}, {VLLM_ROUTER}",
        "`--drain-timeout-s 30`",
    ),
    ("--request_timeout --request-timeout", LITELLM, "`--timeouts-total-s 6000`"),
    # The process itself.
    ("--num_workers --num-workers", LITELLM, "`--workers 2`"),
    ("--http-host", DYNAMO, "`--host 0.0.0.0`"),
    ("--http-port", DYNAMO, "`--port 8000`"),
    ("--grpc-*", ENDPOINT_PICKER, "leave it out, clients come here by http, to `--port 8080`"),
    (
        "--dynamic-config-*",
        PRODUCTION_STACK,
        "`--config llmproxy.yaml`, a file that is read again when it changes; config.example.yaml shows its keys",
    ),
    (
        "--config-file --config-text",
        ENDPOINT_PICKER,
        "`--config llmproxy.yaml`; config.example.yaml shows its keys, which are others",
    ),
    (
        "--prometheus-* --metrics-port",
        f"{VLLM_ROUTER}, {ENDPOINT_PICKER}",
        "/metrics is on the port of clients, or on one of its own with `--admin-port 9090 --admin-host 0.0.0.0`",
    ),
    ("--tls-cert-path --ssl-certfile --ssl_certfile_path", f"{VLLM_ROUTER}, {VLLM}", "`--tls-cert cert.pem`"),
    ("--tls-key-path --ssl-keyfile --ssl_keyfile_path", f"{VLLM_ROUTER}, {VLLM}", "`--tls-key key.pem`"),
    ("--ssl-ca-certs", VLLM, "`--tls-client-ca ca.pem`"),
    (
        "--ca-cert-path --ca-cert-paths --client-cert-path --client-key-path",
        VLLM_ROUTER,
        "who signed the certificate of a server stands in the file of --config, as in"
        " `backends: [{url: https://gpu-0:8000, tls: {ca: ca.pem}}]`; client certificates are not sent",
    ),
    (
        "--api-key-validation-urls --tenant-api-key",
        VLLM_ROUTER,
        "keys of clients are given with `--api-key KEY`, or as hashes under tenants in the file of --config",
    ),
    ("--detailed_debug --uvicorn-log-level", f"{LITELLM}, {VLLM}", "`--log-level debug`"),
    ("--log-json", VLLM_ROUTER, "`--log-format json`"),
    ("--log-dir", VLLM_ROUTER, "leave it out, the log goes to standard error"),
    (
        "--log-stats* --request-stats-window",
        PRODUCTION_STACK,
        "leave it out, each request has a line in the log, and all of them have counters in /metrics",
    ),
    (
        "--cors-allowed-origins --allowed-origins",
        f"{VLLM_ROUTER}, {VLLM}",
        "`--clients-allowed-origins https://app.example`",
    ),
    ("--request-id-headers", VLLM_ROUTER, "leave it out, x-request-id is taken, sent on and echoed"),
    (
        "--callbacks --request-rewriter --feature-gates --semantic-cache-* --enable-batch-api --file-storage-*"
        " --batch-processor --external-providers-* --sentry-* --otel-*",
        PRODUCTION_STACK,
        "leave it out, there is no such thing here",
    ),
    (
        "--enable-trace --otlp-* --history-backend --enable-igw --enable-program-scheduling",
        VLLM_ROUTER,
        "leave it out, there is no such thing here",
    ),
    (
        "--served-model-name --tensor-parallel-size --gpu-memory-utilization --max-model-len --max-num-seqs"
        " --enable-lora --max-loras --dtype --quantization --tool-call-parser --enable-auto-tool-choice",
        VLLM,
        "give it to the servers, which tell the proxy what they are",
    ),
)
"""Patterns of flags, whose they are, and what to write instead; the first that fits counts. What stands between
backticks can be pasted as it is."""

FLAGS = tuple((pattern, whose, instead) for patterns, whose, instead in _ROWS for pattern in patterns.split())

PLACEMENTS: Mapping[str, str] = {
    **dict.fromkeys(
        ("cache_aware", "prefix_aware", "prefixaware", "kv_aware", "kvaware", "kv", "prefix_hash", "prefix_cache"),
        "cost",
    ),
    **dict.fromkeys(("disaggregated_prefill", "bucket", "least_latency", "latency_based_routing"), "cost"),
    **dict.fromkeys(
        ("consistent_hash", "consistent_hashing", "rendezvous_hash", "sticky_least_loaded", "manual"), "session"
    ),
    **dict.fromkeys(
        ("least_load", "least_loaded", "loadaware", "least_busy", "minimum_load", "least_kv_cache"), "least_request"
    ),
    "simple_shuffle": "random",
}
"""Policies of other routers that are none here, with the placement that is nearest in what it does."""


def instead_of(flag: str) -> str | None:
    """What to tell somebody who wrote `flag`, None where it is nobody's that is known."""
    for pattern, whose, instead in FLAGS:
        if fnmatchcase(flag, pattern):
            return f"is a setting of {whose}; here: {instead}"
    return None
