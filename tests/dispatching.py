"""A dispatcher on a virtual clock, and clients of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial, update_wrapper
from inspect import Signature, signature
from random import Random
from typing import Any, Concatenate, ParamSpec, TypeVar

import pytest

from llmproxy.core.domain import AdmissionKind, Refused, Request, Verdict
from llmproxy.core.placement.policy import make
from llmproxy.core.pools import Pools
from llmproxy.core.settings import Settings
from llmproxy.lab.run.virtual_time import run
from llmproxy.scheduling.dispatcher import Dispatcher
from llmproxy.scheduling.lease import Lease, Leasing
from tests.core.machine.account import assert_nothing_left
from tests.core.make import BASE, DEFAULTS, listing, request

SETTINGS = replace(DEFAULTS, capacity=replace(DEFAULTS.capacity, look_ahead=0))


P = ParamSpec("P")
T = TypeVar("T")


def named_as(test: Callable[..., object], body: Callable[P, T], own: int = 0) -> Callable[P, T]:
    """`body` with the name of a test, and with its parameters but the first `own` ones, which pytest does not know."""
    update_wrapper(body, test)
    # pytest follows __wrapped__ and would take the test for a coroutine of its own loop.
    del body.__wrapped__  # type: ignore[attr-defined]
    parameters = list(signature(test).parameters.values())[own:]
    body.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return body


def virtual(test: Callable[P, Coroutine[Any, Any, object]]) -> Callable[P, None]:
    """Run a test on a virtual clock."""

    def sync(*given: P.args, **named: P.kwargs) -> None:
        run(test(*given, **named))

    return named_as(test, sync)


class Passes:
    """Counts how often the scheduler is asked."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, took_s: float) -> None:
        assert took_s >= 0.0
        self.count += 1


def dispatcher(passes: Passes | None = None, settings: Settings = SETTINGS, **backends: int) -> Dispatcher:
    made = Dispatcher(Pools(settings, backends, {}, partial(make, settings.placement, Random(0))), passes or Passes())
    for name in backends:
        made.answered(name)
        made.listed(name, listing(base=BASE))
    return made


def now() -> float:
    return asyncio.get_running_loop().time()


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def refusal_of(waiting: Awaitable[object]) -> Refused:
    """Returns the refusal that an awaitable raises."""
    with pytest.raises(Refused) as caught:
        await waiting
    return caught.value


def empty(one: Dispatcher) -> None:
    one.pools.check(now())
    assert_nothing_left(one.pools, now())
    assert not one._waiting
    assert not one._leases
    assert not one._direct
    assert one.leases == 0
    assert not one._unresolved
    assert (one.nameless, one._nameless_bytes) == (0, 0)


def emptied(
    settings: Settings = SETTINGS, **backends: int
) -> Callable[[Callable[Concatenate[Dispatcher, P], Awaitable[None]]], Callable[P, None]]:
    """Run a test on a virtual clock with a dispatcher of these backends, in which nothing may stay behind."""

    def decorate(test: Callable[Concatenate[Dispatcher, P], Awaitable[None]]) -> Callable[P, None]:
        async def body(*given: P.args, **named: P.kwargs) -> None:
            one = dispatcher(None, settings, **backends)
            await test(one, *given, **named)
            await turns()
            empty(one)

        return virtual(named_as(test, body, 1))

    return decorate


@asynccontextmanager
async def holding(
    leasing: Leasing,
    asked: Request,
    excluded: frozenset[str] = frozenset(),
    entry: AdmissionKind = AdmissionKind.NEW,
) -> AsyncIterator[Lease]:
    """Waits for a lease, and gives it back at the end of the block."""
    lease = await leasing.admit(asked, excluded, entry)
    try:
        yield lease
    finally:
        lease.give_back(asyncio.get_running_loop().time())


class Client:
    """A task that is admitted, holds its lease until it is released, and remembers what happened."""

    def __init__(
        self, one: Leasing, asked: Request | None = None, entry: AdmissionKind = AdmissionKind.NEW, **facts: Any
    ) -> None:
        self.request = asked or request(arrived_s=now(), deadline_s=now() + 60.0, **facts)
        self.entry = entry
        self.verdict = Verdict.SERVED
        self.lease: Lease | None = None
        self.refused: Refused | None = None
        self.leave = asyncio.Event()
        self._dispatcher = one
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            async with holding(self._dispatcher, self.request, entry=self.entry) as lease:
                self.lease = lease
                await self.leave.wait()
                lease.verdict = self.verdict
        except Refused as refused:
            self.refused = refused

    def holds(self) -> str | None:
        """The backend that it holds a lease of."""
        return self.lease.backend if self.lease is not None else None

    async def done(self) -> None:
        self.leave.set()
        await asyncio.gather(self.task, return_exceptions=True)
