"""Signals that arrive while the program is still being loaded and its configuration checked.

Without a handler, SIGHUP and SIGUSR2 end a process, and SIGTERM ends it with an exit code that looks like a failure.
Service managers may send all three at any time.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn

_LATER = (signal.SIGHUP, signal.SIGUSR2)

_came: set[int] = set()


def remember() -> None:
    """From now on SIGTERM and SIGINT end this process at once with exit code 0, as there is nothing to drain yet.

    SIGHUP and SIGUSR2 are kept for `send_again`.
    """
    end_at_once()
    for number in _LATER:
        signal.signal(number, _keep)


def end_at_once() -> None:
    """From now on SIGTERM and SIGINT end this process at once with exit code 0."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)


def send_again() -> None:
    """Send this process the kept signals again, each once, now that they have other handlers."""
    while _came:
        os.kill(os.getpid(), _came.pop())


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    # No exception: one that is raised in a callback or an extension module is lost, or crashes the module.
    os._exit(0)


def _keep(number: int, _frame: FrameType | None) -> None:
    _came.add(number)
