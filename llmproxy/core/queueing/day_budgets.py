"""Budgets of requests and tokens per calendar day.

Each open request reserves 1 request and its expected tokens, so that a budget is not overrun by requests that started
together. A request counts on the day of its end, if it was granted a backend. Its real tokens count at the end of each
attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from msgspec import Struct

from llmproxy.core.domain import Outcome, Refused, Request
from llmproxy.core.queueing.rate_limits import REQUESTS, TOKENS, RateName, expected, in_words
from llmproxy.core.settings import UsageLimit

DAY_S = 86_400.0
MONEY = "money"
"""The kind of a daily bound on the money spent at an external backend, beside REQUESTS and TOKENS. In a `RateName` of
this kind, the first part is the name of the backend."""


class _Open(Struct, eq=False):
    """A request that has not ended, with its reservation in the budgets of the day."""

    names: tuple[str, ...]  # The limits with a daily budget that count the request.
    tokens: float  # The expected tokens that are still reserved.
    reached: bool = False  # Whether the request was granted a backend.


class DayBudgets:
    """The budgets of all limits, for the current day.

    The core knows no calendar. `begin` gives it the name and the end of a day. Later days have 24 hours until the next
    call.
    """

    def __init__(self, limits: Mapping[str, UsageLimit]) -> None:
        self._limits = _daily(limits)
        self._used: dict[RateName, float] = {}
        # Request id -> reservation of an open request.
        self._requests: dict[str, _Open] = {}
        self._reserved: dict[RateName, float] = {}
        self._day, self._ends_s = "", inf
        # Whether the day ended before `begin` named the next one.
        self._unnamed = False

    def reconfigure(self, limits: Mapping[str, UsageLimit]) -> None:
        """Applies new limits. The use of the day still counts."""
        self._limits = _daily(limits)

    def begin(self, day: str, ends_s: float, now: float) -> None:
        """Begins another day, or corrects the end of the current one.

        Args:
            day: The name of the day, such as `2026-11-28`.
            ends_s: The end of the day, on the clock of `now`.
        """
        if day != self._day and self._day and not self._unnamed:
            self._used.clear()
        self._day, self._ends_s, self._unnamed = day, ends_s, False
        self._roll(now)

    def _roll(self, now: float) -> None:
        while now >= self._ends_s:
            self._used.clear()
            self._ends_s += DAY_S
            self._unnamed = True

    def restore(self, used: Mapping[RateName, float]) -> None:
        """Takes over the use of the current day from another process. If both know a use, the larger one counts."""
        for name, amount in used.items():
            self._used[name] = max(amount, self._used.get(name, 0.0))

    def admit(self, request: Request, now: float) -> None:
        """Reserves a request and its expected tokens. Raises Refused (`rate_limited`) if a budget has no room for them.

        Reserves a request only once, because a caller that lost the reply calls again.
        """
        if request.id in self._requests or not self._daily_of(request):
            return
        tokens = expected(request)
        for name in self._daily_of(request):
            limit = self._limits[name]
            requests_left, tokens_left = self.left(name, now)
            if requests_left is not None and requests_left < 1.0:
                raise self._used_up(name, REQUESTS, limit.requests_per_day, now)
            per_day = limit.tokens_per_day
            # A request that is larger than the whole budget needs a day of its own, as with a rate.
            if tokens_left is not None and per_day is not None and tokens_left < min(tokens, per_day):
                raise self._used_up(name, TOKENS, per_day, now, tokens_left, tokens)
        self._open(request, tokens)

    def _daily_of(self, request: Request) -> tuple[str, ...]:
        return tuple(name for name in request.limits if name in self._limits)

    def _open(self, request: Request, tokens: float) -> _Open:
        one = self._requests[request.id] = _Open(self._daily_of(request), tokens)
        self._reserve(one.names, REQUESTS, 1.0)
        self._reserve(one.names, TOKENS, tokens)
        return one

    def booked(self, request: Request) -> None:
        """Notes that a request was granted a backend, also if another process admitted the request."""
        if self._daily_of(request):
            one = self._requests.get(request.id) or self._open(request, 0.0)
            one.reached = True

    def used(self, request: Request, tokens: float, now: float) -> None:
        """Counts the real tokens of an attempt. The rest of the reserved tokens stays reserved for a next attempt."""
        self._roll(now)
        if (one := self._requests.get(request.id)) is not None:
            counted = min(tokens, one.tokens)
            self._reserve(one.names, TOKENS, -counted)
            one.tokens -= counted
        for name in self._daily_of(request):
            self._take(name, TOKENS, tokens)

    def ended(self, request: Request, now: float) -> None:
        """Counts an ended request if it was granted a backend, and ends its reservation."""
        one = self._requests.pop(request.id, None)
        if one is None:
            return
        self._roll(now)
        self._reserve(one.names, REQUESTS, -1.0)
        self._reserve(one.names, TOKENS, -one.tokens)
        for name in one.names if one.reached else ():
            self._take(name, REQUESTS, 1.0)

    def left(self, name: str, now: float) -> tuple[float | None, float | None]:
        """Returns the remaining (requests, tokens) of a limit on this day; None without such a budget."""
        self._roll(now)
        limit = self._limits.get(name, UsageLimit())
        return self._left((name, REQUESTS), limit.requests_per_day), self._left((name, TOKENS), limit.tokens_per_day)

    def _left(self, name: RateName, per_day: float | None) -> float | None:
        if per_day is None:
            return None
        return max(0.0, per_day - self._used.get(name, 0.0) - self._reserved.get(name, 0.0))

    def money_left(self, backend: str, per_day: float, now: float) -> float:
        """Returns how much of the bound `per_day` of an external backend is neither spent nor reserved on this day."""
        self._roll(now)
        return self._left((backend, MONEY), per_day) or 0.0

    def reserve_money(self, backend: str, amount: float) -> None:
        """Reserves money for a request in flight. A negative amount ends a reservation."""
        self._reserve((backend,), MONEY, amount)

    def spend(self, backend: str, amount: float, now: float) -> None:
        self._roll(now)
        self._take(backend, MONEY, amount)

    def _reserve(self, names: tuple[str, ...], kind: str, amount: float) -> None:
        for name in names:
            left = self._reserved.get((name, kind), 0.0) + amount
            if left > 0.0:
                self._reserved[name, kind] = left
            else:
                self._reserved.pop((name, kind), None)

    def _take(self, name: str, kind: str, amount: float) -> None:
        self._used[name, kind] = self._used.get((name, kind), 0.0) + amount

    def _used_up(
        self, name: str, kind: str, per_day: float | None, now: float, left: float = 0.0, needed: float = 0.0
    ) -> Refused:
        wait_s = max(1.0, self._ends_s - now) if self._ends_s < inf else DAY_S
        rest = f" has {left:,.0f} left, and this request may need {needed:,.0f}" if left > 0.0 else " is used up"
        message = f"The limit of {per_day:,.0f} {kind} per day of {in_words(name)}{rest}. A new day begins"
        return Refused(Outcome.RATE_LIMITED, f"{message} in {_in_hours(wait_s)}.", wait_s)


def _daily(limits: Mapping[str, UsageLimit]) -> dict[str, UsageLimit]:
    return {
        name: limit
        for name, limit in limits.items()
        if limit.requests_per_day is not None or limit.tokens_per_day is not None
    }


def _in_hours(time_s: float) -> str:
    minutes = max(1, round(time_s / 60.0))
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
