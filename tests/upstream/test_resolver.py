"""Background look-ups of host names: waiting for the first answer, and keeping addresses during failures."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any, Concatenate

import pytest
from structlog.testing import capture_logs

from llmproxy.upstream import resolver as resolver_module
from llmproxy.upstream.resolver import ANSWER_MAX_S, LOOK_UPS_MAX, REFRESH_S, RETRY_S, Address, NameFailed, Resolver
from tests.dispatching import P, named_as, now, virtual


def at(*places: str) -> list[Address]:
    return [(socket.AF_INET, (place, 0)) for place in places]


class Server:
    """A name server: returns `answers` by name after `takes_s`. Other names do not exist."""

    def __init__(self, **answers: Sequence[Address]) -> None:
        self.answers: dict[str, Sequence[Address]] = {f"{name}.test": found for name, found in answers.items()}
        self.takes_s: dict[str, float] = {}
        self.asked: list[str] = []
        self.open: Counter[str] = Counter()
        self.most = 0

    async def __call__(self, host: str) -> Sequence[Address]:
        self.asked.append(host)
        self.open[host] += 1
        assert self.open[host] == 1, "one question at a time"
        self.most = max(self.most, self.open.total())
        try:
            await asyncio.sleep(self.takes_s.get(host, 0.0))
            if host not in self.answers:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return self.answers[host]
        finally:
            self.open[host] -= 1


def with_resolver(test: Callable[Concatenate[Resolver, Server, P], Awaitable[None]]) -> Callable[P, None]:
    """Run a test on a virtual clock; no task may be left once the resolver is closed."""

    async def body(*given: P.args, **named: P.kwargs) -> None:
        server = Server()
        resolver = Resolver(server)
        await test(resolver, server, *given, **named)
        await resolver.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    return virtual(named_as(test, body, 2))


async def places(resolver: Resolver, host: str = "gpu.test") -> list[str]:
    return [place[0] for *_, place in await resolver.connectable(host, 8000)]


@with_resolver
async def test_an_address_and_this_very_machine_are_never_looked_up(resolver: Resolver, server: Server) -> None:
    resolver.follow(["http://localhost:1", "http://127.0.0.1:1", "http://[::1]:1", "https://a.localhost"])
    assert (await places(resolver, "127.0.0.8"), await places(resolver, "fe80::1")) == (["127.0.0.8"], ["fe80::1"])
    for own in ("localhost", "LOCALHOST", "a.b.localhost", "localhost."):
        assert (await places(resolver, own))[0] == "127.0.0.1"
    await asyncio.sleep(10 * REFRESH_S)
    assert not server.asked


@with_resolver
async def test_all_who_wait_for_the_first_answer_wait_for_the_same_one(resolver: Resolver, server: Server) -> None:
    server.answers["gpu.test"], server.takes_s["gpu.test"] = at("10.0.0.1", "10.0.0.2"), 3.0
    resolver.follow(["http://gpu.test:8000"])
    given_up = asyncio.create_task(places(resolver))
    asked = [asyncio.create_task(places(resolver)) for _ in range(5)]
    await asyncio.sleep(1.0)
    given_up.cancel()
    assert await asyncio.gather(*asked) == [["10.0.0.1", "10.0.0.2"]] * 5
    assert (now(), server.asked) == (3.0, ["gpu.test"])
    [found, _] = await resolver.connectable("gpu.test", 8000)
    assert found == (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("10.0.0.1", 8000))


@with_resolver
async def test_a_known_name_is_not_waited_for_and_followed_when_it_moves(resolver: Resolver, server: Server) -> None:
    server.answers["gpu.test"] = at("10.0.0.1")
    resolver.follow(["http://gpu.test:8000"])
    assert await places(resolver) == ["10.0.0.1"]
    server.answers["gpu.test"], server.takes_s["gpu.test"] = at("10.0.0.2"), 4.0
    with capture_logs() as logs:
        for _ in range(200):
            since_s = now()
            await places(resolver)
            assert now() == since_s
            await asyncio.sleep(0.1)
    assert await places(resolver) == ["10.0.0.2"]
    assert 2 <= len(server.asked) <= 4, "once in an interval, however many ask"
    assert [line["event"] for line in logs] == ["name_resolved"]
    assert (logs[0]["before"], logs[0]["addresses"]) == (["10.0.0.1"], ["10.0.0.2"])


@with_resolver
async def test_a_name_beyond_ascii_is_asked_for_in_its_encoded_form(resolver: Resolver, server: Server) -> None:
    server.answers["xn--bcher-kva.test"] = at("10.0.0.1")
    resolver.follow(["http://bücher.test:8000"])
    assert await places(resolver, "xn--bcher-kva.test") == ["10.0.0.1"]
    assert server.asked == ["xn--bcher-kva.test"]


@pytest.mark.parametrize("failure", ["it does not exist", "nobody answers"])
@with_resolver
async def test_last_addresses_are_kept_while_a_look_up_fails(resolver: Resolver, server: Server, failure: str) -> None:
    server.answers["gpu.test"] = at("10.0.0.1")
    resolver.follow(["http://gpu.test:8000"])
    assert await places(resolver) == ["10.0.0.1"]
    with capture_logs() as logs:
        if failure == "nobody answers":
            server.takes_s["gpu.test"] = 30.0
        del server.answers["gpu.test"]
        for _ in range(100):
            assert await places(resolver) == ["10.0.0.1"]
            await asyncio.sleep(1.0)
        assert [(line["event"], line["goes_on_with"]) for line in logs] == [("name_not_resolved", ["10.0.0.1"])]
        server.answers["gpu.test"], server.takes_s["gpu.test"] = at("10.0.0.1"), 0.0
        await asyncio.sleep(31.0 + REFRESH_S)
        assert [line["event"] for line in logs] == ["name_not_resolved", "name_resolved"]


@with_resolver
async def test_a_name_that_never_resolved_is_named_and_soon_tried_again(resolver: Resolver, server: Server) -> None:
    resolver.follow(["http://gpu.test:8000"])
    for _ in range(3):
        with pytest.raises(NameFailed, match=r"the name gpu\.test does not resolve: Name or service not known"):
            await places(resolver)
    server.answers["gpu.test"] = at("10.0.0.1")
    await asyncio.sleep(RETRY_S)
    assert await places(resolver) == ["10.0.0.1"]


@with_resolver
async def test_a_silent_name_server_is_waited_for_so_long_and_no_longer(resolver: Resolver, server: Server) -> None:
    server.takes_s["gpu.test"] = 60.0
    server.answers["gpu.test"] = at("10.0.0.1")
    resolver.follow(["http://gpu.test:8000"])
    for _ in range(3):
        with pytest.raises(NameFailed, match="does not resolve: no answer within 5 s"):
            await places(resolver)
        assert now() == ANSWER_MAX_S
    await asyncio.sleep(60.0)
    # The question was open all the time, and its answer counts.
    assert await places(resolver) == ["10.0.0.1"]
    assert server.asked == ["gpu.test"]


@pytest.mark.slow
@with_resolver
async def test_names_that_hang_hold_up_nobody_else(resolver: Resolver, server: Server) -> None:
    gone = [f"gone-{i}.test" for i in range(10 * LOOK_UPS_MAX)]
    server.takes_s |= dict.fromkeys(gone, 30.0)
    server.answers["gpu.test"] = at("10.0.0.1")
    resolver.follow([f"http://{host}" for host in ["gpu.test", *gone]])
    await asyncio.sleep(600.0)
    # By now each name has failed once, and waits for other failed names only.
    server.asked.clear()
    server.most = 0
    server.answers |= {"gpu.test": at("10.0.0.2"), "new.test": at("10.0.0.3")}
    resolver.follow([f"http://{host}" for host in ["new.test", "gpu.test", *gone]])
    since_s = now()
    assert await places(resolver, "new.test") == ["10.0.0.3"]
    assert now() == since_s
    await asyncio.sleep(REFRESH_S)
    assert await places(resolver) == ["10.0.0.2"]
    await asyncio.sleep(600.0)
    assert server.most <= 30.0 / ANSWER_MAX_S * LOOK_UPS_MAX + 1
    assert set(server.asked) == {"new.test", "gpu.test", *gone}, "nor are they forgotten"


@with_resolver
async def test_a_name_that_waits_for_its_turn_is_not_said_to_have_no_answer(resolver: Resolver, server: Server) -> None:
    gone = [f"gone-{i}.test" for i in range(3 * LOOK_UPS_MAX)]
    server.takes_s |= dict.fromkeys(gone, 300.0)
    server.answers["gpu.test"] = at("10.0.0.1")
    with capture_logs() as said:
        resolver.follow([f"http://{host}" for host in gone])
        await asyncio.sleep(0.0)
        resolver.follow([f"http://{host}" for host in [*gone, "gpu.test"]])
        assert await places(resolver) == ["10.0.0.1"]
        assert ANSWER_MAX_S < now() <= 4 * ANSWER_MAX_S
    assert {line["name"] for line in said} <= set(gone)


@with_resolver
async def test_a_second_caller_joins_the_question_that_is_still_open(resolver: Resolver, server: Server) -> None:
    server.answers["vllm.test"], server.takes_s["vllm.test"] = at("10.0.0.1"), 30.0
    for _ in range(4):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await resolver.look_up("vllm.test")
    assert await resolver.look_up("vllm.test") == at("10.0.0.1")
    assert (now(), server.asked) == (30.0, ["vllm.test"])


@with_resolver
async def test_names_of_nobody_are_forgotten(resolver: Resolver, server: Server) -> None:
    for i in range(50):
        server.answers[f"gpu-{i}.test"] = at("10.0.0.1")
        resolver.follow([f"http://gpu-{i}.test:8000"])
        assert await places(resolver, f"gpu-{i}.test") == ["10.0.0.1"]
    resolver.follow([])
    await asyncio.sleep(0)
    assert not resolver._names
    assert not resolver._looking
    asked = len(server.asked)
    await asyncio.sleep(10 * REFRESH_S)
    assert len(server.asked) == asked
    assert await places(resolver, "gpu-7.test") == ["10.0.0.1"], "a name that is not followed is looked up each time"
    assert len(server.asked) == asked + 1


# --- the system's resolver --------------------------------------------------------------------------------------------


async def test_the_system_is_asked_in_a_thread_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ("127.0.0.1", 0) in [place for _, place in await resolver_module.ask_system("localhost")]
    with pytest.raises(OSError, match="it is no name"):
        await resolver_module.ask_system("a" * 64 + ".test")
    begun, release = threading.Event(), threading.Event()

    def hang(*_: object, **__: object) -> list[Any]:
        begun.set()
        release.wait(10)
        return []

    monkeypatch.setattr("llmproxy.upstream.resolver.socket", SimpleNamespace(**vars(socket) | {"getaddrinfo": hang}))
    waiting = asyncio.create_task(resolver_module.ask_system("gpu.test"))
    await asyncio.to_thread(begun.wait, 10)
    [thread] = [one for one in threading.enumerate() if one.name == "look up gpu.test"]
    assert thread.daemon, "the end of the process does not wait for it"
    waiting.cancel()
    release.set()
    await asyncio.to_thread(thread.join, 10)
    with pytest.raises(asyncio.CancelledError):
        await waiting
