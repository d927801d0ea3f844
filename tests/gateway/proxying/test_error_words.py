"""The cause of a failure, from all known forms of errors of engines and routers."""

from __future__ import annotations

import pytest

from llmproxy.core.retry import Cause
from llmproxy.gateway.proxying.error_words import answer_cause, event_cause
from llmproxy.gateway.proxying.sse import StreamTap

REJECTED = [
    '{"error":{"message":"bad","type":"BadRequestError","param":null,"code":400}}',
    '{"error":{"message":"bad","type":"BadRequestError","code":"400"}}',
    '{"error":{"message":"bad","type":"Bad Request","code":null}}',
    '{"error":{"message":"long","type":"invalid_request_error","code":"context_length_exceeded"}}',
    '{"error":{"message":"long","code":"context_length_exceeded"}}',
    '{"error":{"message":"bad","type":"UnprocessableEntityError","code":422}}',
    '{"error":{"message":"bad","status":"INVALID_ARGUMENT"},"type":"invalid_argument"}',
    '{"error":{"message":"bad","status_code":413}}',
    '{"type":"error","error":{"type":"invalid_request_error","message":"long"}}',
    '{"type":"error","error":{"type":"request_too_large","message":"long"}}',
    '{"type":"error","code":"invalid_prompt","message":"long","param":null}',
    '{"type":"response.failed","response":{"id":"r","error":{"code":"invalid_prompt","message":"long"}}}',
    '{"type":"response.failed","response":{"error":{"code":"image_too_large","message":"large"}}}',
    '{"object":"error","message":"long","type":"BadRequestError","param":null,"code":400}',
    '{"id":"1","choices":[],"error":{"message":"long","code":400}}',
    '{"error":"long","code":400}',
    '{"error":{"message":"tool `EngineDead` is unknown","type":"BadRequestError","code":400}}',
    '{"error":{"message":"EngineDead is no tool","type":"BadRequestError","code":400}}',
    '{"error":{"message":"bad: EngineCore encountered an issue","type":"invalid_request_error"}}',
]
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
REPEATED = (
    '{"error":{"message":"The chat template failed on the messages of this request, which are: the engine is dead, it'
    ' cannot schedule new futures","code":500}}'
)
OTHERS = [
    ('{"error":{"message":"oom","type":"InternalServerError","code":500}}', Cause.ERROR),
    ('{"type":"error","error":{"type":"api_error","message":"oom"}}', Cause.ERROR),
    ('{"type":"response.failed","response":{"error":{"code":"server_error","message":"oom"}}}', Cause.ERROR),
    ('{"error":{"message":"The code is 400 and invalid_request","type":"server_error"}}', Cause.ERROR),
    ('{"error":"no JSON', Cause.ERROR),
    ('{"type":"error","error":{"type":"overloaded_error","message":"busy"}}', Cause.BUSY),
    ('{"error":{"message":"busy","code":"rate_limit_exceeded"}}', Cause.BUSY),
    ('{"error":{"message":"busy","code":503}}', Cause.BUSY),
    ('{"type":"error","error":{"type":"authentication_error","message":"key"}}', Cause.UNAUTHORIZED),
    ('{"error":{"message":"key","type":"invalid_request_error","code":"invalid_api_key"}}', Cause.UNAUTHORIZED),
    ('{"error":{"message":"no","code":"model_not_found"}}', Cause.NOT_SERVED),
    ('{"error":{"message":"slow","type":"timeout_error"}}', Cause.OVERRAN),
    ('{"error":{"message":"EngineCore encountered an issue.","code":500}}', Cause.ENGINE_DEAD),
    ('{"error":{"message":"died","type":"EngineDeadError","code":500}}', Cause.ENGINE_DEAD),
    ('{"error":{"message":"Background loop has errored already.","code":500}}', Cause.ENGINE_DEAD),
    ('{"error":{"message":"Internal error: AsyncEngineDeadError()","code":500}}', Cause.ENGINE_DEAD),
    (REPEATED, Cause.ERROR),
    (f'{{"error":{{"message":"{DEAD}","type":"BadRequestError","param":null,"code":400}}}}', Cause.ENGINE_DEAD),
    (f'{{"object":"error","message":"{DEAD}","type":"BadRequestError","code":400}}', Cause.ENGINE_DEAD),
    (f'{{"error":{{"message":"EngineDeadError: {DEAD}","type":"EngineDeadError","code":503}}}}', Cause.ENGINE_DEAD),
    ('{"error":{"message":"Background loop has errored already.","code":400}}', Cause.ENGINE_DEAD),
    ('{"error":{"message":"no","type":"AsyncEngineDeadError","code":503}}', Cause.ENGINE_DEAD),
]


