"""The dispatcher while it drains, with a policy that raises, and requests past the waiting room."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from llmproxy.core.domain import AdmissionKind, Outcome, Refused, Request, Role, Trouble, Verdict
from llmproxy.core.lease_events import Started
from llmproxy.core.queueing.fairness.fair_share import FairShare
from llmproxy.core.settings import Disaggregation, Splitting
from llmproxy.scheduling.dispatcher import Dispatcher
from tests.core.make import DEFAULTS, request
from tests.dispatching import SETTINGS, Client, dispatcher, emptied, empty, holding, now, turns, virtual

# --- drain ------------------------------------------------------------------------------------------------------------


@emptied(a=1)
async def test_drain_refuses_requests_and_lets_leases_end(one: Dispatcher) -> None:
    holder, waiting, leaving = Client(one), Client(one), Client(one)
    await turns()
    leaving.task.cancel()
    one.drain()
    assert one.draining
    late = Client(one)
    await turns()
    for client in (waiting, late):
        assert client.refused is not None
        assert client.refused.outcome is Outcome.DRAINING
        assert client.refused.retry_after_s
    assert leaving.task.cancelled()
    assert holder.lease is not None
    assert one.leases == 1
    await holder.done()


@emptied(a=1)
async def test_a_drain_may_serve_waiting_requests_until_called_again(one: Dispatcher) -> None:
    holder, first, second = Client(one), Client(one), Client(one)
    await turns()
    one.drain(finish_waiting=True)
    late = Client(one)
    await turns()
    assert late.refused is not None
    assert late.refused.outcome is Outcome.DRAINING
    await holder.done()
    await turns()
    assert first.lease is not None
    one.drain()
    await turns()
    assert second.refused is not None
    await first.done()


@emptied(a=1)
async def test_drain_in_the_turn_of_a_grant_lets_the_grant_stand(one: Dispatcher) -> None:
    client = Client(one)
    await asyncio.sleep(0)
    one._decide()
    one.drain()
    await turns()
    assert client.lease is not None
    await client.done()


@virtual
async def test_a_policy_that_raises_leaves_no_request_waiting() -> None:
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
    one = dispatcher(a=1)
    faults = iter([True, False, True])
    charge = FairShare.charge

    def faulty(self: FairShare, flow: str, cost: float) -> None:
        if next(faults, False):
            raise ValueError("a plugin's bug")
        charge(self, flow, cost)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FairShare, "charge", faulty)
        clients = [Client(one) for _ in range(3)]
        for client in clients:
            async with asyncio.timeout(5.0):
                while client.holds() is None:  # noqa: ASYNC110 - on a virtual clock
                    await asyncio.sleep(0.1)
            client.leave.set()
            await client.task
    assert [type(error) for error in reported] == [ValueError], "the second one a moment later is counted alone"
    empty(one)


# --- prompts that are kept for other backends ---


def of_two_roles() -> Dispatcher:
    roles = {"p": Role.PREFILL, "d": Role.DECODE}
    disaggregation = Disaggregation(Splitting.ALWAYS, lease_s=30.0)
    settings = replace(DEFAULTS, capacity=SETTINGS.capacity, roles=roles, disaggregation=disaggregation)
    return dispatcher(settings=settings, p=1, d=1)


async def computed(one: Dispatcher) -> Request:
    """A request whose prefill stage ended, and whose backend still keeps the blocks."""
    asked = request(splittable=True, stream=True)
    async with holding(one, asked) as lease:
        assert lease.backend == "p"
        lease.apply(Started(lease.grant.lease), now())
        lease.verdict = Verdict.SERVED
    return asked


@virtual
async def test_a_prompt_that_nobody_fetches_is_waited_for_until_its_lease_ends() -> None:
    one = of_two_roles()
    asked = await computed(one)
    began_s = now()
    await asyncio.wait_for(one.emptied("p"), 100.0)
    assert now() - began_s == pytest.approx(30.0, abs=0.1)
    one.pools.remove_backend("p")
    one.ended(asked, None)
    async with holding(one, request()) as lease:
        assert lease.backend == "d", "the removed backend is not looked up"
        lease.verdict = Verdict.SERVED


@virtual
async def test_a_prompt_of_a_request_that_ended_is_not_waited_for() -> None:
    one = of_two_roles()
    asked = await computed(one)
    emptied = asyncio.create_task(one.emptied("p"))
    await turns()
    assert not emptied.done()
    one.ended(asked, None)
    await turns()
    assert emptied.done()


@virtual
async def test_a_wait_for_an_empty_backend_that_is_cancelled_leaves_nothing() -> None:
    """A backend may come back while it leaves, and leave again."""
    one = of_two_roles()
    asked = await computed(one)
    waits = [asyncio.create_task(one.emptied("p")) for _ in range(2)]
    await turns()
    waits[0].cancel()
    await asyncio.wait_for(waits[1], 100.0)
    one.pools.remove_backend("p")
    one.ended(asked, None)
    await turns()
    assert waits[0].cancelled()
    async with holding(one, request()) as lease:
        lease.verdict = Verdict.SERVED


@virtual
async def test_a_prompt_is_waited_for_until_its_answer_begins_and_no_longer() -> None:
    one = of_two_roles()
    asked = await computed(one)
    emptied = asyncio.create_task(one.emptied("p"))
    async with holding(one, asked, entry=AdmissionKind.PREFILLED) as lease:
        await asyncio.sleep(5.0)
        assert not emptied.done()
        lease.apply(Started(lease.grant.lease), now())
        await turns()
        assert emptied.done()
        lease.verdict = Verdict.SERVED
    one.ended(asked, None)


# --- past the waiting room --------------------------------------------------------------------------------------------


@emptied(a=1)
async def test_direct_requests_are_in_flight_and_no_load(one: Dispatcher) -> None:
    cuts: list[str] = []
    with one.direct("a", lambda: cuts.append("first")), one.direct("a", lambda: cuts.append("second")):
        assert (one.in_flight("a"), one.pools.views(now())["a"].load) == (2, 0)
        async with holding(one, request()) as lease:
            assert (lease.backend, one.in_flight("a")) == ("a", 3), "it has taken nobody's place"
            lease.verdict = Verdict.SERVED
        emptied = asyncio.create_task(one.emptied("a"))
        await turns()
        assert not emptied.done()
        one.troubled("a", Trouble.TIMEOUT, "silence")
        assert cuts == [], "a backend that does not answer polls may still send bytes"
        for _ in range(2):
            one.troubled("a", Trouble.REFUSED, "nobody there")
        assert sorted(cuts) == ["first", "second"]
    await emptied
    assert one.in_flight("a") == 0


@virtual
async def test_direct_requests_need_a_backend_and_no_drain() -> None:
    one = dispatcher(a=1)
    with one.direct("a", lambda: None):
        one.drain(finish_waiting=True)
        with pytest.raises(Refused) as refused, one.direct("a", lambda: None):
            raise AssertionError("it was admitted")
        assert (refused.value.outcome, one.in_flight("a")) == (Outcome.DRAINING, 1)
    with pytest.raises(Refused, match="removed"), dispatcher(a=1).direct("b", lambda: None):
        raise AssertionError("it was admitted")


@emptied(a=1)
async def test_direct_requests_on_a_drained_backend_end_when_polls_find_it_down(one: Dispatcher) -> None:
    """Otherwise a hung backend could not be removed before the longest time of an answer."""
    cuts: list[str] = []
    held = one.pools.backends["a"]
    with one.direct("a", lambda: cuts.append("cut")):
        for drained in (False, True):
            held.drained = drained
            while not held.health.down:
                one.troubled("a", Trouble.TIMEOUT, "silence")
            one.troubled("a", Trouble.TIMEOUT, "silence")
            assert bool(cuts) is drained
