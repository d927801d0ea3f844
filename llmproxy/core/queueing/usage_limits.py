"""What one tenant or one model may use: requests in flight, requests and tokens per minute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmproxy.core.domain import Outcome, Refused, Request
from llmproxy.core.rate_limit import TokenBucket
from llmproxy.core.settings import UsageLimit

MINUTE_S = 60.0
UNBOUNDED_FREE = 64
"""Requests that go back to their flows at a time when a limit was lifted."""


class _Use:
    def __init__(self, limit: UsageLimit) -> None:
        self.in_flight = 0
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self.reconfigure(limit, 0.0)

    def reconfigure(self, limit: UsageLimit, now: float) -> None:
        self.limit = limit
        self.requests = _resized(self.requests, limit.requests_per_min, now)
        self.tokens = _resized(self.tokens, limit.tokens_per_min, now)


def _resized(bucket: TokenBucket | None, per_min: float | None, now: float) -> TokenBucket | None:
    """A bucket that holds one minute's worth, from which as much was taken as from `bucket`; None without a rate."""
    if per_min is None:
        return None
    if bucket is None:
        return TokenBucket(per_min, per_min / MINUTE_S)
    bucket.resize(per_min, per_min / MINUTE_S, now)
    return bucket


_UNLIMITED = _Use(UsageLimit())
"""The use of a limit that requests still name although the configuration no longer has it."""


@dataclass(slots=True)
class _Account:
    """One request that has not ended, and the tokens that were taken for it; `settled` once they were counted."""

    tokens: float
    settled: bool = False


class UsageLimits:
    """The usage of all limited tenants and models, over all pools of the process.

    A request beyond the limit in flight waits (`full`). A request beyond a rate is refused (`admit`), because a client
    that knows when to come back can plan, and one that hangs cannot.
    """

    def __init__(self, limits: Mapping[str, UsageLimit]) -> None:
        self._uses = {name: _Use(limit) for name, limit in limits.items()}
        self._accounts: dict[str, _Account] = {}
        self._between: dict[str, Request] = {}

    def reconfigure(self, limits: Mapping[str, UsageLimit], now: float) -> None:
        """Apply other limits. What is in flight, and what was taken in this minute, still counts."""
        for name in [name for name in self._uses if name not in limits]:
            self._uses[name].reconfigure(UsageLimit(), now)
            self._tidy(name)
        for name, limit in limits.items():
            self._uses.setdefault(name, _Use(limit)).reconfigure(limit, now)

    def _use(self, name: str) -> _Use:
        return self._uses.get(name, _UNLIMITED)

    def _tidy(self, name: str) -> None:
        """Forget a removed limit once nothing is in flight under it."""
        use = self._uses[name]
        if not use.in_flight and use.limit == UsageLimit():
            del self._uses[name]

    def admit(self, request: Request, now: float) -> None:
        """Count a new request and the tokens it is expected to use.

        Raises Refused (`rate_limited`) where a rate of one of its limits is used up.
        """
        if not request.limits:
            return
        tokens = float(request.prompt_tokens + request.output_tokens)
        longest_s, message = 0.0, ""
        for name in request.limits:
            use = self._use(name)
            for bucket, amount, key in ((use.requests, 1.0, "requests"), (use.tokens, tokens, "tokens")):
                wait_s = 0.0 if bucket is None else bucket.wait_s(amount, now)
                if wait_s > longest_s:
                    allowed = use.limit.requests_per_min if key == "requests" else use.limit.tokens_per_min
                    message = (
                        f"The limit of {allowed:g} {key} per minute of {in_words(name)} is used up. Try again later."
                    )
                    longest_s = wait_s
        if message:
            raise Refused(Outcome.RATE_LIMITED, message, max(1.0, longest_s))
        self._take(request, 1.0, tokens, now)
        self._accounts[request.id] = _Account(tokens)

    def full(self, request: Request) -> str | None:
        """The limit for which `request` has to wait, because as many are in flight as it allows."""
        for name in request.limits:
            if not self.free(name):
                return name
        return None

    def free(self, name: str) -> int:
        """How many more may be in flight under a limit; so many at a time where it has no bound on them any more."""
        use = self._use(name)
        if use.limit.in_flight is None:
            return UNBOUNDED_FREE
        return max(0, use.limit.in_flight - use.in_flight)

    def booked(self, request: Request) -> None:
        if self._between.pop(request.id, None) is not None:
            # It was in flight all the time.
            return
        for name in request.limits:
            # A limit that went while the request waited may come back while it is in flight.
            self._uses.setdefault(name, _Use(UsageLimit())).in_flight += 1

    def between_stages(self, request: Request) -> None:
        """The prompt was computed, and the answer is to follow: the request is in flight until then."""
        if request.limits:
            self._between[request.id] = request

    def no_more_between(self, request_id: str) -> None:
        """A request between its stages is in flight no more: it ended, or waits again."""
        if (request := self._between.pop(request_id, None)) is not None:
            self._leave(request)

    def _leave(self, request: Request) -> None:
        for name in request.limits:
            self._uses[name].in_flight -= 1
            self._tidy(name)

    def released(self, request: Request, used_tokens: int | None, now: float) -> None:
        """An attempt ended; `used_tokens` as the engine counted them, None when nothing was used or it is unknown."""
        self._leave(request)
        account = self._accounts.get(request.id)
        if account is not None and used_tokens is not None:
            self._take(request, 0.0, used_tokens - (0.0 if account.settled else account.tokens), now)
            account.settled = True

    def ended(self, request: Request, now: float) -> None:
        """The request is over: tokens that were expected and not used are given back."""
        self.no_more_between(request.id)
        account = self._accounts.pop(request.id, None)
        if account is not None and not account.settled:
            self._take(request, 0.0, -account.tokens, now)

    def _take(self, request: Request, requests: float, tokens: float, now: float) -> None:
        for name in request.limits:
            use = self._use(name)
            if use.requests is not None:
                use.requests.take(requests, now)
            if use.tokens is not None:
                use.tokens.take(tokens, now)

    def in_flight(self) -> dict[str, int]:
        """Limit -> requests in flight under it."""
        return {name: use.in_flight for name, use in self._uses.items()}

    def left_per_min(self, name: str, now: float) -> tuple[float | None, float | None]:
        """(Requests, tokens) that may still be taken now under the limit `name`, None where it has no such rate."""
        use = self._use(name)
        requests = None if use.requests is None else use.requests.level(now)
        return requests, None if use.tokens is None else use.tokens.level(now)


def in_words(name: str) -> str:
    """The name of a limit in a sentence: `tenant:acme` is the tenant `acme`."""
    kind, _, whose = name.partition(":")
    return f"the {kind} `{whose}`"
