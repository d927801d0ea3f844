"""The timeline of a replay: which fault begins and ends when."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping

from llmproxy.lab.fleet.server import SimulatedServer
from llmproxy.lab.fleet.spec import Fault, FleetFaultKind


def schedule(faults: Iterable[Fault], replicas: Mapping[str, SimulatedServer], start_s: float) -> None:
    """Let each fault begin and end in its time; `start_s` is the loop's time at which the trace begins.

    Of what falls on one moment, ends come before beginnings, and otherwise the order is that of `faults`.
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
    """Do what is due and set one timer for the rest: timers of one moment have no order among themselves."""
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
        case FleetFaultKind.RESET:
            replica.faults.reset = fault.value
        case FleetFaultKind.METRIC_AGE:
            replica.faults.metric_age_s = fault.value
        case FleetFaultKind.LOST_READINGS:
            replica.faults.lost_readings = fault.value
        case FleetFaultKind.LOST_KV_EVENTS:
            replica.faults.lost_kv_events = fault.value


def _end(fault: Fault, replica: SimulatedServer) -> None:
    match fault.kind:
        case FleetFaultKind.HANG:
            replica.freeze(False)
        case FleetFaultKind.SLOW:
            replica.slow_down(1.0)
        case FleetFaultKind.RESET:
            replica.faults.reset = 0.0
        case FleetFaultKind.METRIC_AGE:
            replica.faults.metric_age_s = 0.0
        case FleetFaultKind.LOST_READINGS:
            replica.faults.lost_readings = 0.0
        case FleetFaultKind.LOST_KV_EVENTS:
            replica.faults.lost_kv_events = 0.0
        case FleetFaultKind.KILL | FleetFaultKind.RESTART | FleetFaultKind.ROLL:
            pass
