"""What applied the fleet of the timed soak, one thing a minute. Each ends whole again, however it was left."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from benchmarks.endurance.rig import Rig

FaultContext = Callable[[Rig, int], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def killed(rig: Rig, index: int) -> AsyncIterator[None]:
    await rig.kill_replica(index)
    try:
        yield
    finally:
        await rig.restart_replica(index)


@asynccontextmanager
async def stopped(rig: Rig, index: int) -> AsyncIterator[None]:
    """SIGSTOP, then SIGCONT: sockets accept, nothing answers, polls included."""
    child = rig.replicas[index].child
    child.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        child.send_signal(signal.SIGCONT)


@asynccontextmanager
async def removed(rig: Rig, index: int) -> AsyncIterator[None]:
    """Out of the configuration, which changes elsewhere too, and back into it."""
    gone = f'llmproxy_backend_available{{backend="{rig.name(index)}"}}'
    rig.write(without=[index], retry={"extra_attempts": 1}, queue={"max_wait_s": 25.0})
    try:
        await rig.becomes(gone, None)
        yield
    finally:
        rig.write()
        await rig.becomes(gone, 1.0)


@asynccontextmanager
async def drained(rig: Rig, index: int) -> AsyncIterator[None]:
    await rig.admin(index, "drain")
    try:
        yield
    finally:
        await rig.admin(index, "undrain")


@asynccontextmanager
async def misled(rig: Rig, _: int) -> AsyncIterator[None]:
    """A configuration that nobody could go by, then the old one."""
    refused = 'llmproxy_config_reloads_total{result="failure"}'
    before = await rig.value(refused) or 0.0
    rig.replace_file("backends: [http://127.0.0.1:1]\nquue: {max_wait_s: 1}\n")
    try:
        await rig.becomes(refused, before + 1.0)
        yield
    finally:
        rig.write()
        await rig.becomes("llmproxy_config_last_reload_successful", 1.0)


@asynccontextmanager
async def all_stopped(rig: Rig, _: int) -> AsyncIterator[None]:
    """The whole fleet stands still for a moment."""
    children = [replica.child for replica in rig.replicas]
    for child in children:
        child.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for child in children:
            child.send_signal(signal.SIGCONT)


def _broken(kind: str, *, restarted: bool = False, **how: object) -> FaultContext:
    """A fault of the simulated replica that is switched off again, or that only a new process mends."""

    @asynccontextmanager
    async def applied(rig: Rig, index: int) -> AsyncIterator[None]:
        await rig.fault(index, kind, **how)
        try:
            yield
        finally:
            await (rig.restart_replica(index) if restarted else rig.fault(index, None))

    return applied


@dataclass(frozen=True, slots=True)
class Fault:
    """`lasts_s` is how long it goes on before it is mended; it hits the replicas in turn."""

    name: str
    applied: FaultContext
    lasts_s: float


FAULTS = (
    Fault("killed, and started again", killed, 3.0),
    Fault("its gauges lie: always idle", _broken("lies"), 15.0),
    Fault("stopped (SIGSTOP), and goes on", stopped, 5.0),
    Fault("removed by a reload, and added", removed, 10.0),
    Fault("answers 503", _broken("busy_503"), 5.0),
    Fault("five answers are reset in the middle", _broken("reset", after_bytes=2_000, times=5), 5.0),
    Fault("drained, and undrained", drained, 10.0),
    Fault("hangs as after SIGTERM, and is started again", _broken("hang", restarted=True), 3.0),
    Fault("ten times as slow", _broken("slow", factor=10), 10.0),
    Fault("answers 500 while it drains, and is started again", _broken("draining_500", restarted=True), 3.0),
    Fault("frozen, with /health 200", _broken("frozen"), 5.0),
    Fault("its streams begin with an error, and the rest is 500", _broken("stream_error_first"), 5.0),
    Fault("a configuration that is wrong", misled, 5.0),
    Fault("its engine is dead, and is started again", _broken("engine_dead", restarted=True), 3.0),
    Fault("all are stopped at once, and go on", all_stopped, 3.0),
)
