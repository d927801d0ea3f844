"""Limits of requests and tokens per minute. Estimated tokens are charged on arrival and corrected by the real usage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from llmproxy.core.domain import Outcome, Refused, Request, Usage, Verdict
from llmproxy.core.settings import UsageLimit
from llmproxy.core.token_bucket import TokenBucket

MINUTE_S = 60.0  # The burst of a limit: everything that it allows in this time may be used at once.
REQUESTS, TOKENS = "requests", "tokens"
RateName = tuple[str, str]  # (Limit, REQUESTS or TOKENS).
Rate = tuple[str, str, float]  # (Limit, REQUESTS or TOKENS, number per minute).


class Rates(Protocol):
    """Enforces the rate limits of tenants and models. `admit` and `ended` are called once for each request."""

    def reconfigure(self, limits: Mapping[str, UsageLimit], now: float) -> None:
        """Applies new limits. Requests and tokens that were already charged still count."""

    def admit(self, request: Request, now: float) -> None:
        """Charges a request and its expected tokens. Raises Refused (`rate_limited`)."""

    def resume(self, request: Request) -> None:
        """Expects the real tokens of a running request, which another process has charged."""

    def used(self, request: Request, tokens: float, now: float) -> None:
        """Charges the tokens of one attempt. The first call for a request replaces its expected tokens."""

    def ended(self, request: Request, now: float) -> None:
        """Refunds the expected tokens of an ended request that no `used` call replaced."""

    def left_per_min(self, name: str, now: float) -> tuple[float | None, float | None]:
        """Returns the remaining (requests, tokens) of a limit; None for a rate that is not configured or unknown."""

    def debts(self, now: float) -> dict[RateName, float]:
        """Maps each rate limit in use to the seconds until it is unused again. The input of `restore`."""

    def restore(self, debts: Mapping[RateName, float], now: float) -> None:
        """Takes over the debts of the process that this process replaces."""


@dataclass(slots=True)
class _Account:
    """The charge of a request that has not ended."""

    tokens: float  # Expected tokens, charged on arrival.
    corrected: bool = False  # Whether real tokens of an attempt have been charged already.


class RateLimits:
    """Rate limits of this process alone, as token buckets."""

    def __init__(self, limits: Mapping[str, UsageLimit]) -> None:
        self._limits = limits
        self._buckets: dict[RateName, TokenBucket] = {}
        self.accounts: dict[str, _Account] = {}
        self.reconfigure(limits, 0.0)

    def reconfigure(self, limits: Mapping[str, UsageLimit], now: float) -> None:
        """Applies new limits. Charges of the last minute still count."""
        self._limits = limits
        buckets = {}
        for limit, kind, per_min in limit_rates(limits, limits):
            bucket = buckets[limit, kind] = self._buckets.get((limit, kind)) or TokenBucket(per_min, per_min / MINUTE_S)
            bucket.resize(per_min, per_min / MINUTE_S, now)
        self._buckets = buckets

    def admit(self, request: Request, now: float) -> None:
        """Charges a request once, even if a caller that lost the reply calls again. Raises Refused."""
        if request.id in self.accounts:
            return
        tokens, longest, longest_s = expected(request), None, 0.0
        rates = list(limit_rates(self._limits, request.limits))
        for rate in rates:
            wait_s = self._buckets[rate[:2]].wait_s(amount(rate[1], tokens), now)
            if wait_s > longest_s:
                longest, longest_s = rate, wait_s
        if longest is not None:
            raise used_up(longest, longest_s)
        for limit, kind, _ in rates:
            self._buckets[limit, kind].take(amount(kind, tokens), now)
        self.accounts[request.id] = _Account(tokens)

    def resume(self, request: Request) -> None:
        if request.limits:
            self.accounts.setdefault(request.id, _Account(expected(request)))

    def used(self, request: Request, tokens: float, now: float) -> None:
        account = self.accounts.get(request.id)
        if account is not None:
            self._take(request, tokens - (0.0 if account.corrected else account.tokens), now)
            account.corrected = True

    def ended(self, request: Request, now: float) -> None:
        account = self.accounts.pop(request.id, None)
        if account is not None and not account.corrected:
            self._take(request, -account.tokens, now)

    def _take(self, request: Request, tokens: float, now: float) -> None:
        for limit in request.limits:
            if (bucket := self._buckets.get((limit, TOKENS))) is not None:
                bucket.take(tokens, now)

    def left_per_min(self, name: str, now: float) -> tuple[float | None, float | None]:
        requests, tokens = (self._buckets.get((name, kind)) for kind in (REQUESTS, TOKENS))
        return None if requests is None else requests.level(now), None if tokens is None else tokens.level(now)

    def debts(self, now: float) -> dict[RateName, float]:
        found = ((name, bucket.full_in_s(now)) for name, bucket in self._buckets.items())
        return {name: full_in_s for name, full_in_s in found if full_in_s > 0.0}

    def restore(self, debts: Mapping[RateName, float], now: float) -> None:
        """Takes over the debts of another process. Each rate keeps the greater of its own and the restored debt."""
        for name in debts.keys() & self._buckets.keys():
            bucket = self._buckets[name]
            bucket.take(max(0.0, debts[name] - bucket.full_in_s(now)) * bucket.refill_per_s, now)


def limit_rates(limits: Mapping[str, UsageLimit], names: Iterable[str]) -> Iterator[Rate]:
    """Yields the rates of the named limits, except names without a limit."""
    for name in names:
        limit = limits.get(name)
        if limit is None:
            continue
        if limit.requests_per_min is not None:
            yield name, REQUESTS, limit.requests_per_min
        if limit.tokens_per_min is not None:
            yield name, TOKENS, limit.tokens_per_min


def expected(request: Request) -> float:
    """Returns the expected tokens of prompt and answer; for the rest of a stream, of the answer alone."""
    return float(request.output_tokens + (0 if request.continued else request.prompt_tokens))


def charged_usage(request: Request, verdict: Verdict, usage: Usage | None) -> Usage | None:
    """Returns the tokens that an attempt used; without a usage, the expected tokens of a served one."""
    return expected_usage(request) if usage is None and verdict is Verdict.SERVED else usage


def expected_usage(request: Request) -> Usage:
    return Usage(request.prompt_tokens, request.output_tokens)


def amount(kind: str, tokens: float) -> float:
    """Returns the charge of a request with `tokens` for a rate of this kind: 1 for REQUESTS, `tokens` for TOKENS."""
    return 1.0 if kind == REQUESTS else tokens


def used_up(rate: Rate, wait_s: float) -> Refused:
    """Returns the refusal of a request over `rate`. The client may retry after `wait_s`."""
    limit, kind, per_min = rate
    message = f"The limit of {per_min:g} {kind} per minute of {in_words(limit)} is used up. Try again later."
    return Refused(Outcome.RATE_LIMITED, message, max(1.0, wait_s))


def in_words(name: str) -> str:
    """Returns the name of a limit for messages: `tenant:acme` becomes "the tenant `acme`"."""
    kind, _, whose = name.partition(":")
    return f"the {kind} `{whose}`"
