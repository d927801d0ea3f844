"""Requests of workers at the scheduler's dispatcher: they behave like local requests and leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import socket
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from llmproxy.core.domain import (
    CRITICAL,
    DEFAULT,
    SHEDDABLE,
    AdmissionKind,
    Grant,
    GrantReason,
    Outcome,
    Placed,
    Refused,
    Request,
    Role,
    Stage,
    Trouble,
    Usage,
    Verdict,
)
from llmproxy.core.lease_events import Committed, LeaseEvent, Progress, Returned, Started
from llmproxy.core.settings import Disaggregation, Splitting, UsageLimit
from llmproxy.observe import logs
from llmproxy.remote.link import FROM_WORKER, TO_WORKER, Link
from llmproxy.remote.messages import LeaseGranted, PageRequest, PageResponse, ResponseStored, ShutdownState
from llmproxy.scheduling.dispatcher import Dispatcher
from tests.core.make import DEFAULTS, listing, request
from tests.dispatching import SETTINGS, dispatcher, holding, now, refusal_of, turns, virtual
from tests.exits import exit_of
from tests.remote.workers.link import (
    ENOUGH,
    RecordedEvents,
    WorkerLink,
    leased,
    linked,
    nothing_left,
    refused,
)

EXIT = exit_of(
    request_id="r1", method="POST", path="/", outcome=Outcome.COMPLETED, status=200, duration_s=1.0, model="base"
)


# --- one face ---------------------------------------------------------------------------------------------------------


@linked
async def test_worker_gets_a_lease_and_reports_its_end(one: Dispatcher, line: WorkerLink) -> None:
    decided, events = list[Grant](), list[LeaseEvent]()
    decide = one.pools.decide

    def spy(now: float) -> list[Any]:
        found = decide(now)
        decided.extend(grant for grant in found if isinstance(grant, Grant))
        return found

    one.pools.decide = spy  # type: ignore[method-assign]

    apply = one.pools.apply

    def heard(event: LeaseEvent, now: float) -> None:
        events.append(event)
        apply(event, now)

    one.pools.apply = heard  # type: ignore[method-assign]
    asked = request(arrived_s=now(), deadline_s=now() + 60.0, prefix=(1, 2**64 - 1), prefix_tokens=16.0)
    async with holding(line.remote, asked) as lease:
        assert (lease.backend, [lease.grant]) == ("a", decided)
        assert lease.grant.request is asked
        assert (one.leases, line.remote.running, line.session.server.open_requests) == (1, 1, 1)
        lease.apply(Committed(lease.grant.lease), now())
        lease.apply(Started(lease.grant.lease), now())
        lease.apply(Progress(lease.grant.lease, 32), now())
        lease.verdict, lease.usage = Verdict.SERVED, Usage(10, 32, 2)
    line.remote.ended(asked, True)
    await nothing_left(one, line)
    number = lease.grant.lease
    returned = Returned(number, Verdict.SERVED, Usage(10, 32, 2))
    assert events == [Committed(number), Started(number), Progress(number, 32), returned]


@virtual
async def test_changes_are_sent_before_grants_and_resolved_names() -> None:
    one, changes = dispatcher(a=1), list[float]()

    def settle() -> None:
        changes.append(now())
        line.session.link.send(ShutdownState(draining=True))

    line = WorkerLink(one, settle=settle)
    client = line.client()
    while client.lease is None:
        await asyncio.sleep(0)
        assert line.remote.draining or client.lease is None
    assert len(changes) == 1
    await line.remote.resolve("base", 0.0, 10)
    assert len(changes) == 2
    await nothing_left(one, line)


@virtual
async def test_no_grant_comes_before_its_request() -> None:
    """The loop of the scheduler may have read the clock for the last time before this one asked."""
    one = dispatcher(a=1)
    line = WorkerLink(one)
    await asyncio.sleep(5.0)

    client = line.client()
    await turns(1)
    early = LeaseGranted(1, Stage.WHOLE, Placed("a", 0.0, (), 1), 4.999, 0, GrantReason((), 1, (), 0), 60.0)
    line.remote.handle(early)
    assert (await leased(client)).grant.at_s == 5.0
    await nothing_left(one, line)


@virtual
async def test_lease_of_a_worker_has_its_stage() -> None:
    """Both faces grant the same: the prompt with one token, and then the answer as it was asked for."""
    roles = {"p": Role.PREFILL, "d": Role.DECODE}
    always = Disaggregation(Splitting.ALWAYS, 30.0)
    one = dispatcher(
        settings=replace(DEFAULTS, capacity=SETTINGS.capacity, roles=roles, disaggregation=always), p=2, d=2
    )
    line, granted = WorkerLink(one), list[list[tuple[str, Request]]]()
    for face in (one, line.remote):
        asked, stages = request(splittable=True, output_tokens=7), list[tuple[str, Request]]()
        for entry in (AdmissionKind.NEW, AdmissionKind.PREFILLED):
            async with holding(face, asked, entry=entry) as lease:
                stages.append((lease.backend, structs.replace(lease.grant.request, id="", deadline_s=0.0)))
                lease.verdict = Verdict.SERVED
        face.ended(asked, None)
        granted.append(stages)
    here, there = granted
    assert here == there
    assert [(name, of.stage, of.output_tokens) for name, of in there] == [
        ("p", Stage.PREFILL, 1), ("d", Stage.DECODE, 7)
    ]  # fmt: skip
    await turns(ENOUGH)
    line.check()
    one.pools.check(now())
    assert {name: view.load for name, view in one.pools.views(now()).items()} == {"p": 0, "d": 0}


@virtual
@pytest.mark.parametrize("turns_more", range(6))
async def test_a_worker_that_dies_between_the_stages_leaves_no_place_kept(turns_more: int) -> None:
    """Its prompt is computed, and the scheduler has perhaps heard that, or that it wants the answer."""
    roles = {"p": Role.PREFILL, "d": Role.DECODE}
    settings = replace(DEFAULTS,
        capacity=SETTINGS.capacity, roles=roles, disaggregation=Disaggregation(Splitting.ALWAYS, 30.0),
        limits={"one": UsageLimit(in_flight=1)},
    )  # fmt: skip
    one = dispatcher(settings=settings, p=2, d=2)
    line, asked = WorkerLink(one), request(splittable=True, limits=("one",))
    async with holding(line.remote, asked) as lease:
        lease.apply(Started(lease.grant.lease), now())
        lease.verdict, lease.usage = Verdict.SERVED, Usage(10, 1)
    if turns_more:
        await turns(turns_more)
        answer = asyncio.create_task(line.remote.admit(asked, frozenset(), AdmissionKind.PREFILLED))
        await turns(turns_more)
        answer.cancel()
    line.die()
    await turns(ENOUGH)
    assert line.session.server.open_requests == 0
    assert one.leases == 0
    one.pools.check(now())
    assert {name: view.load for name, view in one.pools.views(now()).items()} == {"p": 0, "d": 0}
    # Neither does its limit count it any more.
    async with holding(one, request(splittable=True, limits=("one",))) as other:
        assert other.backend == "p"


@virtual
async def test_a_refusal_is_the_same_here_and_there() -> None:
    settings = replace(DEFAULTS, queue=replace(DEFAULTS.queue, no_backend_wait_s=0.0))
    one = dispatcher(settings=settings, a=1)
    one.troubled("a", Trouble.UNHEALTHY, "503")
    line, refusals = WorkerLink(one), list[Refused]()
    for face in (one, line.remote):
        with pytest.raises(Refused) as caught:
            async with holding(face, request()):
                pytest.fail("it was admitted")
        refusals.append(caught.value)
    here, there = refusals
    assert here.outcome is Outcome.REJECTED_NO_BACKENDS
    assert (there.outcome, there.message, there.retry_after_s) == (here.outcome, here.message, here.retry_after_s)


@virtual
async def test_the_backend_that_failed_is_excluded_across_the_line() -> None:
    one = dispatcher(a=4, b=4)
    line, asked = WorkerLink(one), request()
    async with holding(line.remote, asked) as first:
        first.verdict = Verdict.FAILED
    async with holding(line.remote, asked, frozenset({first.backend}), AdmissionKind.RETRY) as second:
        assert {first.backend, second.backend} == {"a", "b"}
    line.remote.ended(asked, None)
    await nothing_left(one, line)


@linked
async def test_a_bug_of_the_core_is_one_failed_request(one: Dispatcher, line: WorkerLink) -> None:

    def buggy(*_: object) -> None:
        raise ValueError("a bug")

    submit, one.pools.submit = one.pools.submit, buggy  # type: ignore[assignment, method-assign]
    assert await refused(line.client()) is Outcome.INTERNAL
    one.pools.submit = submit  # type: ignore[method-assign]
    assert (await leased(line.client())).backend == "a"


# --- one queue for all workers ----------------------------------------------------------------------------------------


@virtual
async def test_the_higher_band_goes_first_whichever_worker_has_it() -> None:
    one = dispatcher(a=1)
    lines = [WorkerLink(one), WorkerLink(one)]
    holder = lines[0].client()
    await turns(ENOUGH)
    granted: list[int] = []
    bands = (SHEDDABLE, DEFAULT, CRITICAL, DEFAULT, SHEDDABLE, CRITICAL)
    waiting = [lines[i % 2].client(band=band) for i, band in enumerate(bands)]
    await turns(ENOUGH)
    assert not any(client.holds() for client in waiting)
    await holder.done()
    for _ in waiting:
        await turns(ENOUGH)
        [served] = [client for client in waiting if client.holds() and not client.task.done()]
        granted.append(served.request.band)
        await served.done()
    assert granted == sorted(bands, reverse=True)
    await nothing_left(one, *lines)


# --- names, drain, pages, counts --------------------------------------------------------------------------------------


@linked
async def test_an_unknown_name_is_asked_for_and_waited_for(one: Dispatcher, line: WorkerLink) -> None:
    one.pools.add_backend("late", 1)
    asked = asyncio.create_task(line.remote.resolve("other", 30.0, 10))
    await turns(ENOUGH)
    assert (asked.done(), one.nameless) == (False, 1)
    one.answered("late")
    one.listed("late", listing(base="other"))
    assert (await asked).pool == "other"
    assert (await refusal_of(line.remote.resolve("nothing", 30.0, 10))).outcome is Outcome.UNKNOWN_MODEL


@linked
async def test_a_client_may_leave_while_its_model_is_unknown(one: Dispatcher, line: WorkerLink) -> None:
    one.pools.add_backend("late", 1)
    asked = asyncio.create_task(line.remote.resolve("other", 30.0, 10))
    await turns(ENOUGH)
    asked.cancel()
    await turns(ENOUGH)
    assert one.nameless == 0


@linked
async def test_a_waiting_request_is_refused_when_the_proxy_drains(one: Dispatcher, line: WorkerLink) -> None:
    waiting = [line.client(), line.client()][1]
    await turns(ENOUGH)
    one.drain()
    line.session.link.send(ShutdownState(leaving=True, draining=True, granting=False))
    assert await refused(waiting) is Outcome.DRAINING
    assert (line.remote.draining, line.remote.granting) == (True, False)


@virtual
async def test_a_direct_request_of_a_worker_is_in_flight() -> None:
    one = dispatcher(a=1)
    line, other = WorkerLink(one), WorkerLink(one)
    cuts: list[str] = []
    with line.remote.direct("a", lambda: cuts.append("line")):
        with other.remote.direct("a", lambda: cuts.append("other")):
            await turns(ENOUGH)
            assert (one.in_flight("a"), line.session.server.open_requests, other.session.server.open_requests) == (
                2,
                1,
                1,
            )
        await turns(ENOUGH)
        assert (one.in_flight("a"), line.session.server.open_requests, other.session.server.open_requests) == (1, 1, 0)
        assert cuts == []
        for _ in range(2):
            one.troubled("a", Trouble.REFUSED, "nobody there")
        await turns(ENOUGH)
        assert cuts == ["line"]
    await nothing_left(one, line, other)
    with line.remote.direct("gone", lambda: cuts.append("gone")):
        await turns(ENOUGH)
        assert cuts == ["line", "gone"]
    with line.remote.direct("gone", lambda: cuts.append("nobody")):
        pass
    await nothing_left(one, line, other)
    assert cuts == ["line", "gone"], "who has left hears nothing"
    line.remote.draining = True
    with pytest.raises(Refused) as caught, line.remote.direct("a", lambda: None):
        raise AssertionError("it was admitted")
    assert caught.value.outcome is Outcome.DRAINING


@linked
async def test_a_direct_request_ends_with_its_worker_or_scheduler(one: Dispatcher, line: WorkerLink) -> None:
    cuts: list[str] = []
    with line.remote.direct("a", lambda: cuts.append("cut")):
        await turns(ENOUGH)
        assert one.in_flight("a") == 1
        line.die()
        await turns(ENOUGH)
        assert (one.in_flight("a"), line.session.server.open_requests, cuts) == (0, 0, ["cut"])
    with pytest.raises(Refused), line.remote.direct("a", lambda: None):
        raise AssertionError("it was admitted")


@virtual
async def test_a_page_is_answered_by_the_scheduler() -> None:
    line = WorkerLink(dispatcher(a=1))
    shown = await line.remote.answer(lambda call: PageRequest(call, b"GET / HTTP/1.1\r\n\r\n", "10.0.0.1"))
    assert shown == PageResponse(shown.call, 200, "OK", (("x-remote", "10.0.0.1"),), b"GET / HTTP/1.1\r\n\r\n")


@virtual
async def test_metrics_and_usage_of_workers_are_counted_once() -> None:
    one = dispatcher(a=1)
    events = RecordedEvents()
    lines = [WorkerLink(one, events), WorkerLink(one, events)]
    for line in lines:
        line.metrics.attempted("a", Verdict.SERVED)
        line.estimator.learn("base", 300, 1, Usage(100, 50))
    with pytest.MonkeyPatch.context() as stalled:
        stalled.setattr(logs, "take_lines_lost", lambda: 7)
        lines[0].metrics.record(EXIT)
    lines[1].metrics.record(EXIT)
    await turns(ENOUGH)
    assert events.exits == [EXIT] * 2
    assert events.log_lines == 7
    assert events.attempts == [("a", Verdict.SERVED)] * 2
    assert events.learned == ["base"] * 2
    assert one.pools.estimator.models["base"].seen == 2
    assert not lines[0].estimator.models, "learned numbers come back for all workers alike"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("served", [True, False])
@virtual
async def test_nothing_of_a_request_is_left_to_the_garbage_collector(served: bool) -> None:
    """Neither where it was granted something nor where it was refused; what tests leave behind themselves is less."""
    many = 50
    one = dispatcher(settings=replace(DEFAULTS, queue=replace(DEFAULTS.queue, no_backend_wait_s=0.0)), a=1)
    line = WorkerLink(one)
    for _ in range(0 if served else 2):
        one.troubled("a", Trouble.REFUSED, "nobody listens")
    await turns(ENOUGH)
    gc.collect()
    gc.disable()
    try:
        for _ in range(many):
            asked = request()
            with suppress(Refused):
                async with holding(line.remote, asked) as lease:
                    lease.verdict = Verdict.SERVED
                    assert served
            line.remote.ended(asked, None)
            await turns(ENOUGH)
        assert gc.collect() < many
    finally:
        gc.enable()


# --- real sockets -----------------------------------------------------------------------------------------------------


async def test_leases_work_over_a_socket_pair() -> None:
    one = dispatcher(a=2)
    line = WorkerLink(one)
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    up: Link[Any] = Link(TO_WORKER, line._hear, line._lost, local=True)
    down: Link[Any] = Link(FROM_WORKER, line.session.server.handle, line.session._lost, local=True)
    line.session.link = down
    line.session.server.attach(down)
    line.remote.link = up
    await loop.create_unix_connection(lambda: up, sock=ours)
    await loop.create_unix_connection(lambda: down, sock=theirs)
    clients = [line.client(prefix=tuple(range(5_000))) for _ in range(20)]
    for client in clients:
        client.leave.set()
    await asyncio.gather(*(client.task for client in clients))
    assert all(client.lease is not None for client in clients)
    for client in clients:
        line.remote.ended(client.request, None)
    up.close()
    await line.session.gone.wait()
    assert not line.events.exits
    await nothing_left(one, line)


@virtual
async def test_a_stored_response_is_reported_before_its_client_has_it() -> None:
    one = WorkerLink(dispatcher(a=1))
    one.remote.response_stored("resp_1", "a", "t")
    # No turn of the loop has passed: the client's bytes are written after this.
    assert one.up.writes == 1
    await turns(ENOUGH)
    assert one.events.made == [ResponseStored("resp_1", "a", "t")]
