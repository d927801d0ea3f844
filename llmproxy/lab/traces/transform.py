"""Transformations of traces: scaled, replicated or sliced. All of them stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from random import Random

from llmproxy.lab.traces.arrival import Arrival, Trace, TraceError, chained, in_time_order, turns_of

COPIES_MAX = 1_000
OFFSET_MAX_S = 60.0


def scaled(trace: Trace, rate_scale: float) -> Trace:
    """Divides all arrival times, but no think times, by `rate_scale`. Raises TraceError unless it is above 0."""
    if not 0 < rate_scale < float("inf"):
        raise TraceError(f"rate scale is {rate_scale:g}; should be above 0")

    def arrivals() -> Iterator[Arrival]:
        for arrival in trace.arrivals():
            yield _at(arrival, arrival.at_s / rate_scale)

    return replace(trace, name=f"{trace.name} x{rate_scale:g} rate", arrivals=arrivals)


def replicated(trace: Trace, copies: int, seed: int, shared: int = 1) -> Trace:
    """Sends `copies` of a trace at the same time, with different text.

    Each copy except the first is delayed by a random 0 to 60 s and has other block ids and sessions. All copies share
    tenants, adapters and the blocks with ids below `shared`. The default 1 fits Mooncake's traces, where block 0 begins
    every prompt. The trace is read once, with the arrivals of 60 s in memory.
    """
    if not 1 <= copies <= COPIES_MAX:
        raise TraceError(f"{copies} copies; should be 1 to {COPIES_MAX:,}")
    return replace(trace, name=f"{trace.name} x{copies} copies", arrivals=partial(_copies, trace, copies, seed, shared))


def sliced(trace: Trace, start: int, count: int | None = None) -> Trace:
    """Returns `count` arrivals (None: all) from number `start` on, counted from 0. The first of them comes at 0 s.

    A closed loop counts as one arrival and stays whole. Reading raises TraceError if no arrival is left.
    """
    if start < 0 or (count is not None and count < 1):
        raise TraceError(f"requests {start} to {start + (count or 0)} of a trace; should be at least one, from 0 on")

    def arrivals() -> Iterator[Arrival]:
        first_s: float | None = None
        for arrival in islice(trace.arrivals(), start, None if count is None else start + count):
            first_s = arrival.at_s if first_s is None else first_s
            yield _at(arrival, arrival.at_s - first_s)
        if first_s is None:
            raise TraceError(f"{trace.name}: no requests left: the trace has {start} arrivals or fewer")

    end = "end" if count is None else str(start + count - 1)
    return replace(trace, name=f"{trace.name} [{start}-{end}]", arrivals=arrivals)


def _copies(trace: Trace, copies: int, seed: int, shared: int) -> Iterator[Arrival]:
    rng = Random(seed)
    offsets_s = [0.0, *(rng.uniform(0.0, OFFSET_MAX_S) for _ in range(copies - 1))]
    return in_time_order(
        (one.at_s, (_copied(one, one.at_s + late_s, copy, copies, shared) for copy, late_s in enumerate(offsets_s)))
        for one in trace.arrivals()
    )


def _copied(arrival: Arrival, at_s: float, copy: int, copies: int, shared: int) -> Arrival:
    def own(turn: Arrival) -> Arrival:
        # Interleaved ids, not shifted ones: the ids of two copies differ, however large the ids of the trace are.
        blocks = tuple(b if b < shared else b * copies + copy for b in turn.blocks)
        return replace(turn, blocks=blocks, session=turn.session and f"{turn.session}/{copy}")

    return chained([own(turn) for turn in turns_of(_at(arrival, at_s))])


def _at(arrival: Arrival, at_s: float) -> Arrival:
    """Moves an arrival, and the later requests of its closed loop, so that it comes at `at_s`."""
    if at_s == arrival.at_s:
        return arrival
    if arrival.then is None:
        return replace(arrival, at_s=at_s)
    shift_s = at_s - arrival.at_s
    return chained([replace(turn, at_s=turn.at_s + shift_s) for turn in turns_of(arrival)])
