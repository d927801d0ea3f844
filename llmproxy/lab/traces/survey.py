"""Figures of a trace from one pass over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from llmproxy.lab.traces.arrival import Trace, TraceError, turns_of

ADAPTERS_MAX = 10_000
BANDS_MAX = 100


@dataclass(frozen=True, slots=True)
class Survey:
    """Sums over all requests of a trace, including later requests of closed loops."""

    count: int
    # The latest `at_s`. For a chained turn it assumes nominal answer times.
    duration_s: float
    # Requests of each adapter, without the base model.
    adapters: Mapping[str, int]
    # The bands of all requests, in the order of the first request of each.
    bands: tuple[str | int, ...]
    # Requests that got no answer in reality, so its length is an assumption.
    guessed: int


def survey(trace: Trace) -> Survey:
    """Returns the figures of `trace`. Reads the whole trace, so that its errors show before a run.

    Raises TraceError, also for a trace without requests, with more than 10,000 adapters or with more than 100 bands.
    """
    count = guessed = 0
    duration_s = 0.0
    adapters: dict[str, int] = {}
    bands: dict[str | int, None] = {}
    for arrival in chain.from_iterable(map(turns_of, trace.arrivals())):
        count += 1
        guessed += arrival.guessed
        duration_s = max(duration_s, arrival.at_s)
        bands[arrival.band] = None
        if arrival.adapter is not None:
            adapters[arrival.adapter] = adapters.get(arrival.adapter, 0) + 1
        if len(adapters) > ADAPTERS_MAX:
            raise TraceError(f"{trace.name}: more than {ADAPTERS_MAX:,} adapters")
        if len(bands) > BANDS_MAX:
            raise TraceError(f"{trace.name}: more than {BANDS_MAX} bands")
    if not count:
        raise TraceError(f"{trace.name}: no requests")
    return Survey(count, duration_s, adapters, tuple(bands), guessed)
