"""The demo: simulated replicas behind a proxy, traffic with overload and failures, and the picture of `llmproxy top`.

Each process is an `llmproxy.cli.child`, which ends when its standard input ends. Only the demo has the other end of
that pipe, so each process ends with the demo.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from llmproxy.config import hash_of
from llmproxy.lab.demo.buttons import PRESSED
from llmproxy.lab.demo.clients import ADAPTERS, MODEL, DemoClients
from llmproxy.lab.demo.display import Display
from llmproxy.lab.demo.processes import HOST, DemoError, DemoReplica, Processes, reserved_port
from llmproxy.lab.demo.scenes import ADMIN_KEY, SCENES, Stage, playable_scenes
from llmproxy.tools.terminal import pressed
from llmproxy.tools.top.ask import LIVE, Asker, AskError, ProxyAddress
from llmproxy.tools.top.document import Document, read

START_TIMEOUT_S = 60.0
BATCH = 4  # Sequences that a replica runs at once: few, so that little traffic overloads it and is cheap to simulate.
QUEUE_REQUESTS_MAX = 48
CRITICAL_TTFT_S = 0.5  # The TTFT objective of critical requests.
INTERVAL_S = 1.0  # Interval between two reads of the proxy's state.

GUIDE = """llmproxy at {base}, before {count} simulated vLLM replicas (no GPU).

  Look at it in a browser:  {base}/ui   (admin key: {key})

Models: {models}. In another terminal:

curl {base}/v1/chat/completions \\
  -H 'content-type: application/json' -d '{{"model": "{model}", "max_tokens": 32,
  "messages": [{{"role": "user", "content": "Hello"}}]}}'

waiting: in the queue of the proxy. load: in a replica, and how many it runs.
broken: cut midway. lost: an error.
{scenes}More to see: llmproxy top {base} --admin-key {key}
/v1/models and /metrics. Ctrl-C ends all.
"""
KEYS = "Keys: {keys},\nblank: the demo plays all scenes again.\n"


def run_demo(port: int, replicas: int) -> int:
    """Runs the demo until Ctrl-C or SIGTERM. Port 0 takes a free port.

    Returns the exit code: 0 after a signal, 1 after an error, which is printed.
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
        # Only once: a second Ctrl-C must not interrupt the shutdown of the processes, which has a time limit.
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
        port = ports.enter_context(reserved_port(port))
        replicas = [
            DemoReplica(f"replica-{number}", ports.enter_context(reserved_port(0)), _adapters(number, count))
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
            file = Path(ports.enter_context(TemporaryDirectory(prefix="llmproxy-demo-"))) / "llmproxy.json"
            file.write_text(json.dumps(_config(port, replicas)), encoding="utf-8")
            playable = "".join(scene.key for scene in playable_scenes(count == 1))
            serve = (playable, "serve", "--config", str(file))
            await processes.start("proxy", *serve, module="llmproxy.cli.demo_child")
            await processes.unless_one_dies(_serving(session))
            keys = KEYS.format(keys=", ".join(f"{one.key} {one.name}" for one in SCENES)) if display.keys else ""
            display.say(
                GUIDE.format(
                    base=base,
                    models=", ".join((MODEL, *ADAPTERS)),
                    count=count,
                    model=MODEL,
                    key=ADMIN_KEY,
                    scenes=keys,
                )
            )
            asker = Asker(ProxyAddress.parsed(base, ADMIN_KEY), session)
            await processes.unless_one_dies(_play(session, asker, processes, replicas, display))


def _config(port: int, replicas: Sequence[DemoReplica]) -> dict[str, Any]:
    return {
        "host": HOST,
        "port": port,
        "admin_key": hash_of(ADMIN_KEY),
        "admin": {"public_metrics": True},
        # The user's own proxy may use the same state file.
        "state_file": "none",
        "scheduling": {"initial_batch_limit": BATCH},
        "objectives": [{"name": "critical", "criticality": "critical", "ttft_s": CRITICAL_TTFT_S}],
        # A tenant that floods the queue is refused, before the queue is full for the others.
        "queue": {"requests_max": QUEUE_REQUESTS_MAX, "flow_requests_max": QUEUE_REQUESTS_MAX // 2},
        "backends": [{"name": replica.name, "url": replica.url} for replica in replicas],
    }


def _adapters(number: int, count: int) -> tuple[str, ...]:
    """Returns the adapters of a replica. Each adapter is on two replicas, or on the only replica."""
    return tuple(adapter for i, adapter in enumerate(ADAPTERS) if (number - 1 - i) % count < 2)


async def _start(processes: Processes, replica: DemoReplica) -> None:
    adapters = [word for adapter in replica.adapters for word in ("--adapter", adapter)]
    batch = ("--max-num-seqs", str(BATCH))
    place = ("--host", HOST, "--port", str(replica.port))
    # A stream of numbered text shows that it goes on at another replica without a gap.
    text = ("--text", "numbered")
    await processes.start(replica.name, "replica", *place, "--model", MODEL, *batch, *text, *adapters)


async def _serving(session: aiohttp.ClientSession) -> None:
    """Waits until the proxy is ready and lists all models and adapters. Raises DemoError after START_TIMEOUT_S."""
    wanted = {MODEL, *ADAPTERS}
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                try:
                    async with session.get("/ready") as ready, session.get("/v1/models") as models:
                        if ready.status == 200 and wanted <= {card["id"] for card in (await models.json())["data"]}:
                            return
                except aiohttp.ClientError:
                    pass  # The proxy does not listen yet.
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise DemoError(f"the proxy is not ready after {START_TIMEOUT_S:g} s") from None


async def _play(
    session: aiohttp.ClientSession, asker: Asker, processes: Processes, replicas: list[DemoReplica], display: Display
) -> None:
    clients = DemoClients(session)
    victim = replicas[-1]
    stage = Stage(
        session, processes, victim.name, victim.url, len(replicas) == 1,
        partial(_start, processes, victim), display.show_message, clients.sources,
    )  # fmt: skip
    processes.on_line = lambda line: stage.pressed(line.removeprefix(PRESSED)) if line.startswith(PRESSED) else None
    with display.drawn(), pressed(stage.pressed) if display.keys else nullcontext():
        async with asyncio.TaskGroup() as group:
            group.create_task(clients.come_and_go(group))
            group.create_task(_follow(asker, clients, display))
            await stage.lead()


async def _follow(asker: Asker, clients: DemoClients, display: Display) -> None:
    """Updates the display from the proxy's state and the clients' results, until cancelled."""
    while True:
        try:
            display.show(read(await asker.get(LIVE), Document), clients.bands)
        except AskError as error:
            display.show_message(str(error))
        await asyncio.sleep(INTERVAL_S)
