"""The look-ahead: requests sent to a full engine beyond its batch limit, so that few batch slots become empty."""

from __future__ import annotations

from math import exp

from llmproxy.core.estimates.learning import follow, gain

EMPTY_MAX = 0.005  # Maximum mean share of empty slots. A smaller one makes requests wait for little more throughput.
SHARE_MAX = 4  # The look-ahead is at most the limit divided by this: requests in an engine cannot be moved.
GAIN = 1 / 64  # Weight of a new reading in the mean, which then covers about 13 s.


class LookAhead:
    """The look-ahead of one backend, computed from the sequences in transit while the backend is full.

    A sequence is in transit while the proxy counts it and the engine neither runs nor queues it: on the network, in the
    tokeniser, before the next engine step, and on the way back. Scrapes show the mean number in transit. Without a
    look-ahead, that many slots of the batch are empty. The number in transit varies like a Poisson variable, so with a
    look-ahead of `n`, the mean number of empty slots is the mean of `max(0, in transit - n)`. The look-ahead is the
    smallest `n` that leaves at most EMPTY_MAX of the batch empty, like the base stock of an inventory with a lead time
    (Zipkin, Foundations of Inventory Management, 2000).
    """

    def __init__(self) -> None:
        self._share = 0.0
        self._readings = 0
        self._requests: dict[int, int] = {}

    def observe(self, load: int, in_transit: int) -> None:
        """Learns from a scrape of the full backend with `load` sequences, `in_transit` of them in transit."""
        self._readings += 1
        self._share = follow(self._share, in_transit / load, gain(GAIN, self._readings))
        self._requests.clear()

    def requests(self, limit: int) -> int:
        """Returns how many requests may be in flight above `limit`; 0 before the first scrape of the full backend."""
        ahead = self._requests.get(limit)
        if ahead is None:
            ahead = self._requests[limit] = self._ahead(limit)
        return ahead

    def _ahead(self, limit: int) -> int:
        mean = empty = self._share * limit
        chance = exp(-mean)
        more = 1.0 - chance
        ahead = 0
        while empty > EMPTY_MAX * limit and ahead < limit // SHARE_MAX:
            # With one more request ahead, the mean shrinks by the probability of exceeding the present number.
            empty -= more
            ahead += 1
            chance *= mean / ahead
            more -= chance
        return ahead
