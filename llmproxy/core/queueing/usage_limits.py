"""What one tenant or one model may use: requests in flight, requests and tokens per minute."""

from __future__ import annotations

from collections.abc import Mapping

from llmproxy.core.domain import Request
from llmproxy.core.queueing.rates import RateLimits, Rates
from llmproxy.core.settings import UsageLimit

UNBOUNDED_FREE = 64
"""Requests that go back to their flows at a time when a limit was lifted."""


class _Use:
    def __init__(self, most: int | None) -> None:
        self.in_flight = 0
        self.most = most


_UNLIMITED = _Use(None)
"""The use of a limit that requests still name although the configuration no longer has it."""


class UsageLimits:
    """The usage of all limited tenants and models, over all pools of the process.

    A request beyond the limit in flight waits (`full`). A request beyond a rate is refused (`admit`), because a client
    that knows when to come back can plan, and one that hangs cannot.
    """

    def __init__(self, limits: Mapping[str, UsageLimit], rates: Rates | None = None) -> None:
        """Without `rates`, the limits hold for this process alone."""
        self._uses = {name: _Use(limit.in_flight) for name, limit in limits.items()}
        self._limits = limits
        self.rates = RateLimits(limits) if rates is None else rates
        self._between: dict[str, Request] = {}

    def reconfigure(self, limits: Mapping[str, UsageLimit], now: float) -> None:
        """Apply other limits. What is in flight, and what was taken in this minute, still counts."""
        self._limits = limits
        for name in [name for name in self._uses if name not in limits]:
            self._uses[name].most = None
            self._tidy(name)
        for name, limit in limits.items():
            self._uses.setdefault(name, _Use(None)).most = limit.in_flight
        self.rates.reconfigure(limits, now)

    def _use(self, name: str) -> _Use:
        return self._uses.get(name, _UNLIMITED)

    def _tidy(self, name: str) -> None:
        """Forget a removed limit once nothing is in flight under it."""
        if name not in self._limits and not self._uses[name].in_flight:
            del self._uses[name]

    def admit(self, request: Request, now: float) -> None:
        """Count a new request and the tokens it is expected to use.

        Raises Refused (`rate_limited`) where a rate of one of its limits is used up.
        """
        if request.limits:
            self.rates.admit(request, now)

    def full(self, request: Request) -> str | None:
        """The limit for which `request` has to wait, because as many are in flight as it allows."""
        for name in request.limits:
            if not self.free(name):
                return name
        return None

    def free(self, name: str) -> int:
        """How many more may be in flight under a limit; so many at a time where it has no bound on them any more."""
        use = self._use(name)
        if use.most is None:
            return UNBOUNDED_FREE
        return max(0, use.most - use.in_flight)

    def booked(self, request: Request) -> None:
        if self._between.pop(request.id, None) is not None:
            # It was in flight all the time.
            return
        for name in request.limits:
            # A limit that went while the request waited may come back while it is in flight.
            self._uses.setdefault(name, _Use(None)).in_flight += 1

    def begin_between_stages(self, request: Request) -> None:
        """The prompt was computed, and the answer is to follow: the request is in flight until then."""
        self._between[request.id] = request

    def end_between_stages(self, request_id: str) -> None:
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
        if used_tokens is not None:
            self.rates.used(request, used_tokens, now)

    def ended(self, request: Request, now: float) -> None:
        """The request is over: tokens that were expected and not used are given back."""
        self.end_between_stages(request.id)
        self.rates.ended(request, now)

    def in_flight(self) -> dict[str, int]:
        """Limit -> requests in flight under it."""
        return {name: use.in_flight for name, use in self._uses.items()}
