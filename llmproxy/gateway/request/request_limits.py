"""The limits of a tenant or a model for a single request: the tokens of the prompt and of the answer."""

from __future__ import annotations

import re
from typing import NoReturn

from msgspec import structs

from llmproxy.config import Config
from llmproxy.config.schema.requests import LimitsConfig
from llmproxy.core.backends.catalogue import Target
from llmproxy.core.domain import Outcome, RequestFacts
from llmproxy.core.estimates.tokens import Estimate, Estimator
from llmproxy.gateway.http.errors import Failure
from llmproxy.gateway.http.routes import BodyKind, Route, Work
from llmproxy.gateway.request.parsed_body import LIMITS, ParsedBody

_WRITTEN = frozenset({BodyKind.CHAT, BodyKind.COMPLETION, BodyKind.RESPONSES, BodyKind.MESSAGES})
"""The kinds of bodies into which the proxy writes the limit of the answer if the client gave none."""
_BATCH = "/v1/chat/completions/batch"
COMPLETION_TOKENS = 16
"""vLLM's default `max_tokens` of a completion.

If `max_tokens` is null, the answer is limited only by the context length.
"""


_INTEGER = re.compile(rb"-?\d{1,19}")
"""A JSON integer of 64 bits. A large body may have any bytes in the place of a number."""


class RequestLimits:
    """The limits of one configuration for single requests. `bool()` is False if there are none."""

    def __init__(self, config: Config) -> None:
        self._tenants = {one.name: one.limits for one in config.tenants if _has_request_limit(one.limits)}
        self._models = {one.name: one.limits for one in config.models if _has_request_limit(one.limits)}

    def __bool__(self) -> bool:
        return bool(self._tenants or self._models)

    def apply(self, route: Route, parsed: ParsedBody, tenant: str, target: Target, estimator: Estimator) -> ParsedBody:
        """Returns `parsed`, with the configured limit of the answer added if the client gave none.

        No limit is added if the engine's own limit (its default or its context) is lower or the body has no known
        field. Raises Failure (400) if the prompt is too long, or the client asks for a longer answer than its tenant or
        model allows.
        """
        of_tenant, of_model = f"tenant {tenant}", f"model {target.requested[:200]}"
        sources = [(of_tenant, self._tenants.get(tenant))]
        sources += [(of_model, self._models.get(name)) for name in dict.fromkeys((target.requested, target.model))]
        owners = [(owner, limits) for owner, limits in sources if limits is not None]
        if not owners or not route.computes:
            return parsed
        prompt_tokens = _at_least(parsed, estimator.bytes_per_token(target.model))
        for owner, limits in owners:
            most = limits.prompt_tokens_max
            if most is not None and prompt_tokens > most:
                about = "" if parsed.prompt_tokens is not None else "about "
                _refuse(
                    f"The prompt has {about}{prompt_tokens:,} tokens, and a request of the {owner} may have {most:,}"
                    " (prompt_tokens_max): send a shorter prompt.",
                    "prompt",
                )
        ceilings = [(limits.max_tokens_max, owner) for owner, limits in owners if limits.max_tokens_max is not None]
        if route.work is not Work.GENERATES or parsed.kind not in LIMITS or not ceilings:
            return parsed
        most, owner = min(ceilings)
        given = parsed.answer_limits()
        # A batch has to name a limit. The context that is left to each of its conversations is unknown.
        for name, value in given or ([("max_tokens", b"null")] if route.path == _BATCH else []):
            if not _INTEGER.fullmatch(value):
                _refuse(f"{name} should be an integer of at most {most:,}, the max_tokens_max of the {owner}.", name)
            asked = int(value)
            if asked > most:
                asks = f"{name} is {asked:,}, and a request of the {owner} may ask for {most:,} (max_tokens_max)"
                _refuse(f"{asks}: ask for less.", name)
        if given or parsed.kind not in _WRITTEN:
            return parsed
        if parsed.kind is BodyKind.COMPLETION and most >= COMPLETION_TOKENS and not parsed.has("max_tokens"):
            return parsed
        context = target.context_tokens
        # An engine refuses a limit that exceeds its context after the prompt. Without a limit, it stops at the context.
        if context is not None and estimator.tokens(target.model, parsed)[0] + most > context:
            return parsed
        return structs.replace(parsed, written_limit=most, max_tokens=most)


def _at_least(facts: RequestFacts, bytes_per_token: float) -> int:
    """Returns a low estimate of the tokens of a prompt, so that no prompt is refused by mistake.

    The learned bytes per token are too small for long prompts if the engine's template adds text to short messages.
    """
    if facts.prompt_tokens is not None:
        return facts.prompt_tokens
    return round(facts.prompt_bytes / max(bytes_per_token, Estimate().bytes_per_token))


def _has_request_limit(limits: LimitsConfig) -> bool:
    return limits.prompt_tokens_max is not None or limits.max_tokens_max is not None


def _refuse(message: str, param: str) -> NoReturn:
    raise Failure(Outcome.BAD_REQUEST, message, param=param)
