"""Requests and tokens per minute: what is taken when a request comes, and corrected when its tokens were counted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from llmproxy.core.domain import Outcome, Refused, Request
from llmproxy.core.rate_limit import TokenBucket
from llmproxy.core.settings import UsageLimit

MINUTE_S = 60.0
"""A limit allows at once what it allows in this time."""
REQUESTS, TOKENS = "requests", "tokens"
RateName = tuple[str, str]
"""(Limit, REQUESTS or TOKENS)."""
Rate = tuple[str, str, float]
"""(Limit, REQUESTS or TOKENS, how many a minute)."""


class Rates(Protocol):
    """Keeps the rates of usage limits. A request is asked for once, and has ended once."""

    def reconfigure(self, limits: Mapping[str, UsageLimit], now: float) -> None:
        """Apply other limits."""

    def admit(self, request: Request, now: float) -> None:
        """Take a request and the tokens that it is expected to use. Raises Refused (`rate_limited`)."""

    def used(self, request: Request, tokens: float, now: float) -> None:
        """An attempt of an admitted request used these tokens; the first one that did replaces what was expected."""

    def ended(self, request: Request, now: float) -> None:
        """The request is over: tokens that were expected and not used are given back."""

    def left_per_min(self, name: str, now: float) -> tuple[float | None, float | None]:
        """(Requests, tokens) that may still be taken under a limit; None without such a rate, or where nobody knows."""

    def debts(self, now: float) -> dict[RateName, float]:
        """In how many seconds all that was taken is back, of the rates where that is not so. For `restore`."""

    def restore(self, debts: Mapping[RateName, float], now: float) -> None:
        """Take over what another process counted before this one."""


@dataclass(slots=True)
class _Account:
    """One request that has not ended, and the tokens that were taken for it; `settled` once they were counted."""

    tokens: float
    settled: bool = False


class RateLimits:
    """Rates that this process keeps alone, in token buckets."""

    def __init__(self, limits: Mapping[str, UsageLimit]) -> None:
        self._limits = limits
        self._buckets: dict[RateName, TokenBucket] = {}
        self.accounts: dict[str, _Account] = {}
        self.reconfigure(limits, 0.0)

    def reconfigure(self, limits: Mapping[str, UsageLimit], now: float) -> None:
        """Apply other limits; what was taken in this minute still counts."""
        self._limits = limits
        buckets = {}
        for limit, kind, per_min in limit_rates(limits, limits):
            bucket = buckets[limit, kind] = self._buckets.get((limit, kind)) or TokenBucket(per_min, per_min / MINUTE_S)
            bucket.resize(per_min, per_min / MINUTE_S, now)
        self._buckets = buckets

    def admit(self, request: Request, now: float) -> None:
        """See `Rates.admit`. One that is asked for again, because its answer was lost, was counted before."""
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

    def used(self, request: Request, tokens: float, now: float) -> None:
        """See `Rates.used`."""
        account = self.accounts.get(request.id)
        if account is not None:
            self._take(request, tokens - (0.0 if account.settled else account.tokens), now)
            account.settled = True

    def ended(self, request: Request, now: float) -> None:
        """See `Rates.ended`."""
        account = self.accounts.pop(request.id, None)
        if account is not None and not account.settled:
            self._take(request, -account.tokens, now)

    def _take(self, request: Request, tokens: float, now: float) -> None:
        for limit in request.limits:
            if (bucket := self._buckets.get((limit, TOKENS))) is not None:
                bucket.take(tokens, now)

    def left_per_min(self, name: str, now: float) -> tuple[float | None, float | None]:
        """See `Rates.left_per_min`."""
        requests, tokens = (self._buckets.get((name, kind)) for kind in (REQUESTS, TOKENS))
        return None if requests is None else requests.level(now), None if tokens is None else tokens.level(now)

    def debts(self, now: float) -> dict[RateName, float]:
        """See `Rates.debts`."""
        found = ((name, bucket.full_in_s(now)) for name, bucket in self._buckets.items())
        return {name: full_in_s for name, full_in_s in found if full_in_s > 0.0}

    def restore(self, debts: Mapping[RateName, float], now: float) -> None:
        """See `Rates.restore`. What was counted here before is among it, or is less than that."""
        for name in debts.keys() & self._buckets.keys():
            bucket = self._buckets[name]
            bucket.take(max(0.0, debts[name] - bucket.full_in_s(now)) * bucket.refill_per_s, now)


def limit_rates(limits: Mapping[str, UsageLimit], names: Iterable[str]) -> Iterator[Rate]:
    """The rates of these limits."""
    for name in names:
        limit = limits.get(name)
        if limit is None:
            continue
        if limit.requests_per_min is not None:
            yield name, REQUESTS, limit.requests_per_min
        if limit.tokens_per_min is not None:
            yield name, TOKENS, limit.tokens_per_min


def expected(request: Request) -> float:
    """The tokens that a request is expected to use."""
    return float(request.prompt_tokens + request.output_tokens)


def amount(kind: str, tokens: float) -> float:
    """What a request of so many tokens takes of a rate of this kind."""
    return 1.0 if kind == REQUESTS else tokens


def used_up(rate: Rate, wait_s: float) -> Refused:
    """The refusal of a request that may come back after `wait_s`."""
    limit, kind, per_min = rate
    message = f"The limit of {per_min:g} {kind} per minute of {in_words(limit)} is used up. Try again later."
    return Refused(Outcome.RATE_LIMITED, message, max(1.0, wait_s))


def in_words(name: str) -> str:
    """The name of a limit in a sentence: `tenant:acme` is the tenant `acme`."""
    kind, _, whose = name.partition(":")
    return f"the {kind} `{whose}`"
