"""Handles the signals of the process, and replaces the process by a successor without refusing a connection.

On SIGUSR2 this process starts the same command again with its listening sockets, and continues to serve. The successor
loads its configuration, polls its backends, accepts on the same sockets, and then writes a byte to a pipe. Only then
this process stops accepting and serves its open connections to the end, as nginx and Envoy do. A member of a cluster
ignores SIGUSR2.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping, Sequence

import structlog

from llmproxy.lifecycle.sockets import Sockets

READY_MAX_S = 60.0  # A successor that does not serve within this time is killed.
EXIT_MAX_S = 5.0  # How long to wait for the exit code of a successor that has closed its pipe.
DRAINED = "LLMPROXY_DRAINED"  # The environment variable with the backends that an operator drained, for the successor.

_log = structlog.get_logger()


class SuccessorFailedError(Exception):
    """A successor could not be started, or did not serve. The message says why."""


class ProcessSignals:
    """Handles the signals of this process, and exposes them as the events `over`, `stop` and `cut`."""

    def __init__(self, sockets: Sockets) -> None:
        # `over` is set when the process must end: at the first SIGTERM or SIGINT, or when a successor serves.
        # `stop` is set only at the signal. `cut` is set at a second signal: all requests must be cut at once.
        self.over, self.stop, self.cut = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.cut_code = 0  # The exit code that a shell reports for a program ended by the second signal.
        self._sockets = sockets
        self._drained: Callable[[], Collection[str]] = tuple
        self._member = False
        self._restart: asyncio.Task[None] | None = None
        self._successor: subprocess.Popen[bytes] | None = None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop, number)

    def take_restarts(self, drained: Callable[[], Collection[str]], *, member: bool = False) -> None:
        """Makes SIGUSR2 start a successor, which inherits the sockets and the drained backends that `drained` returns.

        A `member` of a cluster ignores SIGUSR2, because a successor could use neither its name nor its cluster port.
        """
        self._drained, self._member = drained, member
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, self._on_restart)

    @property
    def successor_pid(self) -> int | None:
        """The process id of the successor; None without a successor."""
        return None if self._successor is None else self._successor.pid

    def _on_stop(self, number: signal.Signals) -> None:
        if self.stop.is_set():
            self.cut_code = 128 + number
            self.cut.set()
        elif self._restart is not None:
            self._restart.cancel()
        self.stop.set()
        self.over.set()

    def _on_restart(self) -> None:
        if self._member:
            _log.warning("restart_ignored", why="a member of a cluster is restarted by SIGTERM: others go on meanwhile")
            return
        if self.over.is_set() or self._restart is not None:
            _log.warning("restart_ignored", why="it is under way" if self._restart else "this process is ending")
            return
        self._restart = asyncio.create_task(self._replace(), name="restart")

    async def _replace(self) -> None:
        # Arguments are not logged, because they may contain API keys.
        _log.info("restarting", program=sys.executable)
        try:
            self._successor = await successor(self._sockets, self._drained())
        except SuccessorFailedError as failed:
            _log.error("restart_failed", why=str(failed), hint="this process goes on serving")
        else:
            notify(f"MAINPID={self._successor.pid}")
            self.over.set()
        finally:
            self._restart = None


def inherited_drains(environment: MutableMapping[str, str]) -> frozenset[str]:
    """Returns the backends that were drained in the predecessor.

    Removes the variable from `environment`, so that no child process inherits it.
    """
    return frozenset(json.loads(environment.pop(DRAINED, "[]")))


async def successor(sockets: Sockets, drained: Collection[str] = ()) -> subprocess.Popen[bytes]:
    """Starts this program again on the same sockets, and waits until it serves.

    `drained` are the backends that an operator drained. Raises SuccessorFailedError. A failed or cancelled start leaves
    no process.
    """
    try:
        reads, writes = os.pipe()
    except OSError as error:
        raise SuccessorFailedError(f"there is no pipe to it: {error.strerror}") from None
    variables, fds = sockets.for_successor(writes)
    try:
        child = _start_again({**variables, DRAINED: json.dumps(sorted(drained))}, fds)
    except OSError as error:
        os.close(reads)
        raise SuccessorFailedError(f"{sys.executable} cannot be started: {error.strerror}") from None
    finally:
        os.close(writes)
    try:
        async with asyncio.timeout(READY_MAX_S):
            await _readable(reads)
        if os.read(reads, 1):
            return child
        code = await asyncio.to_thread(child.wait, EXIT_MAX_S)
        raise SuccessorFailedError(f"it ended with exit code {code} before it served; its own lines say why")
    except BaseException as error:
        # On cancellation too, no half-started process may remain.
        child.kill()
        child.wait()
        if isinstance(error, TimeoutError | subprocess.TimeoutExpired):
            raise SuccessorFailedError(f"it did not serve within {READY_MAX_S:g} s") from None
        raise
    finally:
        os.close(reads)


def _start_again(variables: Mapping[str, str], fds: Sequence[int]) -> subprocess.Popen[bytes]:
    """Starts the command of this process again.

    The path of the interpreter is the same, but may lead to a newer virtual environment now.
    """
    return subprocess.Popen([sys.executable, *sys.orig_argv[1:]], env={**os.environ, **variables}, pass_fds=fds)


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(fd)


def notify(state: str, environment: Mapping[str, str] = os.environ) -> None:
    """Sends `state` to the service manager, as sd_notify(3) does: a datagram to `NOTIFY_SOCKET`, if that is set."""
    path = environment.get("NOTIFY_SOCKET")
    if not path:
        return
    address = "\0" + path[1:] if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(state.encode(), address)
    except OSError as error:
        _log.warning("notify_failed", state=state, error=str(error))


async def ended_before(event: asyncio.Event, awaited: Awaitable[object], limit_s: float | None = None) -> bool:
    """Awaits `awaited` until `event` is set or `limit_s` has passed (None: no limit), and then cancels it.

    Returns whether `awaited` finished first, and raises its exception.
    """
    first, other = asyncio.ensure_future(awaited), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((first, other), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if first.done():
            await first
        return first.done()
    finally:
        first.cancel()
        other.cancel()
