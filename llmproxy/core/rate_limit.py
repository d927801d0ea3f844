"""The one token bucket: usage limits, client limits, admin pages and the retry budget count with it."""

from __future__ import annotations

from math import inf

ROUNDING_S = 1e-6
"""A level that was filled in many steps is a sum of floats: a client that comes when due must not wait again."""


class TokenBucket:
    """Holds up to `capacity` tokens, and gets `refill_per_s` back each second. It starts full.

    `now` is in seconds on any clock that does not run backwards.
    """

    __slots__ = ("_at_s", "_level", "capacity", "refill_per_s")

    def __init__(self, capacity: float, refill_per_s: float) -> None:
        self.capacity = capacity
        self.refill_per_s = refill_per_s
        self._level = capacity
        self._at_s = 0.0

    def resize(self, capacity: float, refill_per_s: float, now: float) -> None:
        """Change capacity and refill; what was taken before stays taken."""
        taken = self.capacity - self.level(now)
        self.capacity, self.refill_per_s = capacity, refill_per_s
        self._level = capacity - taken

    def level(self, now: float) -> float:
        """The tokens that are there now; below 0 when more were taken than there were."""
        self._level = min(self.capacity, self._level + max(0.0, now - self._at_s) * self.refill_per_s)
        self._at_s = now
        return self._level

    def full_in_s(self, now: float) -> float:
        """Seconds until all that was taken is back, if nothing more is; inf for never."""
        taken = self.capacity - self.level(now)
        if taken <= self.refill_per_s * ROUNDING_S:
            return 0.0
        return taken / self.refill_per_s if self.refill_per_s else inf

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` may be taken, inf for never. A full bucket allows amounts above its capacity."""
        lacking = min(amount, self.capacity) - self.level(now)
        if lacking <= self.refill_per_s * ROUNDING_S:
            return 0.0
        return lacking / self.refill_per_s if self.refill_per_s else inf

    def take(self, amount: float, now: float) -> None:
        """Take `amount`, even if fewer tokens are there; a negative amount is given back."""
        self._level = min(self.capacity, self.level(now) - amount)

    def try_take(self, amount: float, now: float) -> bool:
        """Take `amount` if that is allowed now."""
        if self.wait_s(amount, now) > 0.0:
            return False
        self.take(amount, now)
        return True
