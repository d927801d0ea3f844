"""What a trace holds, found in one pass over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from llmproxy.lab.traces.arrival import Trace, TraceError, turns_of

ADAPTERS_MAX = 10_000
BANDS_MAX = 100


@dataclass(frozen=True, slots=True)
class Survey:
    """Sums over all requests, the chained turns of closed loops among them.

    `duration_s` is the latest `at_s`; that of a chained turn is when it would come if answers took their nominal time.
    `adapters` has the requests of each adapter, the base model left out. `bands` are those named, as they first came.
    `guessed` requests got no answer when the trace was taken, so that its length is an assumption.
    """

    count: int
    duration_s: float
    adapters: Mapping[str, int]
    bands: tuple[str | int, ...]
    guessed: int


def survey(trace: Trace) -> Survey:
    """Read all of `trace`, so that any error in it shows before a run. Raises TraceError, also for a trace without any
    request, of more than 10,000 adapters or of more than 100 bands.
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
