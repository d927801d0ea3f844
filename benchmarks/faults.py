"""Faults of a running fleet, as context managers.

The fleet is healthy again after each block, however the block ends.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import aiohttp

from benchmarks.fleet import Fleet, until

Fault = Callable[[Fleet, int], AbstractAsyncContextManager[None]]
"""Breaks the replica with this index, and repairs it at the end of the block."""


async def restart(running: Fleet, index: int) -> None:
    """Kills a replica, starts it with a cold cache, and waits until it answers."""
    await running.replicas[index].stop(signal.SIGKILL)
    await running.start_replica(index)
    await until(lambda: _answers(running, index))


async def _answers(running: Fleet, index: int) -> bool:
    try:
        return bool(await running.text(running.replica_urls[index] + "/v1/models"))
    except aiohttp.ClientError:
        return False


@asynccontextmanager
async def killed(running: Fleet, index: int) -> AsyncIterator[None]:
    await running.replicas[index].stop(signal.SIGKILL)
    try:
        yield
    finally:
        await restart(running, index)


def stopped(*, every: bool = False) -> Fault:
    """Returns a fault: SIGSTOP and later SIGCONT of one replica, or of all with `every`.

    A stopped replica accepts connections and answers nothing.
    """

    @asynccontextmanager
    async def applied(running: Fleet, index: int) -> AsyncIterator[None]:
        replicas = running.replicas if every else [running.replicas[index]]
        for replica in replicas:
            replica.child.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for replica in replicas:
                replica.child.send_signal(signal.SIGCONT)

    return applied


@asynccontextmanager
async def removed(running: Fleet, index: int) -> AsyncIterator[None]:
    """Removes a replica from the configuration, and adds it again after the block. Other keys change too."""
    available = f'llmproxy_backend_available{{backend="{running.name(index)}"}}'
    running.write(without=[index], retry={"extra_attempts": 1}, queue={"max_wait_s": 25.0})
    try:
        await running.becomes(available, None)
        yield
    finally:
        running.write()
        await running.becomes(available, 1.0)


@asynccontextmanager
async def drained(running: Fleet, index: int) -> AsyncIterator[None]:
    await running.admin(index, "drain")
    try:
        yield
    finally:
        await running.admin(index, "undrain")


@asynccontextmanager
async def misconfigured(running: Fleet, _: int) -> AsyncIterator[None]:
    """Writes an invalid configuration, and the valid one again after the block."""
    refused = 'llmproxy_config_reloads_total{result="failure"}'
    before = await running.metric(refused) or 0.0
    running.write_text("backends: [http://127.0.0.1:1]\nquue: {max_wait_s: 1}\n")
    try:
        await running.becomes(refused, before + 1.0)
        yield
    finally:
        running.write()
        await running.becomes("llmproxy_config_last_reload_successful", 1.0)


def broken(kind: str, *, restarted: bool = False, **how: object) -> Fault:
    """Returns a fault `kind` of a simulated replica.

    The fault is switched off at the end of the block, or ended by a restart with `restarted`.
    """

    @asynccontextmanager
    async def applied(running: Fleet, index: int) -> AsyncIterator[None]:
        await running.fault(index, kind, **how)
        try:
            yield
        finally:
            await (restart(running, index) if restarted else running.fault(index, None))

    return applied
