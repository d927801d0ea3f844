"""How many requests to send to a full engine, so that few places are empty while the next request is on its way."""

from __future__ import annotations

from math import exp

from llmproxy.core.estimates.learning import follow, gain

EMPTY_MAX = 0.005
"""The share of a batch that may be empty on average. A smaller one has requests wait in engines for little output."""
SHARE_MAX = 4
"""At most one request ahead for so many of the batch: a request inside an engine cannot be placed elsewhere."""
GAIN = 1 / 64
"""Weight of a newer reading in the mean: some 13 s of work decide."""


class LookAhead:
    """The look-ahead of one backend, from how many of its sequences are on their way while it is full.

    A sequence is on its way while the proxy counts it and the engine neither runs nor queues it: over the network, in
    the tokeniser, until the next step begins, and back. Readings show how many there are on average, whatever the
    requests are and whether they stream. So many places are empty while nothing is sent ahead. Their number varies like
    a Poisson variable: with `n` requests ahead, the mean of `max(0, on the way - n)` places are empty. The look-ahead
    is the least `n` that leaves at most `EMPTY_MAX` of the batch empty, like the base stock of an inventory with a lead
    time (Zipkin, Foundations of Inventory Management, 2000).
    """

    def __init__(self) -> None:
        self._share = 0.0
        self._readings = 0
        self._requests: dict[int, int] = {}

    def observe(self, load: int, on_the_way: int) -> None:
        """A reading of the full backend: of `load` sequences that the proxy counts, so many are on their way."""
        self._readings += 1
        self._share = follow(self._share, on_the_way / load, gain(GAIN, self._readings))
        self._requests.clear()

    def requests(self, limit: int) -> int:
        """How many requests may be in flight above `limit`; 0 before any reading of the full backend."""
        known = self._requests.get(limit)
        if known is None:
            known = self._requests[limit] = self._ahead(limit)
        return known

    def _ahead(self, limit: int) -> int:
        mean = empty = self._share * limit
        chance = exp(-mean)
        more = 1.0 - chance
        ahead = 0
        while empty > EMPTY_MAX * limit and ahead < limit // SHARE_MAX:
            # The mean of what exceeds one more is smaller by the chance that anything exceeds the present number.
            empty -= more
            ahead += 1
            chance *= mean / ahead
            more -= chance
        return ahead
