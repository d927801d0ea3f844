"""Answers the client of a failed request: with the backend's own error, or with an error of the proxy."""

from __future__ import annotations

from contextlib import suppress

from aiohttp import web

from llmproxy.core.domain import Outcome, Verdict
from llmproxy.gateway.http.errors import Failure, error_event
from llmproxy.gateway.proxying.relay import error_events
from llmproxy.gateway.proxying.request_context import RequestContext
from llmproxy.gateway.proxying.response_writer import within
from llmproxy.scheduling.attempt import Attempt


async def deliver_failure(context: RequestContext, attempt: Attempt) -> None:
    """Sends the backend's own error answer to the client, and records the outcome.

    A 503 without Retry-After gets one. If the client has already got comments of a stream, the error is sent as events.
    Raises Failure if the backend sent no error answer.
    """
    answer = context.call.answer if context.call is not None else None
    if answer is None:
        if attempt.verdict is Verdict.LOCAL_FAILURE:
            raise Failure(attempt.outcome, attempt.message, status=503, retry_after_s=1.0)
        status = attempt.status if attempt.outcome is Outcome.UPSTREAM_STATUS else None
        raise Failure(attempt.outcome, attempt.message, status=status)
    if context.client.only_comments:
        context.record.end(attempt.outcome, answer.status, attempt.message)
        await _end_stream(context, error_events(answer, context.route.dialect, attempt.message))
        return
    headers = answer.headers
    if answer.status == 503 and not any(name.lower() == "retry-after" for name, _ in headers):
        headers = [*headers, ("Retry-After", "1")]
    context.client.commit(answer.status, answer.reason, headers)
    context.client.write(answer.body)
    await within(context.client.end(), context.client, context.rules.config.timeouts.stall_s)
    context.record.end(attempt.outcome, answer.status, attempt.message)


async def fail(context: RequestContext, failure: Failure) -> web.StreamResponse:
    """Records a failure of the proxy, and sends it to the client if a stream has begun.

    Returns the response for aiohttp.
    """
    context.record.end(failure.outcome, failure.status, failure.message)
    client, dialect = context.client, context.route.dialect
    if client.response is not None:
        # The client has got the head of a stream and comments.
        with suppress(ConnectionError):
            await _end_stream(context, error_event(dialect, failure.message, failure.status))
        return client.response
    return failure.response(dialect, {"x-request-id": context.record.request_id, **context.extra})


async def _end_stream(context: RequestContext, event: bytes) -> None:
    """Ends an SSE stream in which the client got only comments: writes a last event, then ends the HTTP body."""
    context.client.write(event)
    await within(context.client.end(), context.client, context.rules.config.timeouts.stall_s)
