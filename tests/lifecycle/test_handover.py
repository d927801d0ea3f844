"""Starting a successor: when it counts as serving, and the cleanup after a failed one."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from llmproxy.lifecycle import handover
from llmproxy.lifecycle.handover import ProcessSignals, SuccessorFailedError, notify, successor
from llmproxy.lifecycle.sockets import PREDECESSOR, Sockets

SERVES = f"""
import json, os
handed = json.loads(os.environ["{PREDECESSOR}"])
[fd] = handed["sockets"]["127.0.0.1:0"]
assert os.path.exists(f"/proc/self/fd/{{fd}}")
os.write(handed["ready_fd"], b"1")
"""
HANGS = "import time; time.sleep(60)"


def descriptors() -> list[str]:
    """All that this process has open."""
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


async def started(monkeypatch: pytest.MonkeyPatch, program: str) -> tuple[int, bool]:
    """Returns the exit code of a successor that runs `program`, and whether other children do not inherit the
    socket."""
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", program])
    sockets = Sockets()
    [listening], _ = sockets.listening("127.0.0.1", 0)
    with listening:
        child = await successor(sockets)
        return child.wait(10.0), not listening.get_inheritable()


async def test_a_successor_gets_the_sockets_and_says_that_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await started(monkeypatch, SERVES) == (0, True)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("raise SystemExit(3)", "it ended with exit code 3 before it served"),
        (HANGS, "it did not serve within 0.2 s"),
        # Whoever closes the pipe without a word, and stays, does not serve either.
        (f"import os; os.closerange(3, 100); {HANGS}", "it did not serve within 0.2 s"),
    ],
)
async def test_nothing_is_left_of_a_successor_that_does_not_serve(
    program: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "READY_MAX_S", 0.2 if HANGS in program else 30.0)
    monkeypatch.setattr(handover, "EXIT_MAX_S", 0.2 if HANGS in program else 30.0)
    spawned: list[subprocess.Popen[bytes]] = []
    spawn = handover._start_again

    def spawning(environment: Mapping[str, str], fds: Sequence[int]) -> subprocess.Popen[bytes]:
        spawned.append(spawn(environment, fds))
        return spawned[0]

    monkeypatch.setattr(handover, "_start_again", spawning)
    open_before = descriptors()
    with pytest.raises(SuccessorFailedError, match=reason):
        await started(monkeypatch, program)
    assert descriptors() == open_before
    assert spawned[0].returncode is not None, "ended, and waited for"


async def test_a_command_that_is_gone_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(SuccessorFailedError, match="python cannot be started: No such file"):
        await started(monkeypatch, SERVES)


def test_a_service_manager_is_notified_at_either_kind_of_address(tmp_path: Path) -> None:
    notify("READY=1", {})
    for path, address in ((str(tmp_path / "n"), str(tmp_path / "n")), (f"@llmproxy-{os.getpid()}", "")):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(address or "\0" + path[1:])
            manager.setblocking(False)
            notify("STOPPING=1", {"NOTIFY_SOCKET": path})
            assert manager.recv(100) == b"STOPPING=1"


def test_a_service_manager_that_is_gone_is_no_reason_to_end(tmp_path: Path) -> None:
    with capture_logs() as logs:
        notify("READY=1", {"NOTIFY_SOCKET": str(tmp_path / "gone")})
    assert [entry["event"] for entry in logs] == ["notify_failed"]


async def test_a_successor_without_descriptors_has_failed() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(SuccessorFailedError, match="there is no pipe to it: Too many open files"):
            await successor(Sockets())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_member_of_a_cluster_starts_no_successor() -> None:
    loop = asyncio.get_running_loop()
    with capture_logs() as logged:
        signals = ProcessSignals(Sockets())
        signals.take_restarts(tuple, member=True)
        os.kill(os.getpid(), signal.SIGUSR2)
        while not logged:  # noqa: ASYNC110 - a signal has no event
            await asyncio.sleep(0)
    assert logged[0]["event"] == "restart_ignored"
    assert (signals.successor_pid, signals._restart, signals.over.is_set()) == (None, None, False)
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
