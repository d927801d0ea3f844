"""The command `shadow`: passes connections on to the router, records requests, and prints a summary each minute."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from urllib.parse import urlsplit

import orjson

from llmproxy.config import BackendTlsConfig, Config, ConfigError
from llmproxy.lifecycle.background import background_task
from llmproxy.lifecycle.descriptors import raise_limit
from llmproxy.tools.doctor.look import look_at
from llmproxy.tools.doctor.report import report
from llmproxy.tools.shadow.pipe import Pipe, Router
from llmproxy.tools.shadow.recorder import Recorder, Tally
from llmproxy.tools.shadow.replicas import Replicas
from llmproxy.tools.shadow.watcher import Held, HttpWatcher
from llmproxy.upstream.tls import ca_error, context_for

REQUESTS, REPLICAS = "requests.jsonl", "replicas.json"
"""The names of the files in the folder of `--out`: a line for each request, and the load of the replicas."""
SAY_EVERY_S = 60.0
CHECK_S, IDLE_S = 0.1, 1.0
"""After the first signal, connections are checked every `CHECK_S` seconds. A connection without an open request is
closed after `IDLE_S` seconds without a byte, because a request may be on its way."""
END_S = 30.0  # The time after the first signal from which all connections are cut.
OF_THE_SYSTEM = BackendTlsConfig()
"""The default: the certificate of the router is verified with the CAs of the operating system."""
UNREACHABLE = "clients that got 502, because the router was unreachable"
UNWATCHED = "connections passed on unread"


class ShadowError(Exception):
    """The shadow cannot start. The message says why and what to do."""


@dataclass(frozen=True, slots=True)
class ShadowOptions:
    """The flags of the command.

    `config` has the backends behind the router, and the tenants and bands of the record.
    """

    host: str
    port: int
    to: str
    config: Config
    out: Path
    file_bytes_max: int
    # How the certificate of the router is verified, if `to` is an https:// URL.
    tls: BackendTlsConfig = OF_THE_SYSTEM


def router_at(url: str, tls: BackendTlsConfig) -> Router:
    """Returns the router with this URL.

    Raises ShadowError if the URL is not `http(s)://host[:port]`, if the CA file has no certificate, and if TLS settings
    contradict each other or the URL.
    """
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or not parts.hostname or not port or parts.path.strip("/"):
        raise ShadowError(f"--to {url}: write the address of your router, without a path, like http://router:8000")
    if parts.scheme == "http":
        if tls != OF_THE_SYSTEM:
            raise ShadowError(f"--to-ca and --to-insecure need an https:// router, and --to is {url}")
        return Router(url, parts.hostname, port)
    if tls.ca is not None and tls.insecure_skip_verify:
        raise ShadowError("--to-insecure accepts any certificate: leave it out, or --to-ca")
    try:
        return Router(url, parts.hostname, port, context_for(tls))
    except OSError as error:
        raise ShadowError(f"--to-ca: {ca_error(tls, error)}") from None


async def run(options: ShadowOptions, say: Callable[[str], None], stop: asyncio.Event | None = None) -> None:
    """Passes connections on and records requests until the command ends.

    After the first signal, or `stop`, it takes no more connections, closes each connection after its open request, and
    waits for `END_S` at most. A second signal cuts the open requests.

    Raises ShadowError if the shadow cannot start, and ConfigError for a configuration that cannot be used.
    """

    def tell(text: str) -> None:
        # A terminal that is gone must fail no request.
        with suppress(OSError, ValueError):
            say(text)

    router = router_at(options.to, options.tls)
    raise_limit()
    # As for `doctor`: an external backend is no engine, and must not get the key of the replicas.
    backends = [one for one in options.config.backends if not one.looked_up and not one.is_external]
    tell(f"Looks at the replicas first. Then {options.host}:{options.port} is passed on to {options.to}.")
    replicas = await look_at(backends, options.config.backend_api_key)
    tell(report(replicas))
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        file = FileIO(options.out / REQUESTS, "x")
    except FileExistsError:
        raise ShadowError(f"{options.out} has a record: report on it with --report, or name another --out") from None
    except OSError as error:
        raise ShadowError(f"--out {options.out}: {error.strerror or error}") from None
    loop, pipes = asyncio.get_running_loop(), set[Pipe]()
    tally, held, polled = Tally(tell), Held(), Replicas(replicas, options.config.backend_api_key)
    adapters = [card.name for replica in replicas for card in replica.models if card.parent is not None]
    try:
        recorder = Recorder(options.config, adapters, file, options.file_bytes_max, held, tally)
    except ConfigError:
        file.close()
        (options.out / REQUESTS).unlink()
        raise

    def accepted() -> asyncio.Protocol:
        pipe = Pipe(
            router,
            lambda address: HttpWatcher(address, held, time.monotonic, recorder.take),
            lambda error: tally.failed(UNWATCHED, error),
            lambda: tally.counts.update([UNREACHABLE]),
            pipes.discard,
        )
        pipes.add(pipe)
        return pipe.client

    stopping, at_once = stop or asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (at_once if stopping.is_set() else stopping).set()

    async with AsyncExitStack() as stack:
        stack.callback(recorder.close)
        try:
            server = await loop.create_server(accepted, options.host, options.port, backlog=4096)
        except OSError as error:
            (options.out / REQUESTS).unlink()
            raise ShadowError(f"--listen {options.host}:{options.port}: {error.strerror or error}") from None
        port = server.sockets[0].getsockname()[1]
        tell(f"Passes {options.host}:{port} on to {options.to}, and records into {options.out}. Ctrl-C ends it.")
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, signalled)
            stack.callback(loop.remove_signal_handler, number)
        await stack.enter_async_context(background_task(recorder.run, "recorder"))
        await stack.enter_async_context(background_task(polled.poll, "metrics"))

        def note() -> None:
            aside = options.out / f"{REPLICAS}.new"
            try:
                aside.write_bytes(orjson.dumps(polled.facts(), option=orjson.OPT_INDENT_2))
                aside.replace(options.out / REPLICAS)
            except OSError as error:
                tally.failed(f"{REPLICAS} not written", error)

        async def speak() -> None:
            while True:
                note()
                await asyncio.sleep(SAY_EVERY_S)
                tell(tally.minute(sum(pipe.busy for pipe in pipes)))

        await stack.enter_async_context(background_task(speak, "summary"))
        await stopping.wait()
        server.close()
        tell(f"Ends when the open requests have ended, after {END_S:g} s at the latest. Ctrl-C again cuts them.")
        for pipe in pipes:
            pipe.end()
        ends_s = loop.time() + END_S
        while pipes and not at_once.is_set() and loop.time() < ends_s:
            for pipe in [pipe for pipe in pipes if not pipe.busy and pipe.quiet_s > IDLE_S]:
                pipe.close()
            await asyncio.sleep(CHECK_S)
        for pipe in list(pipes):
            pipe.close()
        await recorder.catch_up()
        note()
    for name, count in tally.counts.items():
        tell(f"{count:>10,}  {name}")
