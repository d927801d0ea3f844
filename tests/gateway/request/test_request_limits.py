"""Limits of a single request: refusals, and the limit that is written into bodies without one."""

from __future__ import annotations

from typing import Any

import pytest

from llmproxy.config import Config, hash_of
from llmproxy.core.backends.catalogue import Target
from llmproxy.core.domain import Usage
from llmproxy.core.estimates.tokens import Estimator
from llmproxy.gateway.http.errors import Failure
from llmproxy.gateway.http.routes import SCHEDULED, BodyKind
from llmproxy.gateway.request.body_reader import read_large, read_small
from llmproxy.gateway.request.json_scan import drain
from llmproxy.gateway.request.parsed_body import ParsedBody
from llmproxy.gateway.request.request_limits import RequestLimits

PATHS = {
    BodyKind.CHAT: "/v1/chat/completions",
    BodyKind.COMPLETION: "/v1/completions",
    BodyKind.RESPONSES: "/v1/responses",
    BodyKind.MESSAGES: "/v1/messages",
}
TARGET = Target("alias", "base", "base", None, 4_096)


def limits_of(tenant: dict[str, int], alias: dict[str, int] | None = None) -> RequestLimits:
    models: list[dict[str, Any]] = [{"name": "alias", "target": "base", "limits": alias or {}}]
    acme = {"name": "acme", "keys": [hash_of("a")], "limits": tenant}
    return RequestLimits(Config.model_validate({"tenants": [acme], "models": models}))


def kept(limits: RequestLimits, body: bytes, kind: BodyKind, large: bool = False, tenant: str = "acme") -> ParsedBody:
    parsed = drain(read_large(body, kind)) if large else read_small(body, kind)
    return limits.apply(SCHEDULED[PATHS[kind]], parsed, tenant, TARGET, Estimator())


def sent(parsed: ParsedBody) -> bytes:
    return b"".join(parsed.spliced().parts)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        (BodyKind.CHAT, b'{ "messages":[] }', b'{"max_tokens":50, "messages":[] }'),
        (BodyKind.CHAT, b'{"max_tokens" : null}', b'{"max_tokens" : 50}'),
        (BodyKind.CHAT, b'{"max_completion_tokens":null}', b'{"max_tokens":50,"max_completion_tokens":null}'),
        (BodyKind.CHAT, b'{"max_completion_tokens":null,"max_tokens":7}', None),
        (BodyKind.CHAT, b'{"max_completion_tokens":50,"max_tokens":900}', None),
        (BodyKind.CHAT, b'{"max_tokens":900,"max_tokens":9}', None),
        (BodyKind.COMPLETION, b'{"prompt":"a"}', None),
        (BodyKind.COMPLETION, b'{"prompt":"a","max_tokens":null}', b'{"prompt":"a","max_tokens":50}'),
        (BodyKind.COMPLETION, b'{"prompt":"a","max_tokens":0,"echo":true}', None),
        (BodyKind.RESPONSES, b'{"input":"a"}', b'{"max_output_tokens":50,"input":"a"}'),
        (BodyKind.MESSAGES, b'{"max_tokens":50}', None),
        (BodyKind.MESSAGES, b"{}", b'{"max_tokens":50}'),
    ],
)
def test_the_limit_is_written_only_where_a_body_gives_none(
    kind: BodyKind, body: bytes, expected: bytes | None, large: bool
) -> None:
    parsed = kept(limits_of({"max_tokens_max": 50}), body, kind, large)
    assert sent(parsed) == (body if expected is None else expected)
    if expected is not None:
        assert parsed.max_tokens == 50


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b'{"max_tokens":51}', "max_tokens is 51, and a request of the tenant acme may ask for 50 ", "max_tokens"),
        (b'{"max_completion_tokens":51,"max_tokens":1}', "max_completion_tokens is 51, and ", "max_completion_tokens"),
        (b'{"max_tokens":1,"max_tokens":51}', "max_tokens is 51, and ", "max_tokens"),
        (b'{"max_tokens":"9"}', "max_tokens should be an integer of at most 50, ", "max_tokens"),
        (b'{"max_tokens":1e9}', "max_tokens should be an integer ", "max_tokens"),
        (b'{"max_tokens":' + b"9" * 30 + b"}", "max_tokens should be an integer ", "max_tokens"),
    ],
)
def test_a_limit_beyond_it_is_refused(body: bytes, message: str, param: str, large: bool) -> None:
    with pytest.raises(Failure) as caught:
        kept(limits_of({"max_tokens_max": 50}), body, BodyKind.CHAT, large)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(message)


