"""The timeline of a replay: what befalls the replicas, and when."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping

from llmproxy.lab.run.fleet import Fault, FaultKind
from llmproxy.lab.run.replica import Replica


def schedule(faults: Iterable[Fault], replicas: Mapping[str, Replica], start_s: float) -> None:
    """Let each fault begin and end in its time; `start_s` is the loop's time at which the trace begins.

    Of what falls on one moment, ends come before beginnings, and otherwise the order is that of `faults`.
    """
    loop = asyncio.get_running_loop()
    moments: list[tuple[float, bool, Fault, Replica]] = []
    for fault in faults:
        named = [replicas[fault.replica]] if fault.replica is not None else list(replicas.values())
        for replica in named:
            moments.append((start_s + fault.at_s, True, fault, replica))
            if fault.until_s is not None:
                moments.append((start_s + fault.until_s, False, fault, replica))
            if fault.kind is FaultKind.METRIC_AGE:
                replica.ills.remembered_s = max(replica.ills.remembered_s, fault.value)
    moments.sort(key=lambda moment: moment[:2])
    _walk(deque(moments), loop)


def _walk(moments: deque[tuple[float, bool, Fault, Replica]], loop: asyncio.AbstractEventLoop) -> None:
    """Do what is due and set one timer for the rest: timers of one moment have no order among themselves."""
    while moments and moments[0][0] <= loop.time():
        _, begins, fault, replica = moments.popleft()
        if begins:
            _begin(fault, replica, loop)
        else:
            _end(fault, replica)
    if moments:
        loop.call_at(moments[0][0], _walk, moments, loop)


def _begin(fault: Fault, replica: Replica, loop: asyncio.AbstractEventLoop) -> None:
    match fault.kind:
        case FaultKind.KILL:
            replica.kill()
        case FaultKind.RESTART:
            replica.kill()
            loop.call_later(fault.value, replica.start)
        case FaultKind.ROLL:
            replica.roll(fault.value)
        case FaultKind.HANG:
            replica.freeze(True)
        case FaultKind.SLOW:
            replica.slow_down(fault.value)
        case FaultKind.RESET:
            replica.ills.reset = fault.value
        case FaultKind.METRIC_AGE:
            replica.ills.metric_age_s = fault.value
        case FaultKind.LOST_READINGS:
            replica.ills.lost_readings = fault.value
        case FaultKind.LOST_KV_EVENTS:
            replica.ills.lost_kv_events = fault.value


def _end(fault: Fault, replica: Replica) -> None:
    match fault.kind:
        case FaultKind.HANG:
            replica.freeze(False)
        case FaultKind.SLOW:
            replica.slow_down(1.0)
        case FaultKind.RESET:
            replica.ills.reset = 0.0
        case FaultKind.METRIC_AGE:
            replica.ills.metric_age_s = 0.0
        case FaultKind.LOST_READINGS:
            replica.ills.lost_readings = 0.0
        case FaultKind.LOST_KV_EVENTS:
            replica.ills.lost_kv_events = 0.0
        case FaultKind.KILL | FaultKind.RESTART | FaultKind.ROLL:
            pass
