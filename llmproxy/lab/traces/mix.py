"""A part of a trace's requests, or one of its tenants many times as loud: the same arrivals at the same times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from llmproxy.lab.traces.arrival import Arrival, Trace, in_time_order

SPREAD_S = 10.0
"""A louder tenant's further requests come within so many seconds after the one that the trace has."""


@dataclass(frozen=True, slots=True)
class Mix:
    """What is made of a trace, in this order.

    Each request of the tenant `loud` comes `factor` times. Of bands only `band` is kept, of tenants all but `without`.
    `level` puts what is left into one band. A closed loop is one request here, judged by its first turn.
    """

    loud: str | None = None
    factor: int = 10
    band: str | None = None
    without: str | None = None
    level: bool = False


AS_IT_IS = Mix()


def mixed(trace: Trace, mix: Mix, seed: int) -> Trace:
    """The trace with `mix` made of it; what is kept comes when it came before."""

    def arrivals() -> Iterator[Arrival]:
        all_of_them = trace.arrivals() if mix.loud is None else _louder(trace, mix.loud, mix.factor, seed)
        for arrival in all_of_them:
            if arrival.tenant != mix.without and mix.band in (None, arrival.band):
                yield replace(arrival, band="default") if mix.level else arrival

    return replace(trace, arrivals=arrivals)


def _louder(trace: Trace, tenant: str, factor: int, seed: int) -> Iterator[Arrival]:
    rng = Random(seed)

    def said(arrival: Arrival) -> list[Arrival]:
        # Nothing is known of a text that was never sent: it shares nothing.
        more = range(1, factor if arrival.tenant == tenant else 1)
        late_s = [arrival.at_s + rng.uniform(0.0, SPREAD_S) for _ in more]
        return [arrival, *(replace(arrival, at_s=at_s, blocks=(), session=None, then=None) for at_s in late_s)]

    return in_time_order((arrival.at_s, said(arrival)) for arrival in trace.arrivals())