def test_prompts_beyond_it_are_refused() -> None:
    limits = limits_of({"prompt_tokens_max": 100})
    kept(limits, b'{"prompt":"' + b"x" * 300 + b'"}', BodyKind.COMPLETION)
    for body, said in (
        (b'{"prompt":"' + b"x" * 4_000 + b'"}', "about 1,000"),
        (b'{"prompt":[' + b"7," * 100 + b"7]}", "101"),
    ):
        with pytest.raises(Failure) as caught:
            kept(limits, body, BodyKind.COMPLETION)
        assert caught.value.message == (
            f"The prompt has {said} tokens, and a request of the tenant acme may have 100 (prompt_tokens_max):"
            " send a shorter prompt."
        )


def test_short_messages_do_not_make_longer_prompts_look_too_long() -> None:
    limits, estimator = limits_of({"prompt_tokens_max": 300}), Estimator()
    for _ in range(50):
        # A template of 30 tokens around a word.
        estimator.learn("base", 5, 1, Usage(31, 4))
    parsed = read_small(b'{"prompt":"' + b"x" * 900 + b'"}', BodyKind.COMPLETION)
    assert limits.apply(SCHEDULED["/v1/completions"], parsed, "acme", TARGET, estimator) is parsed


def test_the_lowest_of_tenant_and_model_counts_and_others_are_free() -> None:
    limits, body = limits_of({"max_tokens_max": 50}, {"max_tokens_max": 20}), b'{"max_tokens":30}'
    with pytest.raises(Failure, match="a request of the model alias may ask for 20 "):
        kept(limits, body, BodyKind.CHAT)
    free = limits_of({"max_tokens_max": 50})
    assert sent(kept(free, b'{"prompt":"a"}', BodyKind.COMPLETION, tenant="zeta")) == b'{"prompt":"a"}'
    assert not limits_of({"in_flight": 3})


def test_no_limit_is_written_that_the_context_cannot_hold() -> None:
    # The engine would refuse it, and without it ends at its context.
    limits, body = limits_of({"max_tokens_max": 4_000}), b'{"max_tokens":null,"prompt":"' + b"x" * 2_000 + b'"}'
    assert sent(kept(limits, body, BodyKind.COMPLETION)) == body


def test_a_limit_below_the_default_of_completions_is_written() -> None:
    parsed = kept(limits_of({"max_tokens_max": 9}), b'{"prompt":"a"}', BodyKind.COMPLETION)
    assert sent(parsed) == b'{"max_tokens":9,"prompt":"a"}'


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions/batch", b'{"messages":[]}', "max_tokens"),
        ("/v1/chat/completions/batch", b'{"max_tokens":51,"sampling_params":{"max_tokens":9}}', "max_tokens"),
        ("/inference/v1/generate", b'{"sampling_params":{"max_tokens":51}}', "sampling_params.max_tokens"),
        ("/inference/v1/generate", b'{"sampling_params":{"max_tokens":null}}', "sampling_params.max_tokens"),
        (
            "/inference/v1/generate",
            b'{"max_tokens":9,"sampling_params":{"max_tokens":51}}',
            "sampling_params.max_tokens",
        ),
        ("/inference/v1/generate", b'{"sampling_params":{"max_tokens":50}}', None),
        ("/inference/v1/generate", b'{"sampling_params":{}}', None),
        ("/v1/chat/completions/batch", b'{"max_tokens":50}', None),
    ],
)
def test_no_route_goes_past_the_limit_of_answers(path: str, body: bytes, param: str | None, large: bool) -> None:
    route, limits = SCHEDULED[path], limits_of({"max_tokens_max": 50})
    parsed = drain(read_large(body, route.kind)) if large else read_small(body, route.kind)
    if param is None:
        assert limits.apply(route, parsed, "acme", TARGET, Estimator()) is parsed
        return
    with pytest.raises(Failure) as caught:
        limits.apply(route, parsed, "acme", TARGET, Estimator())
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("value", [b"NaN", b"5.0", b"5e", b'"9"', b"[" * 2_000 + b"]" * 2_000])
def test_a_wrong_number_in_a_large_body_is_refused(value: bytes) -> None:
    route, limits = SCHEDULED["/inference/v1/generate"], limits_of({"max_tokens_max": 50})
    parsed = drain(read_large(b'{"token_ids":[1],"sampling_params":{"max_tokens":' + value + b"}}", route.kind))
    with pytest.raises(Failure, match=r"sampling_params\.max_tokens should be an integer") as caught:
        limits.apply(route, parsed, "acme", TARGET, Estimator())
    assert caught.value.status == 400


@pytest.mark.parametrize("name", ["role", "tool_call_id"])
def test_a_prompt_in_the_role_of_a_message_counts(name: str) -> None:
    body = b'{"messages":[{"' + name.encode() + b'":"' + b"x" * 4_000 + b'"}]}'
    with pytest.raises(Failure, match="about 1,000 tokens"):
        kept(limits_of({"prompt_tokens_max": 100}), body, BodyKind.CHAT)
