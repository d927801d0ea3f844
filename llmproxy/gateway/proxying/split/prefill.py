"""Reads the answer to a prefill, which does not go to the client."""

from __future__ import annotations

import asyncio

from llmproxy.core.domain import Verdict
from llmproxy.core.kv_connectors import KvConnector, NotHandedOver
from llmproxy.core.lease_events import Started
from llmproxy.gateway.proxying.call import Call
from llmproxy.gateway.proxying.split.stages import fail_handover
from llmproxy.gateway.proxying.stream_relay import BUFFERED_BYTES_MAX, TAIL_BYTES, check_cut, read_answer
from llmproxy.scheduling.attempt import Attempt, AttemptState
from llmproxy.scheduling.lease import Lease
from llmproxy.upstream.port import Exchange


async def take_prefill(attempt: Attempt, lease: Lease, exchange: Exchange, call: Call, connector: KvConnector) -> None:
    """Reads the answer to a prefill, and keeps its transfer parameters in `call`.

    Without usable parameters, the attempt fails. Raises UpstreamBroken, and TimeoutError if the call was cut.
    """
    attempt.enter(AttemptState.HELD)
    # Some answers repeat members of the request, so a long request may get a long answer.
    bytes_max = BUFFERED_BYTES_MAX + sum(map(len, call.body))
    body = await read_answer(exchange, bytes_max)
    call.tail = body[-TAIL_BYTES:]
    check_cut(call)
    lease.apply(Started(lease.grant.lease), asyncio.get_running_loop().time())
    try:
        if len(body) > bytes_max:
            raise NotHandedOver(f"The answer is longer than {bytes_max} bytes.", missing=False)
        call.parameters = connector.parameters(body)
    except NotHandedOver as error:
        fail_handover(attempt, error)
        return
    if call.parameters.value is not None:
        # The parameters follow the usage, and list each KV block of the prompt, which may be thousands.
        call.tail = body.replace(call.parameters.value, b"null", 1)[-TAIL_BYTES:]
    # The request has no outcome yet: the client may leave, or the decode stage may find no backend.
    attempt.verdict, attempt.prefilled = Verdict.SERVED, True
    attempt.enter(AttemptState.DONE)
