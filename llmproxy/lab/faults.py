"""The timeline of a replay: what befalls the replicas, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from llmproxy.lab.fleet import Fault, FaultKind
from llmproxy.lab.replica import Replica


def schedule(faults: Iterable[Fault], replicas: Mapping[str, Replica], start_s: float) -> None:
    """Set a timer for each fault's beginning and end; `start_s` is the loop's time at which the trace begins."""
    loop = asyncio.get_running_loop()
    for fault in faults:
        named = [replicas[fault.replica]] if fault.replica is not None else list(replicas.values())
        for replica in named:
            loop.call_at(start_s + fault.at_s, _begin, fault, replica, loop)
            if fault.until_s is not None:
                loop.call_at(start_s + fault.until_s, _end, fault, replica)


def _begin(fault: Fault, replica: Replica, loop: asyncio.AbstractEventLoop) -> None:
    match fault.kind:
        case FaultKind.KILL:
            replica.kill()
        case FaultKind.RESTART:
            replica.kill()
            loop.call_later(fault.value, replica.start)
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
        case FaultKind.KILL | FaultKind.RESTART:
            pass
