"""The price of a request on one backend, as the cost placement computes it."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from llmproxy.core.domain import Price, Request

NAMES = ("queue", "prefill", "stream", "harm", "eviction", "adapter", "range", "memory", "slot", "transfer", "headroom")
TERMS = frozenset(NAMES) - {"transfer", "headroom"}
# Price in seconds of each second by which a backend beats an objective: another request could use the headroom.
HEADROOM_COST = 0.05


class PriceRow(Struct, frozen=True):
    """A `Price` with its terms as one tuple of numbers.

    Many rows are stored for the debug pages. As single objects, the terms would slow down the garbage collector.
    """

    backend: str
    total_s: float
    # The terms of the price in the order of `NAMES`; None for a term that does not apply.
    seconds: tuple[float | None, ...]
    ttft_s: float
    tpot_s: float
    cached_tokens: float
    cold_adapter: bool
    fits: bool

    def terms(self) -> tuple[tuple[str, float], ...]:
        found = []
        for name, term_s in zip(NAMES, self.seconds, strict=False):
            if term_s is not None:
                found.append((name, term_s))
        return tuple(found)

    def price(self) -> Price:
        return Price(
            self.backend,
            self.total_s,
            self.terms(),
            self.ttft_s,
            self.tpot_s,
            self.cached_tokens,
            self.cold_adapter,
            self.fits,
        )


def with_headroom(
    prices: Sequence[PriceRow], request: Request, stream: float, late: tuple[float, float], now: float
) -> list[PriceRow]:
    """Adds the `headroom` term to the prices of a request with an objective.

    Headroom is the time that a backend leaves under the objective. It is a cost, because other requests may need that
    backend more. A backend that misses the objective has no headroom. `stream` is the weight of a second of streaming,
    `late` the p90 factors of the first token and of each later one.
    """
    slo, (late_ttft, late_tpot) = request.slo, late
    assert slo is not None, "it has no objective"
    found = []
    for price in prices:
        left_s = []
        if slo.ttft_s is not None:
            left_s.append(request.arrived_s + slo.ttft_s - now - price.ttft_s * late_ttft)
        if slo.tpot_s is not None:
            left_s.append(stream * request.output_tokens * (slo.tpot_s - price.tpot_s * late_tpot))
        headroom_s = HEADROOM_COST * max(0.0, min(left_s))
        found.append(replace(price, seconds=(*price.seconds, headroom_s), total_s=price.total_s + headroom_s))
    return found
