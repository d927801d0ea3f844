"""Header fields that are forwarded, replaced or dropped between client and backend."""

from __future__ import annotations

from llmproxy.gateway.http.headers import to_backend, to_client


def test_requests_keep_end_to_end_fields() -> None:
    hop = [("Host", "proxy"), ("Connection", "keep-alive, X-Hop"), ("X-Hop", "1"), ("Accept-Encoding", "gzip")]
    kept = [("traceparent", "00-1-2-01"), ("User-Agent", "mine"), ("X-Twice", "a"), ("X-Twice", "b")]
    sent = to_backend(
        [*hop, *kept], request_id="ours", withheld=frozenset(), authorization=None, keep_credentials=False
    )
    assert sent == [*kept, ("x-request-id", "ours"), ("accept-encoding", "identity")]


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
