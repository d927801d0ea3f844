"""How many requests to send to a full engine, so that no slot is empty while the next request is on its way."""

from __future__ import annotations

from math import floor

from llmproxy.core.estimates.learning import follow

TRAVEL_S = 0.02
"""From the end of a sequence to the arrival of the next one inside the engine: two network trips and tokenising."""
STEPS = 1.5
"""Steps until the engine admits it: half of the running one on average, and one that is already scheduled."""
SHARE_MAX = 4
"""At most one request ahead for so many of the batch: a request inside an engine cannot be placed elsewhere."""
GAIN = 1 / 32
"""Weight of a newer sequence in the means: small, so that a few short ones matter little."""


class LookAhead:
    """The look-ahead of one backend, from its batch limit and the mean times of its sequences.

    While the next request is on its way to the engine, some sequences of the batch end: their number is the size of the
    batch, times the time of that way, divided by the time of a sequence (Little 1961). The same number of requests may
    be sent ahead. They wait inside the engine no longer than they would be on their way. For long answers in a small
    batch the look-ahead is 0.
    """

    def __init__(self) -> None:
        self._sequence_s = 0.0
        self._tokens = 0.0

    def ended(self, sequence_s: float, tokens: float) -> None:
        """A sequence was at the backend for `sequence_s`, and its answer had so many tokens."""
        weight = GAIN if self._tokens else 1.0
        self._sequence_s = follow(self._sequence_s, sequence_s, weight)
        self._tokens = follow(self._tokens, tokens, weight)

    def requests(self, limit: int) -> int:
        """How many requests may be in flight above `limit`; 0 before any sequence has ended."""
        if not self._tokens:
            return 0
        # A step takes the time of a sequence divided by its tokens.
        on_the_way = limit * (TRAVEL_S / self._sequence_s + STEPS / self._tokens)
        return min(floor(on_the_way + 0.5), limit // SHARE_MAX)
