"""Header fields that are forwarded, replaced or dropped between client and backend."""

from __future__ import annotations

from llmproxy.gateway.http.headers import to_client


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
