"""Prepares the request for the rest of a broken stream."""

from __future__ import annotations

from msgspec import structs

from llmproxy.core.domain import Outcome, Request
from llmproxy.core.estimates.tokens import Estimator
from llmproxy.gateway.proxying.call import Call
from llmproxy.gateway.proxying.continued.join import RestOf
from llmproxy.gateway.proxying.continued.rule import KINDS, How, NotContinued, Rest, write_rest
from llmproxy.gateway.proxying.continued.sent import Sent, read_sent
from llmproxy.gateway.proxying.request_context import Continuation, RequestContext, make_request
from llmproxy.gateway.proxying.response_writer import within
from llmproxy.gateway.request.parsed_body import ParsedBody
from llmproxy.scheduling.attempt import Attempt


class _EndMissing(NotContinued):
    """The client has received the whole answer except the end mark."""


async def prepare_rest(
    context: RequestContext, request: Request, attempt: Attempt, estimator: Estimator
) -> Request | None:
    """Returns the request for the rest of the stream that broke in `attempt`, None if no backend is asked.

    If only the end mark is missing, this writes it and returns None. If the rule forbids to continue, the reason is in
    `record.not_continued`. `request` is the request as it was first scheduled.
    """
    record, target, call = context.record, context.target, context.call
    if call is None or context.rules.config.retry.continue_ == "off":
        return None
    try:
        continuation = await _prepare(context, call, attempt)
    except _EndMissing:
        record.continued, attempt.outcome = How.END, Outcome.COMPLETED
        context.client.write(b"data: [DONE]\n\n")
        await within(context.client.end(), context.client, context.rules.config.timeouts.stall_s)
        return None
    except NotContinued as reason:
        record.not_continued = str(reason)
        return None
    assert target is not None
    context.continuation, context.parsed = continuation, continuation.parsed
    rest = make_request(context, continuation.parsed, target, request.id, estimator)
    left = max(1, request.output_tokens - continuation.rest_of.rest.tokens)
    return structs.replace(rest, output_tokens=left, continued=True)


async def may_continue(context: RequestContext) -> bool:
    """Returns whether another backend may generate the rest of a stream that is still open."""
    assert context.call is not None
    try:
        await _written(context, context.call)
    except _EndMissing:
        return True
    except NotContinued:
        return False
    return True


async def _prepare(context: RequestContext, call: Call, attempt: Attempt) -> Continuation:
    """Returns the broken stream and the request for its rest. Raises NotContinued."""
    config, reader = context.rules.config, context.rules.body_reader
    asked, sent, rest = await _written(context, call)
    parsed = asked
    if rest.body is not asked.body:
        if not context.buffered.add_whole(len(rest.body)):
            raise NotContinued("the proxy keeps as many bytes of request bodies as it may")
        parsed = await reader.read(rest.body, asked.kind)
        if parsed.chain is not None and asked.chain is not None:
            parsed = structs.replace(parsed, chain=structs.replace(parsed.chain, salt=asked.chain.salt))
    end_s = (context.record.tried[0].granted_s or 0.0) + config.timeouts.total_s
    return Continuation(asked, call, attempt, parsed, RestOf(sent, rest, end_s))


async def _written(context: RequestContext, call: Call) -> tuple[ParsedBody, Sent, Rest]:
    """Reads the part of the answer that the client has received, and writes the request for the rest.

    Also returns the client's request. The loop is not blocked for more than about 2 ms. Raises NotContinued, and
    _EndMissing if only the end mark is missing.
    """
    captured, reader = context.captured, context.rules.body_reader
    if call.external:
        raise NotContinued("an external backend, which may run another model, wrote the beginning")
    if context.route.kind not in KINDS:
        raise NotContinued(f"answers of the kind `{context.route.kind}` are not continued")
    asked = context.parsed if context.continuation is None else context.continuation.asked
    assert asked is not None
    if call.tap is None:
        raise NotContinued("the answer is no event stream, or compressed")
    if call.tap.error_sent:
        raise NotContinued("the client has got the engine's error")
    if captured is None or captured.chunks is None:
        raise NotContinued("the answer is longer than the proxy keeps")
    sent = await reader.in_turns(read_sent(b"".join(captured.chunks)))
    if sent is None:
        raise NotContinued("the events of the answer have an unknown shape")
    if sent.finished and (sent.counted or call.hide_usage) and asked.sequences == 1:
        raise _EndMissing
    always = context.rules.config.retry.continue_ == "always"
    rest = await reader.in_turns(write_rest(asked.body, asked.kind, sent, asked.max_tokens, always=always))
    return asked, sent, rest
