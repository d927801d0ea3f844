"""The time from a grant to the first token, as the waiting room and clients experience it."""

from __future__ import annotations

from llmproxy.core.estimates.learning import LineSums

KEEP = 0.99
"""Weight that an observation keeps with each newer one: the last hundred decide."""
SPREAD_MIN = 1e-6


class FirstToken:
    """Seconds from the grant to the first byte over all tokens of the prompt, for a pool, by least squares.

    It contains the wait inside the engine and the effect of the prefix cache at the present load. So it answers "how
    long from now" for a request of which only the length is known. `PoolRates.prefill` is another quantity: the time
    that an engine computes uncached tokens.
    """

    def __init__(self) -> None:
        self._sums = LineSums(KEEP)

    def learn(self, prompt_tokens: int, took_s: float) -> None:
        self._sums.add(float(prompt_tokens), took_s)

    def expected_s(self, prompt_tokens: int) -> float:
        """Seconds from grant to first token; 0 before the first observation, so that no request is refused for it."""
        sums = self._sums
        if not sums.n:
            return 0.0
        slope = max(0.0, sums.slope(SPREAD_MIN) or 0.0)
        return max(0.0, sums.y / sums.n + slope * (prompt_tokens - sums.x / sums.n))
