"""The command `batch`: checks its files, sends the requests, shows its progress, and prints a summary."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

from llmproxy.gateway.http.headers import OBJECTIVE_HEADERS
from llmproxy.tools.batch.requests import BatchError, RequestFile
from llmproxy.tools.batch.results import ResultFile
from llmproxy.tools.batch.send import Sender
from llmproxy.tools.batch.tally import Tally
from llmproxy.tools.batch.window import Window
from llmproxy.tools.terminal import can_draw, console, printable
from llmproxy.tools.top.ask import ProxyAddress

COMPLETE, WITH_FAILURES, INCOMPLETE = 0, 1, 3
"""The exit codes: all requests succeeded, some failed, some have no result yet. 2 is for wrong input."""
JSON = {"content-type": "application/json"}
REQUEST_S = 3600.0  # The longest time for one request, in seconds.
CONNECT_S = 30.0
LINE_EACH_S = 10.0  # The seconds between two lines of progress, if standard output is no terminal.


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """The flags of the command."""

    file: Path
    proxy: ProxyAddress
    out: Path
    # How many requests may be open at once; None adapts the number to the proxy.
    in_flight: int | None
    # The band of the requests.
    criticality: str
    # How often a request may fail before it counts as failed. A 429 with Retry-After is no failure.
    attempts: int


async def run(options: BatchOptions) -> int:
    """Sends the requests of a batch that have no result yet. Returns the exit code.

    Raises BatchError for files that cannot be used, and for a server that cannot be reached, refuses the key or lacks a
    model of the batch.
    """
    began_s = time.monotonic()
    with ExitStack() as stack:
        requests = RequestFile(options.file)
        stack.callback(requests.close)
        results = ResultFile(options.out)
        stack.callback(results.close)
        tally = Tally(len(requests.positions))
        for result in results.results():
            if requests.positions.pop(result.custom_id, None) is None:
                raise BatchError(
                    f"{options.out} has a result of {printable(result.custom_id)} too many: {options.file} has no such"
                    " request, or it had a result before; choose another --out"
                )
            tally.count(result)
        reason = ""
        try:
            if requests.positions:
                reason = await _send(options, requests, results, tally)
        except asyncio.CancelledError:
            reason = "stopped, and the open requests were given up"
        finally:
            with suppress(BatchError):  # `results.broken` keeps the reason.
                results.sync()
    print(tally.summary(time.monotonic() - began_s), f"Results: {options.out}")
    if tally.done < tally.total or results.broken:
        print(f"Not complete: {results.broken or reason}. The same command goes on.")
        return INCOMPLETE
    return WITH_FAILURES if tally.failed else COMPLETE


async def _send(options: BatchOptions, requests: RequestFile, results: ResultFile, tally: Tally) -> str:
    """Sends the requests without a result. Returns why some are left, or "". Raises BatchError."""
    key, objective = options.proxy.key, {OBJECTIVE_HEADERS[0]: options.criticality}
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=REQUEST_S, sock_connect=CONNECT_S),
                headers=objective | JSON | ({"authorization": f"Bearer {key}"} if key else {}),
            )
        )
        window = Window(options.in_flight)
        sender = Sender(session, options.proxy.url, requests, results, window, tally, options.attempts)
        await sender.check()
        stack.enter_context(_interruptible(sender))
        showing = asyncio.create_task(_show(sender))
        stack.callback(showing.cancel)
        try:
            await sender.run(requests.positions)
        except ExceptionGroup as group:
            error = _first(group)
            if not isinstance(error, BatchError):
                raise error from None
            # Requests were sent, so the input was not wrong.
            sender.stop(str(error))
    return sender.reason


@contextmanager
def _interruptible(sender: Sender) -> Iterator[None]:
    """During the block, the first signal (SIGINT, SIGTERM) stops the sender, and the second cancels this task."""
    loop, sending = asyncio.get_running_loop(), asyncio.current_task()
    assert sending is not None

    def interrupted() -> None:
        if sender.reason:
            sending.cancel()
        sender.stop("stopped by a signal")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _show(sender: Sender) -> None:
    """Shows the progress each second on a terminal, and otherwise prints it every LINE_EACH_S, until cancelled."""
    screen, drawn, tally, window = console(), can_draw(), sender.tally, sender.window
    bar = Progress(
        BarColumn(24), TextColumn("{task.description}"), console=screen, auto_refresh=False, disable=not drawn
    )
    with bar:
        task = bar.add_task("", total=tally.total)
        while True:
            text = tally.progress(time.monotonic(), window.sending)
            if sender.reason:
                text = f"{text}. Waiting for the open requests; Ctrl-C gives them up"
            bar.update(task, completed=tally.done, description=escape(text), refresh=True)
            await asyncio.sleep(1.0 if drawn else LINE_EACH_S)
            if not drawn:
                print(text, flush=True)


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
