"""The demo: simulated replicas, the proxy before them, and one table of how overload is handled.

Everything it starts runs as a `llmproxy.cli.child`, which ends when its standard input does. Only the demo holds
the other end of that pipe, so no process outlives it.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable
from contextlib import ExitStack
from itertools import cycle

import aiohttp

from llmproxy.demo.clients import ADAPTERS, MODEL, RATES_PER_S, DemoClients
from llmproxy.demo.display import DemoReplica, Display
from llmproxy.demo.processes import HOST, DemoError, Processes, held_port

START_TIMEOUT_S = 60.0
BATCH = 4
"""Sequences that a replica runs at once: few, so that a little traffic is too much, and costs little to simulate."""
QUEUE_REQUESTS_MAX = 48
FOLLOWED_S = 0.5
"""How often the proxy's numbers are read."""

GUIDE = """llmproxy at {base}, before {count} simulated vLLM replicas (no GPU).
Models: {models}. In another terminal:

curl {base}/v1/chat/completions \\
  -H 'content-type: application/json' -d '{{"model": "{model}", "max_tokens": 32,
  "messages": [{{"role": "user", "content": "Hello"}}]}}'

queued: in the proxy. waiting: in a replica. broken: cut midway. lost: an error.
More to see: /v1/models /metrics /debug/queue /debug/explain. Ctrl-C ends all.
"""

SCRIPT: tuple[tuple[float, str, str], ...] = (
    (5.0, "calm", "quiet: all requests are served at once"),
    (10.0, "overload", "overload: sheddable requests wait or are refused, critical go first"),
    (6.0, "calm", "the overload is over: the requests that waited are served"),
    (5.0, "death", "{victim} was killed: what it had not begun to answer is retried"),
    (8.0, "calm", "{victim} is started again, and up in a few seconds"),
)
"""Seconds, what is played, and what is said of it; from the top again at the end."""


def run_demo(port: int, replicas: int) -> int:
    """Run until Ctrl-C or SIGTERM on this port (0: any free one) with so many replicas.

    Returns the exit code: 0 when it was asked to end, 1 after a message when it cannot start or go on.
    """
    display = Display()
    try:
        return asyncio.run(_until_signal(_demo(port, replicas, display), display))
    except DemoError as error:
        print(f"llmproxy demo: {error}", file=sys.stderr, flush=True)
        return 1


async def _until_signal(work: Awaitable[None], display: Display) -> int:
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        # Once only: a second Ctrl-C must not cut short the ending of the processes, which is bounded in time.
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, lambda: None)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        await task
    except asyncio.CancelledError:
        display.say("Stopped; nothing is left running.")
    return 0


async def _demo(port: int, count: int, display: Display) -> None:
    with ExitStack() as ports:
        port = ports.enter_context(held_port(port))
        replicas = [
            DemoReplica(f"replica-{number}", ports.enter_context(held_port(0)), _adapters(number, count))
            for number in range(1, count + 1)
        ]
        base = f"http://{HOST}:{port}"
        async with (
            Processes() as processes,
            aiohttp.ClientSession(
                base,
                timeout=aiohttp.ClientTimeout(total=START_TIMEOUT_S),
                connector=aiohttp.TCPConnector(limit=0),
            ) as session,
        ):
            display.say(f"Starting the proxy and simulated vLLM replicas ({count})...")
            for replica in replicas:
                await _start(processes, replica)
            backends = [word for replica in replicas for word in ("--backend", replica.url)]
            limits = ("--scheduling-start-limit", str(BATCH), "--queue-requests-max", str(QUEUE_REQUESTS_MAX))
            # The state file is that of the person's own proxy, too.
            place = ("--host", HOST, "--port", str(port), "--state-file", "none")
            await processes.start("proxy", "serve", *place, *limits, *backends)
            await processes.unless_one_dies(_serving(session))
            display.say(GUIDE.format(base=base, models=", ".join((MODEL, *ADAPTERS)), count=count, model=MODEL))
            await processes.unless_one_dies(_play(session, processes, replicas, display))


def _adapters(number: int, count: int) -> tuple[str, ...]:
    """Each adapter is loaded on two replicas of three or more, on all of fewer."""
    return tuple(adapter for i, adapter in enumerate(ADAPTERS) if (number - 1 - i) % count < 2)


async def _start(processes: Processes, replica: DemoReplica) -> None:
    adapters = [word for adapter in replica.adapters for word in ("--adapter", adapter)]
    batch = ("--max-num-seqs", str(BATCH))
    place = ("--host", HOST, "--port", str(replica.port))
    await processes.start(replica.name, "replica", *place, "--model", MODEL, *batch, *adapters)


async def _serving(session: aiohttp.ClientSession) -> None:
    """Return once the proxy is ready and lists every name that the replicas serve. Raises DemoError in the end."""
    wanted = {MODEL, *ADAPTERS}
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                try:
                    async with session.get("/ready") as ready, session.get("/v1/models") as models:
                        if ready.status == 200 and wanted <= {card["id"] for card in (await models.json())["data"]}:
                            return
                except aiohttp.ClientError:
                    pass  # It does not listen yet; its death or the timeout ends the waiting.
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise DemoError(f"the proxy is not ready after {START_TIMEOUT_S:g} s") from None


async def _play(
    session: aiohttp.ClientSession, processes: Processes, replicas: list[DemoReplica], display: Display
) -> None:
    clients = DemoClients(session, {replica.address: replica.name for replica in replicas})
    with display.drawn():
        async with asyncio.TaskGroup() as group:
            clients.come_and_go(group)
            group.create_task(_follow(session, clients, replicas, display))
            # A lone replica is not killed: no other one could take its requests.
            script = [part for part in SCRIPT if len(replicas) > 1 or part[1] != "death"]
            for seconds, part, news in cycle(script[: None if len(replicas) > 1 else 3]):
                victim = replicas[-1]
                display.news(news.format(victim=victim.name))
                clients.rates_per_s = RATES_PER_S["overload" if part == "overload" else "calm"]
                if part == "death":
                    await processes.kill(victim.name)
                await asyncio.sleep(seconds)
                if part == "death":
                    await _start(processes, victim)


async def _follow(
    session: aiohttp.ClientSession, clients: DemoClients, replicas: list[DemoReplica], display: Display
) -> None:
    """Show the proxy's own metrics page beside what the clients saw, again and again."""
    while True:
        try:
            async with session.get("/metrics") as answer:
                page = await answer.text()
        except (aiohttp.ClientError, TimeoutError):
            display.news("the proxy does not answer /metrics")
        else:
            display.show(page, replicas, clients)
        await asyncio.sleep(FOLLOWED_S)
