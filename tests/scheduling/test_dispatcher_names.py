"""Requests for a name that no backend serves yet: how long they wait, and what wakes them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from random import Random

import pytest

from llmproxy.core.backends.catalogue import Target
from llmproxy.core.domain import Outcome
from llmproxy.core.placement.policy import make
from llmproxy.core.pools import Pools
from llmproxy.core.settings import QueueSettings
from llmproxy.scheduling.dispatcher import Dispatcher
from tests.core.make import DEFAULTS, listing
from tests.dispatching import SETTINGS, empty, now, refusal_of, turns, virtual

# --- names that no backend serves yet ---------------------------------------------------------------------------------


def unread() -> Dispatcher:
    """A dispatcher whose only backend was configured and never read."""
    return Dispatcher(Pools(SETTINGS, {"a": 1}, {}, partial(make, "least_request", Random(0))))


@virtual
async def test_a_name_is_waited_for_until_the_first_listing_knows_it() -> None:
    one = unread()
    task = asyncio.create_task(one.resolve("base", 5.0, 1))
    await asyncio.sleep(3.0)
    assert not task.done()
    one.answered("a")
    one.listed("a", listing())
    assert (await task).pool == "base"
    assert now() == 3.0


@virtual
async def test_a_name_is_waited_for_as_long_as_allowed() -> None:
    one = unread()
    assert (await refusal_of(one.resolve("base", 5.0, 1))).outcome is Outcome.REJECTED_NO_BACKENDS
    assert now() == 5.0
    await refusal_of(one.resolve("base", 0.0, 1))
    assert now() == 5.0


@virtual
async def test_a_name_is_waited_for_less_before_any_backend_answered() -> None:
    settings = replace(SETTINGS, queue=replace(SETTINGS.queue, startup_wait_s=2.0))
    one = Dispatcher(Pools(settings, {"a": 1, "b": 1}, {}, partial(make, "least_request", Random(0))))
    caught = await refusal_of(one.resolve("other", 5.0, 1))
    assert "No backend's models could be read since the start, so `other` is not known" in caught.message
    assert (caught.outcome, now()) == (Outcome.REJECTED_NO_BACKENDS, 2.0)
    assert caught.retry_after_s
    await refusal_of(one.resolve("other", 1.0, 1))
    assert now() == 3.0
    # The other backend may still load the requested model.
    one.answered("a")
    one.listed("a", listing())
    assert "1 of 2 backends never answered so far" in (await refusal_of(one.resolve("other", 5.0, 1))).message
    assert now() == 8.0


@virtual
async def test_a_drain_ends_the_wait_for_a_name() -> None:
    one = unread()
    task = asyncio.create_task(one.resolve("base", 5.0, 1))
    await turns()
    one.drain()
    assert (await refusal_of(task)).outcome is Outcome.DRAINING
    assert now() == 0.0


def looks(one: Dispatcher) -> list[str | None]:
    """The names that are looked up from now on."""
    seen: list[str | None] = []
    resolve = one.pools.catalogue.resolve

    def spy(name: str | None, key: str = "", beside: str | None = None) -> Target:
        seen.append(name)
        return resolve(name, key, beside)

    one.pools.catalogue.resolve = spy  # type: ignore[method-assign]
    return seen


@virtual
async def test_a_listing_wakes_only_requests_for_its_names() -> None:
    one = unread()
    one.pools.add_backend("b", 1)
    names: list[str | None] = ["base", "base", None, *(f"nobody-{i % 10}" for i in range(50))]
    tasks = [asyncio.create_task(one.resolve(name, 30.0, 1)) for name in names]
    await turns()
    seen = looks(one)
    one.expects_backends(())
    one.reconsider()
    await turns()
    assert seen == [], "nothing has turned up"
    one.listed("a", listing())
    await turns()
    assert sorted(map(str, seen)) == ["None", "base", "base"]
    assert [(await task).pool for task in tasks[:3]] == ["base"] * 3
    for _ in range(3):
        one.listed("a", listing())
        await turns()
    assert len(seen) == 3, "nor does a listing that says nothing new"
    one.listed("b", listing())
    await turns()
    assert len(seen) == 53, "every backend was read: no name is going to turn up any more"
    for task in tasks[3:]:
        assert "does not exist" in (await refusal_of(task)).message
    empty(one)


@virtual
async def test_a_promised_name_is_waited_for() -> None:
    one = unread()
    one.pools.catalogue.promised = frozenset({"sql"})
    task = asyncio.create_task(one.resolve("sql", 30.0, 1))
    await turns()
    seen = looks(one)
    for _ in range(3):
        one.listed("a", listing())
        await turns()
    assert seen == []
    one.listed("a", listing("sql"))
    assert (await task).adapter == "sql"
    empty(one)


@virtual
async def test_a_promise_that_is_taken_back_is_not_waited_for() -> None:
    one = unread()
    one.pools.catalogue.promised = frozenset({"sql"})
    one.listed("a", listing())
    task = asyncio.create_task(one.resolve("sql", 30.0, 1))
    await turns()
    one.pools.catalogue.promised = frozenset()
    one.reconsider()
    assert "does not exist" in (await refusal_of(task)).message
    assert now() == 0.0


@virtual
async def test_a_name_that_becomes_an_alias_is_waited_for_no_longer() -> None:
    one = unread()
    one.pools.add_backend("b", 1)
    one.listed("a", listing())
    tasks = [asyncio.create_task(one.resolve(name, 30.0, 1)) for name in ("chat", "other")]
    await turns()
    one.pools.reconfigure(SETTINGS, {"chat": {"base": 1, "new": 1}}, now())
    one.reconsider()
    await turns()
    assert [task.done() for task in tasks] == [True, False]
    assert (await tasks[0]).model == "base", "the other one is not served so far"
    one.drain()
    await refusal_of(tasks[1])


@virtual
async def test_name_of_several_models_works_if_one_has_no_replica() -> None:
    settings = replace(SETTINGS, scaling=replace(SETTINGS.scaling, pools=("new",)))
    one = Dispatcher(
        Pools(settings, {"a": 1}, {"chat": {"base": 1, "new": 1}}, partial(make, "least_request", Random(0)))
    )
    for name in "bc":
        one.pools.add_backend(name, 1)
    one.listed("a", listing())
    asked = [asyncio.create_task(one.resolve("chat", 30.0, 1, str(number))) for number in range(20)]
    await turns()
    served = [task for task in asked if task.done()]
    assert 0 < len(served) < 20
    assert {(await task).model for task in served} == {"base"}
    assert one.nameless == 20 - len(served), "the others wait for a replica, and ask for one"
    one.listed("b", listing(base="new"))
    await turns()
    assert all(task.done() for task in asked)
    assert {(await task).model for task in asked} == {"base", "new"}
    empty(one)


@pytest.mark.parametrize(
    "bounds", [replace(DEFAULTS.queue, requests_max=1), replace(DEFAULTS.queue, bytes_max=1)], ids=["names", "bytes"]
)
@virtual
async def test_requests_that_wait_for_names_are_bounded(bounds: QueueSettings) -> None:
    settings = replace(DEFAULTS, queue=bounds)
    one = Dispatcher(Pools(settings, {"a": 1}, {}, partial(make, "least_request", Random(0))))
    first = asyncio.create_task(one.resolve("base", 5.0, 1))
    await turns()
    await refusal_of(one.resolve("base", 5.0, 1))
    assert now() == 0.0
    await refusal_of(first)
    empty(one)
