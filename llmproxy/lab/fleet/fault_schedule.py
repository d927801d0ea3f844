"""The timeline of a replay: when each fault begins and ends."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping

from llmproxy.lab.fleet.server import SimulatedServer
from llmproxy.lab.fleet.spec import Fault, FleetFaultKind

FIELDS = {
    FleetFaultKind.RESET: "reset",
    FleetFaultKind.METRIC_AGE: "metric_age_s",
    FleetFaultKind.LOST_READINGS: "lost_readings",
    FleetFaultKind.LOST_KV_EVENTS: "lost_kv_events",
}
"""Maps each fault that only sets a field of the server's `faults` to the name of that field."""


def schedule(faults: Iterable[Fault], replicas: Mapping[str, SimulatedServer], start_s: float) -> None:
    """Schedules the begin and end of each fault. The trace begins at the loop's time `start_s`.

    At equal times, ends come before begins, and then the order of `faults` counts.
    """
    loop = asyncio.get_running_loop()
    moments: list[tuple[float, bool, Fault, SimulatedServer]] = []
    for fault in faults:
        named = [replicas[fault.replica]] if fault.replica is not None else list(replicas.values())
        for replica in named:
            moments.append((start_s + fault.at_s, True, fault, replica))
            if fault.until_s is not None:
                moments.append((start_s + fault.until_s, False, fault, replica))
            if fault.kind is FleetFaultKind.METRIC_AGE:
                replica.faults.remembered_s = max(replica.faults.remembered_s, fault.value)
    moments.sort(key=lambda moment: moment[:2])
    _walk(deque(moments), loop)


def _walk(moments: deque[tuple[float, bool, Fault, SimulatedServer]], loop: asyncio.AbstractEventLoop) -> None:
    """Begins and ends the due faults, and sets a timer for the next time.

    Separate timers for the same time would run in any order.
    """
    while moments and moments[0][0] <= loop.time():
        _, begins, fault, replica = moments.popleft()
        if begins:
            _begin(fault, replica, loop)
        else:
            _end(fault, replica)
    if moments:
        loop.call_at(moments[0][0], _walk, moments, loop)


def _begin(fault: Fault, replica: SimulatedServer, loop: asyncio.AbstractEventLoop) -> None:
    match fault.kind:
        case FleetFaultKind.KILL:
            replica.kill()
        case FleetFaultKind.RESTART:
            replica.kill()
            loop.call_later(fault.value, replica.start)
        case FleetFaultKind.ROLL:
            replica.roll(fault.value)
        case FleetFaultKind.HANG:
            replica.freeze(True)
        case FleetFaultKind.SLOW:
            replica.slow_down(fault.value)
        case _:
            setattr(replica.faults, FIELDS[fault.kind], fault.value)


def _end(fault: Fault, replica: SimulatedServer) -> None:
    if fault.kind is FleetFaultKind.HANG:
        replica.freeze(False)
    elif fault.kind is FleetFaultKind.SLOW:
        replica.slow_down(1.0)
    elif fault.kind in FIELDS:
        setattr(replica.faults, FIELDS[fault.kind], 0.0)
