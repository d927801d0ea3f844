"""Every way out of the waiting room and of a lease, in any turn of the loop, leaves nothing behind."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from llmproxy.core.domain import CRITICAL, DEFAULT, Reading, Refused, Trouble, Usage, Verdict
from llmproxy.core.lease_events import Started
from llmproxy.core.scheduler import FAULT_RETRY_S
from llmproxy.scheduling.dispatcher import Dispatcher
from tests.core.make import listing, request
from tests.dispatching import Client, dispatcher, emptied, empty, holding, now, turns, virtual

# --- every way out returns the lease ----------------------------------------------------------------------------------


@virtual
async def test_an_exception_in_the_block_returns_the_lease_and_passes() -> None:
    one = dispatcher(a=1)

    async def breaks() -> None:
        async with holding(one, request()):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await breaks()
    await turns()
    empty(one)
    await Client(one).done()


@virtual
async def test_a_block_left_without_a_word_does_not_blame_the_backend() -> None:
    one = dispatcher(a=1)
    for _ in range(10):
        async with holding(one, request()):
            pass
    await turns()
    assert one.pools.views(now())["a"].available
    empty(one)


@virtual
async def test_a_cancel_in_one_pool_survives_a_fault_in_another() -> None:
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
    one = dispatcher(a=1)
    one.pools.add_backend("b", 1)
    one.answered("b")
    one.listed("b", listing(base="other"))
    with pytest.MonkeyPatch.context() as patch:

        def faulty(*_: object) -> None:
            raise ValueError("a plugin's bug")

        patch.setattr(one.pools.schedulers["other"]._placement, "place", faulty)
        clients = [Client(one), Client(one, pool="other", model="other"), Client(one)]
        await turns()
        assert [client.holds() for client in clients] == ["a", None, None]
        clients[0].task.cancel()
        await turns()
        assert clients[2].holds() == "a"
        clients[1].task.cancel()
        clients[2].task.cancel()
        await turns()
    await asyncio.sleep(FAULT_RETRY_S)
    assert {str(fault) for fault in reported} == {"a plugin's bug"}
    empty(one)


@virtual
async def test_a_policy_that_always_raises_is_logged_once_a_second() -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    one = dispatcher(a=1)

    def faulty(*_: object) -> None:
        raise ValueError("a plugin's bug")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one.pools.schedulers["base"]._placement.observer, "started", faulty)
        for _ in range(100):
            async with holding(one, request()) as lease:
                lease.apply(Started(lease.grant.lease), now())
            await asyncio.sleep(0.0999)
    assert len(reported) == 10
    assert [context["message"] for context in reported] == [
        "a scheduling policy failed",
        *["a scheduling policy failed, and 10 times since the last report"] * 9,
    ]
    empty(one)


@pytest.mark.parametrize("turn", range(6))
@pytest.mark.parametrize("order", ["cancelled, then freed", "freed, then cancelled"])
@emptied(a=1)
async def test_a_client_may_leave_in_any_turn_around_its_grant(one: Dispatcher, turn: int, order: str) -> None:
    holder, leaving, next_one = Client(one), Client(one), Client(one)
    await turns()
    if order == "cancelled, then freed":
        leaving.task.cancel()
        await turns(turn)
        holder.leave.set()
    else:
        holder.leave.set()
        await turns(turn)
        leaving.task.cancel()
    await turns(10)
    assert leaving.task.cancelled()
    assert next_one.lease is not None, "the seat is lost"
    assert one.leases == 1
    await next_one.done()


@pytest.mark.parametrize("turn", range(6))
@emptied(a=1)
async def test_a_client_may_leave_in_any_turn_around_its_deadline(one: Dispatcher, turn: int) -> None:
    holder, waiting = Client(one), Client(one)
    await turns()
    timer = asyncio.get_running_loop().call_at(60.0, lambda: None)
    await asyncio.sleep(60.0 - now())
    await turns(turn)
    waiting.task.cancel()
    await turns()
    assert waiting.lease is None
    timer.cancel()
    await holder.done()


# --- all of it at once ------------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(4))
@emptied(a=3, b=1, c=6)
async def test_a_crowd_of_impatient_clients_leaves_nothing_behind(one: Dispatcher, seed: int) -> None:
    async def client() -> None:
        excluded: frozenset[str] = frozenset()
        asked = request(
            band=rng.choice((CRITICAL, DEFAULT)),
            flow=rng.choice("fgh"),
            arrived_s=now(),
            deadline_s=now() + rng.choice((0.5, 5.0, 60.0)),
        )
        for _ in range(3):
            try:
                async with holding(one, asked, excluded) as lease:
                    await asyncio.sleep(rng.expovariate(2.0))
                    lease.apply(Started(lease.grant.lease), now())
                    await asyncio.sleep(rng.expovariate(2.0))
                    lease.verdict = rng.choice((Verdict.SERVED, Verdict.SERVED, Verdict.FAILED, Verdict.BUSY))
                    lease.usage = Usage(10, rng.randrange(50))
            except Refused as refused:
                ends.append(refused.outcome)
                return
            if lease.verdict is Verdict.SERVED:
                break
            excluded |= {lease.backend}
        ends.append("served")

    rng = Random(seed)
    ends: list[str] = []
    tasks = []
    for _ in range(300):
        tasks.append(asyncio.create_task(client()))
        await asyncio.sleep(rng.expovariate(20.0))
        if rng.random() < 0.3:
            rng.choice(tasks).cancel()
        if rng.random() < 0.05:
            one.troubled("b", rng.choice(list(Trouble)), "")
        if rng.random() < 0.1:
            one.answered("b")
            one.observe("c", Reading(now(), running=rng.randrange(8)))
        one.pools.check(now())
    await asyncio.gather(*tasks, return_exceptions=True)
    cancelled = sum(task.cancelled() for task in tasks)
    assert len(ends) + cancelled == len(tasks)
    assert ends.count("served") > 50
    assert cancelled > 20


def test_the_virtual_clock_says_when_nothing_can_ever_happen() -> None:
    with pytest.raises(RuntimeError, match="nothing will ever happen"):
        virtual(asyncio.Event().wait)()
