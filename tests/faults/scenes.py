"""Scenes of several steps, on real sockets: events at backends that serve, and their expected results."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from socket import AddressFamily
from typing import Any

import pytest
from structlog.testing import capture_logs

from llmproxy.lab.simulator.replica import Replica
from llmproxy.upstream.resolver import Address
from tests.e2e.proxies import ENDLESS, FAST, HELLO, STREAM, Answer, ProxyUnderTest, all_of, all_up, serving, until
from tests.faults.rig import posts

IN_TURN: dict[str, Any] = {"scheduling": {"placement": "round_robin"}}
"""Every other request would go to the replica that is in trouble."""
EVENTS = (
    "backend_added", "backend_down", "backend_leaves", "backend_removed", "backend_metrics_unreadable", "backend_up",
    "discovery_failed", "internal",
)  # fmt: skip
LONG = HELLO | {"messages": [{"role": "user", "content": "All that follows was said before. " * 60}]}
NAME = "vllm.test"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """`act` starts a proxy and returns the results of its clients in fixed words.

    `clients`, `outcomes` of all requests, and `events` (log lines about the fleet once the proxy runs) are the
    expected results. `replicas` says in words the assertions of `act` about them.
    """

    name: str
    act: Callable[[Stage], Awaitable[str]]
    clients: str
    replicas: str
    outcomes: Mapping[str, int]
    events: Mapping[str, int] = field(default_factory=dict)


SCENES: list[Scene] = []


def scene(**fields: Any) -> Callable[[Callable[[Stage], Awaitable[str]]], None]:
    def add(act: Callable[[Stage], Awaitable[str]]) -> None:
        SCENES.append(Scene(act=act, **fields))

    return add


class Stage:
    """The log and the proxy of a scene, for the checks at its end."""

    def __init__(self, log: list[Any]) -> None:
        self.outcomes: Mapping[str, int] = {}
        self._log = log

    def opened(self) -> None:
        """Forgets the log of the start of the proxy."""
        self._log.clear()

    def logged(self, event: str) -> bool:
        return any(line["event"] == event for line in self._log)

    async def closing(self, proxy: ProxyUnderTest) -> None:
        """All is over: count what became of every request."""
        await proxy.settled()
        self.outcomes = +proxy.outcomes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    clients: str
    outcomes: Mapping[str, int]
    events: Mapping[str, int]
    exits: list[Mapping[str, Any]]


async def perform(scene: Scene) -> Played:
    """Play one scene; on return its proxy was closed and checked."""
    with capture_logs() as log:
        stage = Stage(log)
        clients = await scene.act(stage)
    return Played(
        clients=clients,
        outcomes=stage.outcomes,
        events=Counter(line["event"] for line in log if line["event"] in EVENTS),
        exits=[line for line in log if line["event"] == "request"],
    )


def statuses(answers: list[Answer]) -> str:
    counted = Counter(answer.status for answer in answers)
    return ", ".join(f"{times} times {status}" for status, times in sorted(counted.items()))


def is_down(proxy: ProxyUnderTest, number: int) -> bool:
    return proxy.app.pools.backends[f"b{number}"].health.down


async def end_of(running: Any) -> str:
    """How a stream ends whose first bytes were read."""
    events = [event for event in (await all_of(running)).split(b"\n\n") if event]
    broken = [b"The stream broke" in event for event in events]
    if any(broken):
        assert broken.count(True) == 1
        assert broken[-1], "nothing follows the error"
        return "200, then one error event"
    assert events[-1] == b"data: [DONE]"
    return "200, to its end"


# --- what happens -----------------------------------------------------------------------------------------------------


@scene(
    name="a replica flaps: gone and back, four times",
    clients="28 times 200",
    replicas="the flapping one gets requests only while it is up",
    outcomes={"completed": 28},
    events={"backend_down": 4, "backend_up": 4},
)
async def flapping(stage: Stage) -> str:
    answers = []
    async with serving(FAST, FAST, **IN_TURN) as proxy:
        stage.opened()
        for _ in range(4):
            proxy.replicas[0].faults.set("refuse")
            answers += [await proxy.chat(body) for body in (STREAM, HELLO, STREAM)]
            await until(lambda: is_down(proxy, 0))
            before = posts(proxy.replicas[0])
            answers += [await proxy.chat(body) for body in (STREAM, HELLO)]
            assert posts(proxy.replicas[0]) == before
            await proxy.replicas[0].restart()
            await until(lambda: all_up(proxy))
            answers += [await proxy.chat(body) for body in (STREAM, HELLO)]
        await stage.closing(proxy)
    return statuses(answers)


@scene(
    name="a worker is frozen: `/health` is 200, the gauges do not change, nothing answers",
    clients="10 times 200; the stream that ran there: 200, to its end",
    replicas="the frozen one nothing more after its silence was noticed; its requests without a byte, the other one",
    outcomes={"completed": 11, "cancelled": 1},
)
async def frozen(stage: Stage) -> str:
    config: dict[str, Any] = {
        # Nothing but its silence beside the others may end the wait for first bytes.
        "timeouts": {"first_byte_s": 100.0, "stall_s": 2.0},
        "health": {"hung_s": 0.3, "ejection_s": 30.0},
    }
    async with serving(FAST, FAST, **IN_TURN, **config) as proxy:
        stage.opened()
        # The other goes on: in a pool that falls silent as a whole, no backend is taken for hung.
        async with proxy.stream() as running, proxy.stream() as other:
            await running.content.readany()
            stuck = proxy.replica(running.headers["x-llmproxy-backend"])
            name = f"b{proxy.replicas.index(stuck)}"
            pages = proxy.app.pools.backends[name]
            await until(lambda: pages.reading is not None and pages.reading.running)
            stuck.faults.set("frozen")
            # Read chunk by chunk: aiohttp drops unread bytes when the stream breaks.
            ran = asyncio.create_task(end_of(running))
            asked = [asyncio.create_task(proxy.chat(STREAM)) for _ in range(6)]
            answers = list(await asyncio.gather(*asked))
            assert {answer.backend for answer in answers}.isdisjoint({name})
            assert (pages.health.ejected, pages.health.down) == (True, False), "polls are answered as ever"
            began = posts(stuck)
            answers += [await proxy.chat() for _ in range(4)]
            assert posts(stuck) == began, "it is left alone"
            ended = await ran
            assert await other.content.readany()
        await until(lambda: not stuck.in_flight)
        stuck.faults.clear()
        await stage.closing(proxy)
    return f"{statuses(answers)}; the stream that ran there: {ended}"


@scene(
    name="the whole fleet goes down, and comes back",
    clients="two streams that ran: 200, then one error event; later requests are held: 8 times 200",
    replicas="the held requests, after they are back",
    outcomes={"completed": 8, "broken_stream": 2},
    events={"backend_down": 2, "backend_up": 2},
)
async def whole_fleet(stage: Stage) -> str:
    async with serving(FAST, FAST, **IN_TURN, queue={"no_backend_wait_s": 30.0}) as proxy, AsyncExitStack() as stack:
        stage.opened()
        running = [await stack.enter_async_context(proxy.stream()) for _ in range(2)]
        for stream in running:
            await stream.content.readany()
        for replica in proxy.replicas:
            replica.faults.set("refuse")
        (ended,) = set(await asyncio.gather(*map(end_of, running)))
        await until(lambda: is_down(proxy, 0) and is_down(proxy, 1))
        held = [proxy.waiting(body) for body in (STREAM, HELLO) * 4]
        await until(lambda: proxy.queued == len(held))
        ready = await proxy.get("/health")
        assert ready.status == 200, "the proxy itself is well"
        for replica in proxy.replicas:
            await replica.restart()
        answers = list(await asyncio.gather(*held))
        await until(lambda: all_up(proxy))
        await stage.closing(proxy)
    return f"two streams that ran: {ended}; later requests are held: {statuses(answers)}"


@scene(
    name="a replica restarts with a cold cache",
    clients="4 times 200",
    replicas="each prompt; its cached prefixes are forgotten",
    outcomes={"completed": 4},
    events={"backend_down": 1, "backend_up": 1},
)
async def cold_cache(stage: Stage) -> str:
    async with serving(FAST) as proxy:
        stage.opened()

        async def turn() -> tuple[bool, bool]:
            """Whether a part of the prompt was expected to be cached, and whether it was."""
            kinds = ("expected", "cached")
            before = [proxy.metric("llmproxy_prefix_tokens_total", kind=kind) for kind in kinds]
            assert (await proxy.chat(LONG)).status == 200
            await proxy.settled()
            expected, cached = (
                proxy.metric("llmproxy_prefix_tokens_total", kind=kind) > old
                for kind, old in zip(kinds, before, strict=True)
            )
            return expected, cached

        assert [await turn(), await turn()] == [(False, False), (True, True)]
        proxy.replicas[0].faults.set("refuse")
        await until(lambda: is_down(proxy, 0))
        await proxy.replicas[0].restart()
        await until(lambda: all_up(proxy))
        health = proxy.app.pools.backends["b0"].health
        assert health.warmth(asyncio.get_running_loop().time()) < 1.0, "it starts slowly"
        assert [await turn(), await turn()] == [(False, False), (True, True)], "nothing is expected of a cold cache"
        await stage.closing(proxy)
    return "4 times 200"


@scene(
    name="SIGTERM hangs every stream of a replica",
    clients="the stream that hung: 200, to its end; others: 3 times 200",
    replicas="nothing more; its connections are cut",
    outcomes={"completed": 4, "cancelled": 1},
    events={"backend_down": 1, "backend_up": 1},
)
async def sigterm(stage: Stage) -> str:
    # On a machine that has no time for this process, the second stream's silence would look like a hung replica.
    config = IN_TURN | {"health": {"hung_s": None}}
    async with serving(FAST, FAST, **config) as proxy, AsyncExitStack() as stack:
        stage.opened()
        running = [await stack.enter_async_context(proxy.stream()) for _ in range(2)]
        for stream in running:
            await stream.content.readany()
        first, other = running
        ends, stays = (int(stream.headers["x-llmproxy-backend"][1:]) for stream in (first, other))
        proxy.replicas[ends].faults.set("hang")
        ended = await end_of(first)
        assert is_down(proxy, ends), "noticed by polls alone: a hanging stream says nothing"
        answers = [await proxy.chat(body) for body in (STREAM, HELLO, STREAM)]
        assert {answer.backend for answer in answers} == {f"b{stays}"}
        assert await other.content.readany(), "it goes on"
        other.close()
        await proxy.replicas[ends].restart()
        await until(lambda: all_up(proxy))
        await stage.closing(proxy)
    return f"the stream that hung: {ended}; others: {statuses(answers)}"


@scene(
    name="a replica drains, answering 500 under a healthy `/health`, leaves and comes back",
    clients="the stream that ran: 200, to its end; others: 11 times 200",
    replicas="the draining one: one probe at a time",
    outcomes={"completed": 12},
    events={"backend_down": 1, "backend_up": 1},
)
async def drain(stage: Stage) -> str:
    async with serving(FAST, FAST, **IN_TURN, health={"ejection_s": 0.05}) as proxy:
        stage.opened()
        async with proxy.stream(ENDLESS | {"max_tokens": 400}) as running:
            await running.content.readany()
            number = int(running.headers["x-llmproxy-backend"][1:])
            proxy.replicas[number].faults.set("draining_500")
            answers = [await proxy.chat(body) for body in (STREAM, HELLO) * 3]
            assert {answer.backend for answer in answers} == {f"b{1 - number}"}
            assert not is_down(proxy, number), "its health is 200"
            ended = await end_of(running)
        proxy.replicas[number].faults.set("refuse")
        await until(lambda: is_down(proxy, number))
        answers.append(await proxy.chat())
        await proxy.replicas[number].restart()
        await until(lambda: all_up(proxy))
        more = [await proxy.chat() for _ in range(4)]
        assert len({answer.backend for answer in more}) == 2
        await stage.closing(proxy)
    return f"the stream that ran: {ended}; others: {statuses(answers + more)}"


@scene(
    name="a replica with nothing to do answers 503 to everything under a healthy `/health`",
    clients="12 times 200",
    replicas="the refusing one 3 requests, then nothing",
    outcomes={"completed": 12},
)
async def turns_all_away(stage: Stage) -> str:
    async with serving(FAST, FAST, **IN_TURN, health={"failures_before_ejection": 3, "ejection_s": 30.0}) as proxy:
        stage.opened()
        proxy.replicas[0].faults.set("busy_503")
        health = proxy.app.pools.backends["b0"].health
        now = asyncio.get_running_loop().time
        answers = []
        for body in (STREAM, HELLO) * 6:
            answers.append(await proxy.chat(body))
            await until(lambda: health.ejected or health.available(now()))
        assert (health.ejected, health.down) == (True, False), "its polls say that it is well"
        assert {answer.backend for answer in answers} == {"b1"}
        assert posts(proxy.replicas[0]) == 3
        proxy.replicas[0].faults.clear()
        await stage.closing(proxy)
    return statuses(answers)


@scene(
    name="a name in DNS changes its address",
    clients="7 times 200; a stream at the old address goes on until its client leaves",
    replicas="the old one nothing more, the new one all",
    outcomes={"completed": 7, "cancelled": 1},
    events={"backend_added": 1, "backend_up": 1, "backend_leaves": 1, "backend_removed": 1},
)
async def dns_change(stage: Stage) -> str:
    answers = []
    async with AsyncExitStack() as stack:
        old = await stack.enter_async_context(Replica(FAST, "127.0.0.2"))
        new = await stack.enter_async_context(Replica(FAST, "127.0.0.3", old.port))
        found = ["127.0.0.2"]
        patch = stack.enter_context(pytest.MonkeyPatch.context())

        async def look_up(host: str) -> list[Address]:
            assert host == NAME
            return [(AddressFamily.AF_INET, (address, 0)) for address in found]

        patch.setattr("llmproxy.upstream.resolver.ask_system", look_up)
        config: dict[str, Any] = {
            "backends": [{"url": f"dns+http://{NAME}:{old.port}"}],
            "discovery": {"dns_interval_s": 0.05, "misses_before_removal": 2},
            **IN_TURN,
        }
        proxy = await stack.enter_async_context(serving(wait=False, **config))
        names = {address: f"{address}:{old.port}" for address in ("127.0.0.2", "127.0.0.3")}
        backends = proxy.app.pools.backends
        await until(lambda: backends and all_up(proxy))
        stage.opened()
        running = await stack.enter_async_context(proxy.stream())
        await running.content.readany()
        answers.append(await proxy.chat())
        assert answers[-1].backend == names["127.0.0.2"]
        found[:] = ["127.0.0.3"]
        await until(lambda: names["127.0.0.3"] in backends and not backends[names["127.0.0.3"]].health.down)
        await until(lambda: stage.logged("backend_leaves"))
        before = posts(old)
        answers += [await proxy.chat(body) for body in (STREAM, HELLO) * 3]
        assert (posts(old), posts(new)) == (before, 6)
        assert await running.content.readany()
        assert names["127.0.0.2"] in backends, "it is there for as long as its stream"
        running.close()
        await until(lambda: list(backends) == [names["127.0.0.3"]])
        await stage.closing(proxy)
    return f"{statuses(answers)}; a stream at the old address goes on until its client leaves"
