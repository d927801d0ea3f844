"""Usage limits of tenants and models: requests in flight, and requests and tokens per minute and per day."""

from __future__ import annotations

from collections.abc import Mapping

from llmproxy.core.domain import Refused, Request
from llmproxy.core.queueing.day_budgets import DayBudgets
from llmproxy.core.queueing.rate_limits import RateLimits
from llmproxy.core.settings import UsageLimit

UNBOUNDED_FREE = 64  # Maximum number of blocked requests that go back to their flows at once after a limit was removed.


class _Use:
    def __init__(self, most: int | None) -> None:
        self.in_flight = 0
        self.most = most


class UsageLimits:
    """The usage of all limited tenants and models, over all pools of the process.

    A request above an in-flight limit waits (`full`). A request above a rate or a daily budget is refused (`admit`), so
    that the client learns when to retry instead of hanging.
    """

    def __init__(self, limits: Mapping[str, UsageLimit]) -> None:
        self._uses = {name: _Use(limit.in_flight) for name, limit in limits.items()}
        self._limits = limits
        self.rates = RateLimits(limits)
        self.days = DayBudgets(limits)
        self._between: dict[str, Request] = {}

    def reconfigure(self, limits: Mapping[str, UsageLimit], now: float) -> None:
        """Applies new limits. Requests in flight and charges of the last minute still count."""
        self._limits = limits
        for name in [name for name in self._uses if name not in limits]:
            self._uses[name].most = None
            self._tidy(name)
        for name, limit in limits.items():
            self._uses.setdefault(name, _Use(None)).most = limit.in_flight
        self.rates.reconfigure(limits, now)
        self.days.reconfigure(limits)

    def _tidy(self, name: str) -> None:
        """Forgets a removed limit, once nothing is in flight under it."""
        if name not in self._limits and not self._uses[name].in_flight:
            del self._uses[name]

    def admit(self, request: Request, now: float) -> None:
        """Charges a new request and its expected tokens. Raises Refused (`rate_limited`).

        A refused request costs nothing. Daily budgets are charged first, because their charge can be taken back if a
        rate refuses the request. A rate cannot take its charge back.
        """
        if request.limits:
            self.days.admit(request, now)
            try:
                self.rates.admit(request, now)
            except Refused:
                self.days.ended(request, now)
                raise

    def full(self, request: Request) -> str | None:
        """Returns the first reached in-flight limit of `request`, such as `tenant:acme`; None without one."""
        for name in request.limits:
            if not self.free(name):
                return name
        return None

    def free(self, name: str) -> int:
        """Returns how many more requests may be in flight under a limit; `UNBOUNDED_FREE` if it has no such bound."""
        use = self._uses.get(name)
        if use is None or use.most is None:
            return UNBOUNDED_FREE
        return max(0, use.most - use.in_flight)

    def booked(self, request: Request) -> None:
        if self._between.pop(request.id, None) is not None:
            # The decode stage: the request has been in flight since its prefill stage.
            return
        self.days.booked(request)
        for name in request.limits:
            # A limit may be removed while the request waits, and added again while the request is in flight.
            self._uses.setdefault(name, _Use(None)).in_flight += 1

    def begin_between_stages(self, request: Request) -> None:
        """Counts a request as in flight between the end of its prefill stage and the grant of its decode stage."""
        self._between[request.id] = request

    def end_between_stages(self, request_id: str) -> None:
        """Stops counting a request that ended between its two stages, or that must wait for both stages again."""
        if (request := self._between.pop(request_id, None)) is not None:
            self._leave(request)

    def _leave(self, request: Request) -> None:
        for name in request.limits:
            self._uses[name].in_flight -= 1
            self._tidy(name)

    def released(self, request: Request, used_tokens: float | None, now: float) -> None:
        """Records the end of an attempt. `used_tokens` is None if the tokens that the engine computed are not known."""
        self._leave(request)
        if used_tokens is not None:
            self.rates.used(request, used_tokens, now)
            self.days.used(request, used_tokens, now)

    def ended(self, request: Request, now: float) -> None:
        """Refunds the expected tokens that an ended request did not use, and counts it in its daily budgets."""
        self.end_between_stages(request.id)
        self.rates.ended(request, now)
        self.days.ended(request, now)

    def in_flight(self) -> dict[str, int]:
        return {name: use.in_flight for name, use in self._uses.items()}
