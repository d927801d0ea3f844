"""The price of a request on one backend, as the cost placement computes it."""

from __future__ import annotations

from msgspec import Struct

from llmproxy.core.domain import Price

OWN = frozenset({"queue", "prefill", "adapter", "slot", "stream"})
"""The terms that the request itself feels."""
NAMES = ("queue", "prefill", "stream", "harm", "eviction", "adapter", "range", "memory", "slot", "headroom", "late")
TERMS = frozenset(NAMES) - {"headroom", "late"}


class PriceRow(Struct, frozen=True):
    """A `Price` in compact form. `seconds` are in the order of `NAMES`, None where a term does not apply.

    A row is two objects and a `Price` nine. Rows of past choices are kept, and the garbage collector visits them all.
    """

    backend: str
    total_s: float
    seconds: tuple[float | None, ...]
    ttft_s: float
    tpot_s: float
    cached_tokens: float
    cold_adapter: bool
    fits: bool

    def terms(self) -> tuple[tuple[str, float], ...]:
        return tuple([(name, s) for name, s in zip(NAMES, self.seconds, strict=False) if s is not None])

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