@pytest.mark.parametrize(("event", "cause"), [*((event, Cause.REJECTED) for event in REJECTED), *OTHERS])
def test_an_error_event_has_the_cause_that_it_names(event: str, cause: Cause) -> None:
    assert event_cause(event.encode()) is cause


@pytest.mark.parametrize("event", REJECTED)
def test_a_stream_has_an_error_in_every_spelling(event: str) -> None:
    tap = StreamTap()
    tap.feed(f"data: {event}\n\n".encode())
    assert (tap.error_first, tap.error.decode()) == (True, event)


@pytest.mark.parametrize(
    "event",
    [
        '{"id":"1","choices":[{"delta":{"content":"\\"error\\": 1"}}]}',
        '{"id":"1","choices":[{"delta":{"content":"a"}}],"error":null}',
        '{"id":"1","choices":[{"delta":{"content":"data: {\\"error\\": "}}]}',
        '{"error":null,"id":"1"}',
        '{"error": null, "choices": [{"index": 0}]}',
        '{"type":"response.created","response":{"id":"r","error":null}}',
    ],
)
def test_an_event_that_only_speaks_of_errors_is_none(event: str) -> None:
    tap = StreamTap()
    tap.feed(f"data: {event}\n\n".encode())
    assert not tap.error_seen


NO_MODEL = b'{"error":{"message":"The model `a` does not exist.","type":"NotFoundError","param":"model","code":404}}'
NO_ADAPTER = b'{"type":"error","error":{"type":"NotFoundError","message":"The model `a` does not exist."}}'
NO_RESPONSE = b'{"error":{"message":"Response with id resp_1 not found.","param":"response_id","code":404}}'
DRAINING = b'{"error":{"message":"cannot schedule new futures after shutdown","code":500}}'


@pytest.mark.parametrize(
    ("status", "body", "cause"),
    [
        (400, b"", Cause.REJECTED), (422, b"", Cause.REJECTED), (501, b"", Cause.REJECTED),
        (401, b"", Cause.UNAUTHORIZED), (403, b"", Cause.UNAUTHORIZED),
        (404, b'{"detail":"Not Found"}', Cause.REJECTED), (404, NO_RESPONSE, Cause.REJECTED),
        (404, NO_MODEL, Cause.NOT_SERVED), (404, NO_ADAPTER, Cause.NOT_SERVED), (302, b"", Cause.NOT_SERVED),
        *((status, b"", Cause.BUSY) for status in (408, 409, 425, 429, 503, 529)),
        (500, b"", Cause.ERROR), (502, b"", Cause.ERROR), (504, b"", Cause.OVERRAN),
        (500, DRAINING, Cause.DRAINING), (500, b"EngineCore encountered an issue.", Cause.ENGINE_DEAD),
        (500, REPEATED.encode(), Cause.ERROR), (500, b'{"detail":"The engine is dead"}', Cause.ENGINE_DEAD),
    ],
)  # fmt: skip
def test_an_answer_has_the_cause_of_its_status_and_words(status: int, body: bytes, cause: Cause) -> None:
    assert answer_cause(status, body, own_key=True) is cause


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_of_the_client_is_its_own_matter(status: int) -> None:
    assert answer_cause(status, b"", own_key=False) is Cause.REJECTED
    event = b'{"type":"error","error":{"type":"authentication_error","message":"key"}}'
    assert event_cause(event, own_key=False) is Cause.REJECTED
