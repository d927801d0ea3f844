"""The lock in a real Valkey server: taking, renewing, expiring and releasing it, and error messages."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from llmproxy.config import ConfigError
from llmproxy.remote.cluster.election import Leadership, StoreError
from llmproxy.remote.cluster.locks import ValkeyLock
from tests.remote.cluster.valkey_server import Server, needs_server, serving_store

pytestmark = needs_server

LONG_S = 60.0
SHORT_S = 0.05


def wanted(holder: str, epoch: int = 0) -> Leadership:
    return Leadership(holder, f"{holder}:1", epoch)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serving_store(Server(tmp_path)) as one:
        yield one


@pytest.fixture
async def lock(server: Server) -> AsyncIterator[ValkeyLock]:
    one = ValkeyLock(server.url, "test")
    yield one
    await one.close()


async def refused(waiting: object) -> str:
    with pytest.raises(StoreError) as caught:
        await waiting  # type: ignore[misc]
    return str(caught.value)


async def until_free(lock: ValkeyLock) -> None:
    async with asyncio.timeout(10):
        while await lock.holder() is not None:  # noqa: ASYNC110 - it ends in another process
            await asyncio.sleep(0.005)


# --- the course of things ---------------------------------------------------------------------------------------------


async def test_one_takes_it_and_others_see_who(lock: ValkeyLock) -> None:
    assert await lock.holder() is None
    assert await lock.take(wanted("a"), LONG_S) == Leadership("a", "a:1", 1)
    assert await lock.take(wanted("b", 7), LONG_S) == Leadership("a", "a:1", 1)
    assert await lock.holder() == Leadership("a", "a:1", 1)


async def test_a_renewal_keeps_the_turn_and_the_lock(lock: ValkeyLock) -> None:
    await lock.take(wanted("a"), SHORT_S)
    assert await lock.take(wanted("a", 1), LONG_S) == Leadership("a", "a:1", 1)
    assert await lock.client.pttl("llmproxy:{test}:leader") > 1000 * (LONG_S - 10)


async def test_lock_ends_by_itself_and_the_next_epoch_is_higher(lock: ValkeyLock) -> None:
    await lock.take(wanted("a"), SHORT_S)
    await lock.take(wanted("b"), LONG_S)
    await until_free(lock)
    assert await lock.take(wanted("b"), LONG_S) == Leadership("b", "b:1", 2)


async def test_only_the_holder_gives_it_up(lock: ValkeyLock) -> None:
    await lock.take(wanted("a"), LONG_S)
    await lock.release("b")
    assert await lock.holder() == Leadership("a", "a:1", 1)
    await lock.release("a")
    assert await lock.holder() is None
    await lock.release("a")
    assert (await lock.take(wanted("b"), LONG_S)).epoch == 2


async def test_turns_rise_though_the_server_forgot_all(lock: ValkeyLock) -> None:
    await lock.take(wanted("a", 41), LONG_S)
    await lock.client.flushall()
    assert await lock.take(wanted("b", 42), LONG_S) == Leadership("b", "b:1", 43)


async def test_a_holder_that_is_outbid_gets_a_later_turn(lock: ValkeyLock) -> None:
    await lock.take(wanted("a"), LONG_S)
    assert await lock.take(wanted("a", 7), LONG_S) == Leadership("a", "a:1", 8)
    assert await lock.take(wanted("a", 8), LONG_S) == Leadership("a", "a:1", 8)


async def test_two_clusters_have_locks_of_their_own(server: Server, lock: ValkeyLock) -> None:
    other = ValkeyLock(server.url, "other")
    await lock.take(wanted("a"), LONG_S)
    assert (await other.take(wanted("b"), LONG_S)).holder == "b"
    await other.close()


# --- what fails -------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"garbage",
        b"5",
        b"null",
        b"[]",
        b"{}",
        b'{"holder": "a"}',
        b'{"holder": "a", "epoch": "x"}',
        b"\xff",
        *(b'{"holder": "a", "address": "", "epoch": %s}' % epoch for epoch in (b"1e999", b"4e18")),
        b"[" * 5_000,
    ],
)
async def test_a_key_that_holds_something_else_is_an_error(lock: ValkeyLock, value: bytes) -> None:
    await lock.client.set("llmproxy:{test}:leader", value)
    await refused(lock.take(wanted("a"), LONG_S))
    await refused(lock.holder())


@pytest.mark.parametrize("key", ["leader", "epoch"])
async def test_a_key_of_another_type_is_an_error(lock: ValkeyLock, key: str) -> None:
    await lock.client.rpush(f"llmproxy:{{test}}:{key}", "a")
    assert "WRONGTYPE" in await refused(lock.take(wanted("a"), LONG_S))


@pytest.mark.parametrize("count", ["many", "1e999", "nan"])
async def test_a_count_of_turns_that_is_none_is_an_error(lock: ValkeyLock, count: str) -> None:
    await lock.client.set("llmproxy:{test}:epoch", count)
    await refused(lock.take(wanted("a"), LONG_S))


async def test_a_server_that_died_and_came_back(server: Server, lock: ValkeyLock) -> None:
    await lock.take(wanted("a"), LONG_S)
    await server.kill()
    for call in (lock.take(wanted("a", 1), LONG_S), lock.holder(), lock.release("a")):
        assert await refused(call)
    await server.start()
    assert await lock.take(wanted("b", 1), LONG_S) == Leadership("b", "b:1", 2)


async def test_a_late_answer_is_not_read_as_the_answer_to_a_later_question(server: Server, lock: ValkeyLock) -> None:
    """A paused server answers questions that nobody waits for any more."""
    await lock.take(wanted("a"), LONG_S)
    server.send(signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await lock.take(wanted("b"), LONG_S)
    finally:
        server.send(signal.SIGCONT)
    await lock.release("a")
    assert await lock.holder() is None
    assert (await lock.take(wanted("c"), LONG_S)).holder == "c"


async def test_a_server_that_does_not_answer_is_an_error(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmproxy.remote.cluster.locks.ANSWER_S", 0.1)
    impatient = ValkeyLock(server.url, "test")
    await impatient.take(wanted("a"), LONG_S)
    server.send(signal.SIGSTOP)
    try:
        assert "127.0.0.1" in await refused(impatient.take(wanted("a"), LONG_S))
    finally:
        server.send(signal.SIGCONT)
    assert (await impatient.take(wanted("a"), LONG_S)).holder == "a"
    await impatient.close()


async def test_a_password_is_used_and_never_said(tmp_path: Path) -> None:
    async with serving_store(Server(tmp_path, "right-secret")) as server:
        right = ValkeyLock(server.url, "test")
        assert (await right.take(wanted("a"), LONG_S)).holder == "a"
        port = server.port
        by_query = f"valkey://127.0.0.1:{port}?password=wrong-secret"
        wrong = [ValkeyLock(url, "test") for url in (f"valkey://:wrong-secret@127.0.0.1:{port}", by_query)]
        said = [await refused(one.take(wanted("a"), LONG_S)) for one in wrong]
        await server.kill()
        said += [await refused(one.holder()) for one in (right, *wrong)]
        for one in (right, *wrong):
            assert "secret" not in repr(one)
            await one.close()
    assert not any("secret" in text for text in said), said
    assert all("127.0.0.1" in text for text in said)


@pytest.mark.parametrize("url", ["valkey://:secret@h:port", "valkey://:secret@h:70000", "valkey://h?socket_timeout=a"])
def test_a_url_that_cannot_be_used_names_the_key(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ValkeyLock(url, "test")
    assert str(caught.value).startswith("cluster.lock: ")
    assert "secret" not in str(caught.value)
