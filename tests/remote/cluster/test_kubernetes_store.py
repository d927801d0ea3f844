"""The lock as a Kubernetes Lease: races, expiry by the observer's clock, and error messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest

from llmproxy.remote.cluster.election import Leadership, StoreError
from llmproxy.remote.cluster.locks import ADDRESS, TRIES, KubernetesLock
from tests.backends.kubernetes.api_server import ApiServer, Object, api_server

NAME = "llmproxy"
LOCK_S = 4.0


def wanted(holder: str, epoch: int = 0) -> Leadership:
    return Leadership(holder, f"{holder}:1", epoch)


@pytest.fixture
async def api() -> AsyncIterator[ApiServer]:
    async with api_server() as server:
        yield server


@pytest.fixture
async def locks(api: ApiServer) -> AsyncIterator[list[KubernetesLock]]:
    """The locks of three members."""
    found = [KubernetesLock(api.url, NAME) for _ in range(3)]
    yield found
    for one in found:
        await one.close()


def lease_of(api: ApiServer) -> Object:
    return api.objects["leases"][NAME]


def later(lock: KubernetesLock, for_s: float) -> None:
    """So much time goes by on the clock of this member."""
    version, since_s = lock._seen
    lock._seen = version, since_s - for_s


async def refused(waiting: Awaitable[object]) -> str:
    with pytest.raises(StoreError) as caught:
        await waiting
    return str(caught.value)


# --- the course of things ---------------------------------------------------------------------------------------------


async def test_the_first_one_creates_it(api: ApiServer, locks: list[KubernetesLock]) -> None:
    assert await locks[0].holder() is None
    assert await locks[0].take(wanted("a"), 3.5) == Leadership("a", "a:1", 1)
    spec = lease_of(api)["spec"]
    assert (spec["holderIdentity"], spec["leaseDurationSeconds"], spec["leaseTransitions"]) == ("a", 4, 1)
    assert lease_of(api)["metadata"]["annotations"] == {ADDRESS: "a:1"}
    assert await locks[1].holder() == Leadership("a", "a:1", 1)
    assert await locks[1].take(wanted("b"), LOCK_S) == Leadership("a", "a:1", 1)


async def test_one_of_several_simultaneous_creators_has_the_lock(api: ApiServer, locks: list[KubernetesLock]) -> None:
    everybody = asyncio.Barrier(3)

    async def before(method: str) -> None:
        if method == "POST":
            await everybody.wait()

    api.before = before
    taken = await asyncio.gather(*(lock.take(wanted(name), LOCK_S) for lock, name in zip(locks, "abc", strict=True)))
    assert taken == [taken[0]] * 3
    assert taken[0].epoch == 1


async def test_one_of_several_simultaneous_successors_has_the_lock(api: ApiServer, locks: list[KubernetesLock]) -> None:
    await locks[0].take(wanted("dead"), LOCK_S)
    for lock in locks:
        await lock.holder()
        later(lock, LOCK_S)
    everybody = asyncio.Barrier(3)

    async def before(method: str) -> None:
        if method == "PUT":
            await everybody.wait()

    api.before = before
    taken = await asyncio.gather(*(lock.take(wanted(name), LOCK_S) for lock, name in zip(locks, "abc", strict=True)))
    assert taken == [taken[0]] * 3
    assert taken[0].holder in "abc"
    assert taken[0].epoch == 2


async def test_a_renewal_keeps_the_turn_and_when_it_began(api: ApiServer, locks: list[KubernetesLock]) -> None:
    await locks[0].take(wanted("a"), LOCK_S)
    before = dict(lease_of(api)["spec"])
    version = lease_of(api)["metadata"]["resourceVersion"]
    assert await locks[0].take(wanted("a", 1), LOCK_S) == Leadership("a", "a:1", 1)
    after = lease_of(api)["spec"]
    assert after["acquireTime"] == before["acquireTime"]
    assert after["renewTime"] > before["renewTime"]
    assert lease_of(api)["metadata"]["resourceVersion"] > version


async def test_foreign_fields_of_the_lease_stay(api: ApiServer, locks: list[KubernetesLock]) -> None:
    await locks[0].take(wanted("a"), LOCK_S)
    lease = lease_of(api)
    lease["metadata"] |= {"labels": {"team": "x"}, "annotations": {"note": "y"}}
    lease["spec"]["strategy"] = "OldestEmulationVersion"
    api.put("leases", lease)
    await locks[0].take(wanted("a", 1), LOCK_S)
    metadata = lease_of(api)["metadata"]
    assert metadata["labels"] == {"team": "x"}
    assert metadata["annotations"] == {"note": "y", ADDRESS: "a:1"}
    assert lease_of(api)["spec"]["strategy"] == "OldestEmulationVersion"


async def test_lease_made_by_an_operator_is_taken(api: ApiServer, locks: list[KubernetesLock]) -> None:
    """Rights may be so narrow that nobody can create it but the chart."""
    api.put("leases", {"metadata": {"name": NAME, "annotations": None}, "spec": {}})
    assert await locks[0].take(wanted("a"), LOCK_S) == Leadership("a", "a:1", 1)


async def test_a_holder_that_is_outbid_gets_a_later_turn(locks: list[KubernetesLock]) -> None:
    await locks[0].take(wanted("a"), LOCK_S)
    assert await locks[0].take(wanted("a", 7), LOCK_S) == Leadership("a", "a:1", 8)
    assert await locks[1].holder() == Leadership("a", "a:1", 8)


async def test_turns_rise_though_it_was_deleted(api: ApiServer, locks: list[KubernetesLock]) -> None:
    await locks[0].take(wanted("a", 41), LOCK_S)
    api.delete("leases", NAME)
    assert await locks[1].take(wanted("b", 42), LOCK_S) == Leadership("b", "b:1", 43)


# --- when it is over --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("renewed", ["1999-01-01T00:00:00.000000Z", "2999-01-01T00:00:00.000000Z"])
async def test_lease_ends_by_the_clock_of_the_reader(api: ApiServer, locks: list[KubernetesLock], renewed: str) -> None:
    """The clock of the holder may be years off."""
    await locks[0].take(wanted("a"), LOCK_S)
    lease = lease_of(api)
    lease["spec"]["renewTime"] = renewed
    api.put("leases", lease)
    assert (await locks[1].take(wanted("b"), LOCK_S)).holder == "a"
    later(locks[1], LOCK_S - 1.0)
    assert (await locks[1].take(wanted("b"), LOCK_S)).holder == "a"
    later(locks[1], 1.0)
    assert await locks[1].holder() is None
    assert await locks[1].take(wanted("b"), LOCK_S) == Leadership("b", "b:1", 2)


async def test_a_renewal_begins_its_time_anew(locks: list[KubernetesLock]) -> None:
    await locks[0].take(wanted("a"), LOCK_S)
    await locks[1].holder()
    later(locks[1], LOCK_S - 0.5)
    await locks[0].take(wanted("a", 1), LOCK_S)
    await locks[1].holder()
    later(locks[1], LOCK_S - 0.5)
    assert (await locks[1].take(wanted("b"), LOCK_S)).holder == "a"


async def test_late_reader_waits_for_the_whole_time(locks: list[KubernetesLock]) -> None:
    await locks[0].take(wanted("a"), LOCK_S)
    await locks[1].holder()
    later(locks[1], 100.0)
    assert (await locks[2].take(wanted("c"), LOCK_S)).holder == "a"


async def test_the_holder_gives_it_up(api: ApiServer, locks: list[KubernetesLock]) -> None:
    await locks[0].take(wanted("a"), LOCK_S)
    await locks[1].release("b")
    assert lease_of(api)["spec"]["holderIdentity"] == "a"
    await locks[0].release("a")
    assert lease_of(api)["spec"]["holderIdentity"] == ""
    assert await locks[1].holder() is None
    await locks[0].release("a")
    assert await locks[1].take(wanted("b"), LOCK_S) == Leadership("b", "b:1", 2)


async def test_absent_lease_can_be_released(locks: list[KubernetesLock]) -> None:
    await locks[0].release("a")


# --- what fails -------------------------------------------------------------------------------------------------------


async def test_missing_rights_are_named(api: ApiServer, locks: list[KubernetesLock]) -> None:
    api.refuses = 403
    for call in (locks[0].take(wanted("a"), LOCK_S), locks[0].holder(), locks[0].release("a")):
        said = await refused(call)
        assert "403" in said
        assert f"verbs get and update for the lease {NAME}, and create for leases" in said


@pytest.mark.parametrize("method", ["POST", "PUT"])
async def test_missing_rights_to_write_are_named(api: ApiServer, locks: list[KubernetesLock], method: str) -> None:
    if method == "PUT":
        await locks[0].take(wanted("a"), LOCK_S)

    async def before(asked: str) -> int | None:
        return 403 if asked == method else None

    api.before = before
    assert "create for leases" in await refused(locks[0].take(wanted("a"), LOCK_S))


async def test_an_api_server_that_is_away_is_an_error(locks: list[KubernetesLock], api: ApiServer) -> None:
    api.refuses = 503
    assert "503" in await refused(locks[0].take(wanted("a"), LOCK_S))
    nowhere = KubernetesLock("http://127.0.0.1:1", NAME)
    assert "a request to the API server" in await refused(nowhere.take(wanted("a"), LOCK_S))
    await nowhere.close()


async def test_an_api_server_that_always_sees_a_conflict_is_an_error(
    api: ApiServer, locks: list[KubernetesLock]
) -> None:
    """It is asked a few times, and not as often as it can answer."""
    asked = 0

    async def before(method: str) -> int | None:
        nonlocal asked
        asked += method == "POST"
        return 409 if method == "POST" else None

    api.before = before
    assert "conflict" in await refused(locks[0].take(wanted("a"), LOCK_S))
    assert asked == TRIES


async def test_a_change_that_comes_late_changes_nothing(api: ApiServer, locks: list[KubernetesLock]) -> None:
    """A member that did not wait for its answer wrote on a version that is gone by now."""
    await locks[0].take(wanted("a"), LOCK_S)
    written, goes_on = asyncio.Event(), asyncio.Event()

    async def before(method: str) -> None:
        if method == "PUT" and not written.is_set():
            written.set()
            await asyncio.shield(goes_on.wait())

    api.before = before
    slow = asyncio.create_task(locks[0].take(wanted("a", 1), LOCK_S))
    await written.wait()
    await locks[1].holder()
    later(locks[1], LOCK_S)
    assert (await locks[1].take(wanted("b", 1), LOCK_S)).holder == "b"
    goes_on.set()
    assert await slow == Leadership("b", "b:1", 2)


GARBAGE: list[Any] = [
    None, [], "text", 5, {}, {"kind": "Status"}, {"spec": None, "metadata": {}}, {"spec": [], "metadata": {}},
    {"spec": {}, "metadata": None}, {"spec": {"holderIdentity": "a", "leaseDurationSeconds": "x"}, "metadata": {}},
    {"spec": {"holderIdentity": "a"}, "metadata": {"annotations": "x"}},
]  # fmt: skip


@pytest.mark.parametrize("garbage", GARBAGE, ids=str)
async def test_an_answer_that_is_no_lease_is_an_error(locks: list[KubernetesLock], garbage: Any) -> None:
    class Api:
        namespace = "default"

        async def send(self, method: str, path: str, content: object = None) -> Any:
            del method, path, content
            return garbage

        async def close(self) -> None: ...

    locks[0]._api = Api()  # type: ignore[assignment]
    for call in (locks[0].take(wanted("b"), LOCK_S), locks[0].holder(), locks[0].release("a")):
        assert "not a Lease" in await refused(call)


@pytest.mark.parametrize("transitions", [None, "x", 1.5, [], True])
async def test_a_count_that_is_none_counts_as_nothing(
    api: ApiServer, locks: list[KubernetesLock], transitions: Any
) -> None:
    spec = {"holderIdentity": "", "leaseTransitions": transitions}
    api.put("leases", {"metadata": {"name": NAME}, "spec": spec})
    assert (await locks[0].take(wanted("a", 3), LOCK_S)).epoch == 4
