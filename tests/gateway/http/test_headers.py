"""Header fields that are forwarded, replaced or dropped between client and backend."""

from __future__ import annotations

from llmproxy.gateway.http.headers import PRIVILEGED, to_backend, to_client

SENT = [
    ("Host", "proxy:8080"),
    ("Content-Length", "12"),
    ("Connection", "keep-alive, X-Hop"),
    ("X-Hop", "1"),
    ("Transfer-Encoding", "chunked"),
    ("TE", "trailers"),
    ("Authorization", "Bearer client"),
    ("X-Request-Id", "theirs"),
    ("X-Vllm-Priority", "-5"),
    ("X-Data-Parallel-Rank", "1"),
    ("X-Prefiller-Host-Port", "10.0.0.9:1"),
    ("X-Encoder-Hosts-Ports", "10.0.0.9:1"),
    ("X-Data-Parallel-Host-Port", "10.0.0.9:1"),
    ("x-llm-d-inference-objective", "critical"),
    ("X-Gateway-Inference-Fairness-ID", "me"),
    ("X-LLM-D-SLO-TTFT-MS", "1"),
    ("x-slo-tpot-ms", "1"),
    ("X-Session-ID", "s1"),
    ("Accept", "text/event-stream"),
    ("Accept-Encoding", "gzip, br"),
]


def test_only_end_to_end_fields_reach_the_backend() -> None:
    kept = to_backend(SENT, request_id="ours", withheld=PRIVILEGED, authorization=None, keep_credentials=True)
    assert kept == [
        ("Authorization", "Bearer client"),
        ("X-Session-ID", "s1"),
        ("Accept", "text/event-stream"),
        ("x-request-id", "ours"),
        ("accept-encoding", "identity"),
    ]


def test_a_trusted_peer_keeps_its_privileges() -> None:
    kept = dict(to_backend(SENT, request_id="ours", withheld=frozenset(), authorization=None, keep_credentials=True))
    assert kept["X-Vllm-Priority"] == "-5"
    assert kept["x-llm-d-inference-objective"] == "critical"
    assert kept["X-LLM-D-SLO-TTFT-MS"] == "1"


def test_the_backends_key_replaces_the_clients() -> None:
    kept = to_backend(
        SENT, request_id="ours", withheld=PRIVILEGED, authorization="Bearer engine", keep_credentials=True
    )
    assert [value for name, value in kept if name.lower() == "authorization"] == ["Bearer engine"]


def test_the_clients_key_is_not_forwarded() -> None:
    kept = to_backend(SENT, request_id="ours", withheld=PRIVILEGED, authorization=None, keep_credentials=False)
    assert not [name for name, _ in kept if name.lower() == "authorization"]


def test_answers_keep_end_to_end_fields() -> None:
    fields = [
        ("date", "now"),
        ("Set-Cookie", "a=1"),
        ("Set-Cookie", "b=2"),
        ("connection", "close, x-private"),
        ("x-private", "1"),
        ("transfer-encoding", "chunked"),
        ("x-llmproxy-backend", "forged"),
        ("server", "uvicorn"),
        ("content-length", "5"),
    ]
    kept = [("date", "now"), ("Set-Cookie", "a=1"), ("Set-Cookie", "b=2"), ("content-length", "5")]
    assert to_client(fields) == [*kept, ("Server", "llmproxy")]
