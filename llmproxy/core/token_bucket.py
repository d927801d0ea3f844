"""The token bucket of usage limits, client limits, admin pages and the retry budget."""

from __future__ import annotations

from math import inf

ROUNDING_S = 1e-6  # Tolerance for rounding: a client that returns exactly after `wait_s` must not wait again.


class TokenBucket:
    """A bucket of up to `capacity` tokens that refills at `refill_per_s`. It starts full."""

    __slots__ = ("_at_s", "_level", "capacity", "refill_per_s")

    def __init__(self, capacity: float, refill_per_s: float) -> None:
        self.capacity = capacity
        self.refill_per_s = refill_per_s
        self._level = capacity
        self._at_s = 0.0

    def resize(self, capacity: float, refill_per_s: float, now: float) -> None:
        """Changes capacity and refill rate; tokens taken before stay taken."""
        taken = self.capacity - self.level(now)
        self.capacity, self.refill_per_s = capacity, refill_per_s
        self._level = capacity - taken

    def level(self, now: float) -> float:
        """Returns the tokens in the bucket; negative if more tokens were taken than it contained."""
        self._level = min(self.capacity, self._level + max(0.0, now - self._at_s) * self.refill_per_s)
        self._at_s = now
        return self._level

    def full_in_s(self, now: float) -> float:
        """Returns the seconds until the bucket is full, if nothing more is taken; inf for never."""
        taken = self.capacity - self.level(now)
        if taken <= self.refill_per_s * ROUNDING_S:
            return 0.0
        return taken / self.refill_per_s if self.refill_per_s else inf

    def wait_s(self, amount: float, now: float) -> float:
        """Returns the seconds until `amount` may be taken; inf for never. A full bucket allows any amount."""
        lacking = min(amount, self.capacity) - self.level(now)
        if lacking <= self.refill_per_s * ROUNDING_S:
            return 0.0
        return lacking / self.refill_per_s if self.refill_per_s else inf

    def take(self, amount: float, now: float) -> None:
        """Takes `amount`, even if the bucket has fewer tokens. A negative amount is put back into the bucket."""
        self._level = min(self.capacity, self.level(now) - amount)

    def try_take(self, amount: float, now: float) -> bool:
        """Takes `amount` if `wait_s` is 0. Returns whether the amount was taken."""
        if self.wait_s(amount, now) > 0.0:
            return False
        self.take(amount, now)
        return True
