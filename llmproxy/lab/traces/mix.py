"""Changes a trace: keeps a part of its requests, or makes a tenant send more. Arrival times stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from llmproxy.lab.traces.arrival import Arrival, Trace, in_time_order

SPREAD_S = 10.0  # Longest delay of a louder tenant's additional request after the original request.


@dataclass(frozen=True, slots=True)
class Mix:
    """The changes of a trace, in the order of the fields.

    A closed loop counts as one request, with the fields of its first request.
    """

    # Each request of the tenant `loud` comes `factor` times.
    loud: str | None = None
    factor: int = 10
    # Band whose requests are kept, as the only ones; None keeps all.
    band: str | None = None
    # Tenant whose requests are dropped; None drops none.
    without: str | None = None
    # Whether all requests get the band `default`.
    level: bool = False


AS_IT_IS = Mix()


def mixed(trace: Trace, mix: Mix, seed: int) -> Trace:
    """Returns the trace after the changes of `mix`. Kept requests keep their times."""

    def arrivals() -> Iterator[Arrival]:
        all_of_them = trace.arrivals() if mix.loud is None else _louder(trace, mix.loud, mix.factor, seed)
        for arrival in all_of_them:
            if arrival.tenant != mix.without and mix.band in (None, arrival.band):
                yield replace(arrival, band="default") if mix.level else arrival

    return replace(trace, arrivals=arrivals)


def _louder(trace: Trace, tenant: str, factor: int, seed: int) -> Iterator[Arrival]:
    rng = Random(seed)

    def said(arrival: Arrival) -> list[Arrival]:
        # Additional requests have no known text, so they share nothing.
        more = range(1, factor if arrival.tenant == tenant else 1)
        late_s = [arrival.at_s + rng.uniform(0.0, SPREAD_S) for _ in more]
        return [arrival, *(replace(arrival, at_s=at_s, blocks=(), session=None, then=None) for at_s in late_s)]

    return in_time_order((arrival.at_s, said(arrival)) for arrival in trace.arrivals())
