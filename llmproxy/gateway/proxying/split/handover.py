"""Carries the result of a prefill to the decode stage of the same request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from llmproxy.config import BackendConfig
from llmproxy.core.domain import Grant, Stage
from llmproxy.core.lease_events import Recomputing
from llmproxy.gateway.proxying.request_context import RequestContext
from llmproxy.gateway.proxying.split.stages import Handover, Warnings, refuse_unreachable
from llmproxy.scheduling.attempt import Attempt, Split
from llmproxy.scheduling.lease import Lease


class SplitServing:
    """The steps before and after each attempt of a split request. `backends` maps names to all backends."""

    def __init__(self, backends: Mapping[str, BackendConfig]) -> None:
        self._backends = backends
        self._warnings = Warnings()

    async def take(self, context: RequestContext, lease: Lease) -> Handover | None:
        """Returns the result of the prefill if the attempt of `lease` is the decode stage, otherwise None.

        The result serves only one decode, so `context.handover` becomes None. If the request starts again, because the
        backend reserved for the decode stage is gone, the prompt is freed.
        """
        if lease.grant.request.stage is not Stage.DECODE:
            # The backend reserved for the decode stage is gone, and the request starts again.
            await self.release(context)
        handover, context.handover = context.handover, None
        return handover

    def usable(self, handover: Handover, attempt: Attempt, lease: Lease, url: str) -> Handover | None:
        """Returns `handover` if the decode backend at `url` can fetch the prompt, otherwise None.

        If the prefill engine may have freed the prompt, the decode backend computes the prompt itself. If the decode
        backend cannot reach the prefill engine, `attempt` fails without a call.
        """
        if handover.too_late(lease.grant.at_s):
            # The prefill engine may have freed the blocks, so the decode engine computes the prompt itself.
            attempt.split = Split.LATE
            lease.apply(Recomputing(lease.grant.lease), asyncio.get_running_loop().time())
            return None
        if handover.unreachable_from(url):
            refuse_unreachable(attempt, handover, lease)
            return None
        return handover

    def keep(self, context: RequestContext, backend: BackendConfig, grant: Grant) -> None:
        """Keeps the result of a prefill, if the call has one, in `context.handover` for the decode stage."""
        call = context.call
        if call is not None and call.parameters is not None:
            now, answers_on = asyncio.get_running_loop().time(), grant.placed.answers_on
            context.handover = Handover(backend.name, backend.url, call.parameters, now, answers_on)

    def note(self, context: RequestContext, attempt: Attempt, grant: Grant) -> None:
        """Records whether the request was served split, or why not, and logs a warning about a stage that failed."""
        record = context.record
        if attempt.split is not None:
            self._warnings.note(attempt.split, grant.placed.backend, attempt)
            record.split = attempt.split
        elif record.split is None and grant.request.stage is Stage.DECODE:
            record.split = Split.SPLIT
        elif record.split is None and grant.placed.unsplit:
            record.split = Split.WHOLE

    async def release(self, context: RequestContext) -> None:
        """Frees the prompt of a prefill whose decode stage does not happen. Raises nothing."""
        handover, context.handover = context.handover, None
        if handover is not None and context.request is not None:
            backend = self._backends.get(handover.answers_on or "")
            await context.rules.releaser.release(handover, backend, context.request.model)
