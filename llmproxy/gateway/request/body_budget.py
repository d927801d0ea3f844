"""The memory budget for request bodies of one process."""

from __future__ import annotations

import sys
from collections.abc import Callable

_FAST_PART = 8  # An eighth of the budget is reserved for bodies that arrive together with their head.


class BodyBudget:
    """Counts the bytes of all buffered request bodies: arriving, waiting or being sent.

    Received bytes count, not announced bytes, so a client that announces much and sends little blocks no other client.
    When the budget is exceeded, a large body that still arrives is refused, and small bodies continue. Bodies that
    arrive slowly cannot use the whole budget: a part is reserved for bodies that arrive with their head.
    """

    def __init__(self) -> None:
        self.buffered_bytes = 0
        self.arriving_bytes = 0
        # Bit length of `size` -> bodies. Any body under the highest key has at least half the size of the largest body.
        self._arriving: dict[int, dict[BufferedBody, None]] = {}
        self.bytes_max = self.slow_bytes_max = sys.maxsize

    def limit(self, bytes_max: int, body_bytes_max: int) -> None:
        """Sets the limit in bytes for all bodies together, at least `body_bytes_max`, the limit for one body.

        Bodies that are already buffered stay, also above the new limits.
        """
        self.bytes_max = max(bytes_max, body_bytes_max)
        self.slow_bytes_max = max(self.bytes_max - self.bytes_max // _FAST_PART, body_bytes_max)

    def make_room(self, bytes_max: int) -> None:
        """Refuses bodies that still arrive, the largest first, until at most `bytes_max` bytes are buffered."""
        while self.buffered_bytes > bytes_max and self._arriving:
            # Among bodies of similar size, this body has received nothing for the longest time.
            body = next(iter(self._arriving[max(self._arriving)]))
            body.refused = True
            on_refused = body.on_refused
            body.release()
            if on_refused is not None:
                on_refused()

    def add_arriving(self, body: BufferedBody) -> None:
        """Counts a body that still arrives. `body.size` must not change until `remove_arriving`."""
        self._arriving.setdefault(body.size.bit_length(), {})[body] = None
        self.arriving_bytes += body.size

    def remove_arriving(self, body: BufferedBody) -> None:
        group = self._arriving[body.size.bit_length()]
        del group[body]
        if not group:
            del self._arriving[body.size.bit_length()]
        self.arriving_bytes -= body.size


class BufferedBody:
    """Counts the bytes of one request body in a `BodyBudget`, until `release`."""

    __slots__ = ("_budget", "on_refused", "refused", "size")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.size = 0
        self.refused = False
        self.on_refused: Callable[[], None] | None = None

    def add_whole(self, size: int) -> bool:
        """Counts a body of `size` bytes that has arrived in one piece.

        Returns False, and counts nothing, if it does not fit.
        """
        budget = self._budget
        if budget.buffered_bytes - budget.arriving_bytes + size > budget.bytes_max:
            return False
        self.size += size
        budget.buffered_bytes += size
        if budget.buffered_bytes > budget.bytes_max:
            budget.make_room(budget.bytes_max)
        return True

    def begin(self, on_refused: Callable[[], None]) -> None:
        """Starts the count of a body that arrives in pieces.

        `on_refused` is called if this body is refused to make room for others. Its bytes are already released then.
        """
        self.on_refused = on_refused
        self._budget.add_arriving(self)

    def add_piece(self, size: int) -> bool:
        """Counts `size` more bytes of a body after `begin`.

        Returns False if the body is refused; its bytes are released then.
        """
        budget = self._budget
        if self.on_refused is None:
            return False
        budget.remove_arriving(self)
        self.size += size
        budget.buffered_bytes += size
        budget.add_arriving(self)
        if budget.buffered_bytes - budget.arriving_bytes + self.size > budget.slow_bytes_max:
            # It would not fit even if all other arriving bodies were refused.
            self.release()
            return False
        budget.make_room(budget.slow_bytes_max)
        return not self.refused

    def finish(self) -> bool:
        """Marks the body as complete, so that it can no longer be refused. Returns False if it was refused before."""
        if self.on_refused is not None:
            self._budget.remove_arriving(self)
            self.on_refused = None
        return not self.refused

    def release(self) -> None:
        """Gives the bytes back to the budget. A second call changes nothing."""
        if self.on_refused is not None:
            self.finish()
        self._budget.buffered_bytes -= self.size
        self.size = 0
