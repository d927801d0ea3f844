"""Limits of requests and tokens per minute. Estimated tokens are charged on arrival and corrected by the real usage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmproxy.core.domain import Outcome, Refused, Request, Usage, Verdict
from llmproxy.core.settings import UsageLimit
from llmproxy.core.token_bucket import TokenBucket

MINUTE_S = 60.0  # The burst of a limit: everything that it allows in this time may be used at once.
REQUESTS, TOKENS = "requests", "tokens"
RateName = tuple[str, str]  # (Limit, REQUESTS or TOKENS).


@dataclass(slots=True)
class _Account:
    """The charge of a request that has not ended."""

    tokens: float  # Expected tokens, charged on arrival.
    corrected: bool = False  # Whether real tokens of an attempt have been charged already.


class RateLimits:
    """The rate limits of tenants and models, as token buckets."""

    def __init__(self, limits: Mapping[str, UsageLimit]) -> None:
        self._buckets: dict[RateName, TokenBucket] = {}
        self.accounts: dict[str, _Account] = {}
        self.reconfigure(limits, 0.0)

    def reconfigure(self, limits: Mapping[str, UsageLimit], now: float) -> None:
        """Applies new limits. Charges of the last minute still count."""
        buckets = {}
        for name, limit in limits.items():
            for kind, per_min in ((REQUESTS, limit.requests_per_min), (TOKENS, limit.tokens_per_min)):
                if per_min is not None:
                    refill_per_s = per_min / MINUTE_S
                    bucket = self._buckets.get((name, kind)) or TokenBucket(per_min, refill_per_s)
                    bucket.resize(per_min, refill_per_s, now)
                    buckets[name, kind] = bucket
        self._buckets = buckets

    def admit(self, request: Request, now: float) -> None:
        """Charges a request and its expected tokens, once even if a caller that lost the reply calls again.

        Raises Refused (`rate_limited`), with the time until the slowest rate allows the request.
        """
        if request.id in self.accounts:
            return
        tokens = expected(request)
        charges = {REQUESTS: 1.0, TOKENS: tokens}
        rates = [(name, kind) for name in request.limits for kind in charges if (name, kind) in self._buckets]
        waits_s = {rate: self._buckets[rate].wait_s(charges[rate[1]], now) for rate in rates}
        slowest = max(rates, key=waits_s.__getitem__, default=None)
        if slowest is not None and waits_s[slowest] > 0.0:
            name, kind = slowest
            limit = f"{self._buckets[slowest].capacity:g} {kind} per minute of {in_words(name)}"
            message = f"The limit of {limit} is used up. Try again later."
            raise Refused(Outcome.RATE_LIMITED, message, max(1.0, waits_s[slowest]))
        for rate in rates:
            self._buckets[rate].take(charges[rate[1]], now)
        self.accounts[request.id] = _Account(tokens)

    def resume(self, request: Request) -> None:
        """Opens an account for a running request whose expected tokens another process has charged."""
        if request.limits:
            self.accounts.setdefault(request.id, _Account(expected(request)))

    def used(self, request: Request, tokens: float, now: float) -> None:
        """Charges the tokens of one attempt. The first call for a request replaces its expected tokens."""
        account = self.accounts.get(request.id)
        if account is not None:
            self._take(request, tokens - (0.0 if account.corrected else account.tokens), now)
            account.corrected = True

    def ended(self, request: Request, now: float) -> None:
        """Refunds the expected tokens of an ended request that no `used` call replaced."""
        account = self.accounts.pop(request.id, None)
        if account is not None and not account.corrected:
            self._take(request, -account.tokens, now)

    def _take(self, request: Request, tokens: float, now: float) -> None:
        for limit in request.limits:
            if (bucket := self._buckets.get((limit, TOKENS))) is not None:
                bucket.take(tokens, now)

    def left_per_min(self, name: str, now: float) -> tuple[float | None, float | None]:
        """Returns the remaining (requests, tokens) of a limit; None for a rate that is not configured."""
        requests, tokens = (self._buckets.get((name, kind)) for kind in (REQUESTS, TOKENS))
        return None if requests is None else requests.level(now), None if tokens is None else tokens.level(now)

    def debts(self, now: float) -> dict[RateName, float]:
        """Maps each rate limit in use to the seconds until it is unused again. The input of `restore`."""
        found = ((name, bucket.full_in_s(now)) for name, bucket in self._buckets.items())
        return {name: full_in_s for name, full_in_s in found if full_in_s > 0.0}

    def restore(self, debts: Mapping[RateName, float], now: float) -> None:
        """Takes over the debts of another process. Each rate keeps the greater of its own and the restored debt."""
        for name in debts.keys() & self._buckets.keys():
            bucket = self._buckets[name]
            bucket.take(max(0.0, debts[name] - bucket.full_in_s(now)) * bucket.refill_per_s, now)


def expected(request: Request) -> float:
    """Returns the expected tokens of prompt and answer; for the rest of a stream, of the answer alone."""
    return float(request.output_tokens + (0 if request.continued else request.prompt_tokens))


def charged_usage(request: Request, verdict: Verdict, usage: Usage | None) -> Usage | None:
    """Returns the tokens that an attempt used. Without a usage: the expected tokens if it was served, else None."""
    return expected_usage(request) if usage is None and verdict is Verdict.SERVED else usage


def expected_usage(request: Request) -> Usage:
    return Usage(request.prompt_tokens, request.output_tokens)


def in_words(name: str) -> str:
    """Returns the name of a limit for messages: `tenant:acme` becomes "the tenant `acme`"."""
    kind, _, whose = name.partition(":")
    return f"the {kind} `{whose}`"
