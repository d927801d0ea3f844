"""Errors have the dialect of their endpoint, a status, and a hint at the right path."""

from __future__ import annotations

import json

import pytest

from llmproxy.core.domain import Outcome
from llmproxy.gateway.http.errors import STATUS, Failure, error_event, nothing_at
from llmproxy.gateway.http.routes import Dialect


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("/chat/completions", ". Did you mean /v1/chat/completions?"),
        ("/v1/v1/messages", ". Did you mean /v1/messages?"),
        ("/models", ". Did you mean /v1/models?"),
        ("/v1/classify", ". Did you mean /classify?"),
        *((path, ".") for path in ("/", "/v1", "/v1/metrics", "/v1/debug/queue", "/v1/chat", "/sleep")),
    ],
)
def test_only_a_path_with_v1_missing_or_repeated_gets_a_hint(asked: str, hint: str) -> None:
    assert nothing_at(asked).message == f"There is nothing at {asked}{hint}"


def test_every_outcome_but_success_has_a_status() -> None:
    assert set(Outcome) - set(STATUS) == {Outcome.COMPLETED}


def test_retry_after_is_a_whole_number_of_seconds_and_never_zero() -> None:
    assert Failure(Outcome.EXPIRED, "late", retry_after_s=0.2).headers == {"Retry-After": "1"}
    assert Failure(Outcome.EXPIRED, "late", retry_after_s=2.1).headers == {"Retry-After": "3"}
    assert Failure(Outcome.BAD_REQUEST, "bad").headers == {}


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize("text", ["http://\udcff", '\ud800\x00\u2028 \U0001f600 "\\'])
def test_an_error_may_have_any_text(dialect: Dialect, text: str) -> None:
    shown = text.replace("\udcff", "?").replace("\ud800", "?")
    body = Failure(Outcome.BAD_REQUEST, text, param=text).response(dialect, {}).body
    assert isinstance(body, bytes)
    assert json.loads(body.decode())["error"]["message"] == shown
    data = error_event(dialect, text).removesuffix(b"\n\n").rpartition(b"data: ")[2]
    event = json.loads(data.decode())
    assert event.get("error", event)["message"] == shown
