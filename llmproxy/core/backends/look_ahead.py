"""How many requests to send to a full engine, so that no slot stands empty while the next request is on its way."""

from __future__ import annotations

from math import floor

TRAVEL_S = 0.02
"""From the end of a sequence to the arrival of the next one inside the engine: two ways of the network, tokenising."""
STEPS = 1.5
"""And the step that runs when it arrives, half over on average, with one that the engine has planned ahead."""
SHARE_MAX = 4
"""Never more than one for so many of the batch: what waits inside an engine is past choosing."""
REMEMBERED = 32
"""Sequences over which the means are taken, so many that a few short ones say little."""


class LookAhead:
    """What one backend's batch and its sequences' times make of it.

    While the next request is on its way, a batch ends as many sequences as it holds, times the share of a sequence's
    time that the way takes (Little 1961). As many may be sent before they have ended: whoever is waits inside the
    engine no longer than the way takes. With long answers in a small batch that is none, and who goes next waits for
    the first release of any engine.
    """

    def __init__(self) -> None:
        self._sequence_s = 0.0
        self._tokens = 0.0

    def ended(self, sequence_s: float, tokens: float) -> None:
        """A sequence was at the backend for so long, and its answer had so many tokens."""
        if not self._tokens:
            self._sequence_s, self._tokens = sequence_s, tokens
            return
        self._sequence_s += (sequence_s - self._sequence_s) / REMEMBERED
        self._tokens += (tokens - self._tokens) / REMEMBERED

    def requests(self, limit: int) -> int:
        """How many may be in flight above `limit`; none before anything has ended."""
        if not self._tokens:
            return 0
        # A step takes what a sequence took, over its tokens.
        on_the_way = limit * (TRAVEL_S / self._sequence_s + STEPS / self._tokens)
        return min(floor(on_the_way + 0.5), limit // SHARE_MAX)
