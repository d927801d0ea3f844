"""How long a granted request takes to its first token, learned from those before it."""

from __future__ import annotations

KEEP = 0.99
"""Weight that an observation keeps with each newer one: the last hundred decide."""


class FirstToken:
    """Exponentially weighted least squares of seconds from grant to first byte, over the tokens of the prompt."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def learn(self, prompt_tokens: int, took_s: float) -> None:
        x, y = float(prompt_tokens), took_s
        self._n = KEEP * self._n + 1.0
        self._x = KEEP * self._x + x
        self._y = KEEP * self._y + y
        self._xx = KEEP * self._xx + x * x
        self._xy = KEEP * self._xy + x * y

    def expected_s(self, prompt_tokens: int) -> float:
        """Seconds from grant to first token, 0 before anything was seen: what is unknown refuses nobody."""
        if not self._n:
            return 0.0
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        # Prompts of one length say nothing of longer ones.
        slope = (self._xy / self._n - mean_x * mean_y) / spread if spread > 1e-6 * mean_x * mean_x else 0.0
        return max(0.0, mean_y + max(0.0, slope) * (prompt_tokens - mean_x))
