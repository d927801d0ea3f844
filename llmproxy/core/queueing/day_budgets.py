"""Budgets of requests and tokens per calendar day.

Requests in flight reserve their expected tokens, so that a budget is not overrun by requests that started together.
The real tokens count on the day on which the request ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from llmproxy.core.domain import Outcome, Refused, Request
from llmproxy.core.queueing.rate_limits import REQUESTS, TOKENS, RateName, expected, in_words
from llmproxy.core.settings import UsageLimit

DAY_S = 86_400.0


class DayBudgets:
    """The budgets of all limits, for the current day.

    The core knows no calendar. `begin` gives it the name and the end of a day; until the next call, days have 24 hours.
    """

    def __init__(self, limits: Mapping[str, UsageLimit]) -> None:
        self._limits = _daily(limits)
        self._used: dict[RateName, float] = {}
        # Request in flight -> (its limits, its expected tokens), and the sum of these tokens for each limit.
        self._requests: dict[str, tuple[tuple[str, ...], float]] = {}
        self._reserved: dict[str, float] = {}
        self._day, self._ends_s = "", inf
        # Whether the day ended before `begin` named the next one.
        self._unnamed = False

    def reconfigure(self, limits: Mapping[str, UsageLimit]) -> None:
        """Applies new limits. The use of the day still counts."""
        self._limits = _daily(limits)

    def begin(self, day: str, ends_s: float, now: float) -> bool:
        """Begins a day, or corrects the end of the current one. Returns False for a day that sorts before the current
        one, which is ignored.

        Args:
            day: A name such as `2026-11-28`. Names sort as days do.
            ends_s: The end of the day, on the clock of `now`.
        """
        if day < self._day:
            return False
        if day > self._day and self._day and not self._unnamed:
            self._used.clear()
        self._day, self._ends_s, self._unnamed = day, ends_s, False
        self._roll(now)
        return True

    def _roll(self, now: float) -> None:
        while now >= self._ends_s:
            self._used.clear()
            self._ends_s += DAY_S
            self._unnamed = True

    def restore(self, used: Mapping[RateName, float]) -> None:
        """Takes over the use of the current day. The larger number counts."""
        for name, amount in used.items():
            self._used[name] = max(amount, self._used.get(name, 0.0))

    def admit(self, request: Request, now: float) -> None:
        """Reserves a request and its expected tokens. Raises Refused (`rate_limited`) if a budget has no room for them.

        Reserves a request only once, because a caller that lost the reply calls again.
        """
        if request.id in self._requests:
            return
        names = tuple(name for name in request.limits if name in self._limits)
        if not names:
            return
        self._roll(now)
        tokens = expected(request)
        for name in names:
            requests_left, tokens_left = self.left(name, now)
            if requests_left is not None and requests_left < 1.0:
                raise self._used_up(name, REQUESTS, self._limits[name].requests_per_day, now)
            per_day = self._limits[name].tokens_per_day
            # A request that is larger than the whole budget needs a day of its own, as with a rate.
            if tokens_left is not None and per_day is not None and tokens_left < min(tokens, per_day):
                raise self._used_up(name, TOKENS, per_day, now, tokens_left, tokens)
        self._requests[request.id] = names, tokens
        self._reserve(names, tokens)
        for name in names:
            self._take(name, REQUESTS, 1.0)

    def used(self, request: Request, tokens: float, now: float) -> None:
        """Counts the real tokens of an attempt, also of a request that another process admitted."""
        self._roll(now)
        if request.id in self._requests:
            names, expected_tokens = self._requests[request.id]
            self._requests[request.id] = names, 0.0
            self._reserve(names, -expected_tokens)
        for name in request.limits:
            if name in self._limits:
                self._take(name, TOKENS, tokens)

    def ended(self, request: Request) -> None:
        """Gives back the expected tokens of an ended request."""
        names, tokens = self._requests.pop(request.id, ((), 0.0))
        self._reserve(names, -tokens)

    def left(self, name: str, now: float) -> tuple[float | None, float | None]:
        """Returns the remaining (requests, tokens) of a limit on this day; None without such a budget."""
        self._roll(now)
        limit = self._limits.get(name)
        if limit is None:
            return None, None
        tokens = self._used.get((name, TOKENS), 0.0) + self._reserved.get(name, 0.0)
        requests = _left(limit.requests_per_day, self._used.get((name, REQUESTS), 0.0))
        return requests, _left(limit.tokens_per_day, tokens)

    def _reserve(self, names: tuple[str, ...], tokens: float) -> None:
        for name in names:
            left = self._reserved.get(name, 0.0) + tokens
            if left > 0.0:
                self._reserved[name] = left
            else:
                self._reserved.pop(name, None)

    def _take(self, name: str, kind: str, amount: float) -> None:
        self._used[name, kind] = self._used.get((name, kind), 0.0) + amount

    def _used_up(
        self, name: str, kind: str, per_day: float | None, now: float, left: float = 0.0, needed: float = 0.0
    ) -> Refused:
        wait_s = max(1.0, self._ends_s - now) if self._ends_s < inf else DAY_S
        rest = f" has {left:,.0f} left, and this request may need {needed:,.0f}" if left > 0.0 else " is used up"
        message = f"The limit of {per_day:,.0f} {kind} per day of {in_words(name)}{rest}. A new day begins"
        return Refused(Outcome.RATE_LIMITED, f"{message} in {_in_hours(wait_s)}.", wait_s)


def _left(per_day: float | None, used: float) -> float | None:
    return None if per_day is None else max(0.0, per_day - used)


def _daily(limits: Mapping[str, UsageLimit]) -> dict[str, UsageLimit]:
    return {
        name: limit
        for name, limit in limits.items()
        if limit.requests_per_day is not None or limit.tokens_per_day is not None
    }


def _in_hours(time_s: float) -> str:
    minutes = max(1, round(time_s / 60.0))
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
