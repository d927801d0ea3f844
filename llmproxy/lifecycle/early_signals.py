"""Signals that come while the program is still being read and its configuration checked.

Until somebody asks for them, SIGHUP and SIGUSR2 end a process, and SIGTERM ends it with an exit code that looks like a
failure. Who starts services sends all three whenever it likes.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn

_LATER = (signal.SIGHUP, signal.SIGUSR2)

_came: set[int] = set()


def remember() -> None:
    """From now on SIGTERM and SIGINT end this process at once, with exit code 0: there is nothing to be drained yet.

    SIGHUP and SIGUSR2 wait for `send_again`.
    """
    end_at_once()
    for number in _LATER:
        signal.signal(number, _keep)


def end_at_once() -> None:
    """From now on SIGTERM and SIGINT end this process with exit code 0, wherever it is."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)


def send_again() -> None:
    """Send this process what it was sent meanwhile, now that somebody else handles it. Of each kind once."""
    while _came:
        os.kill(os.getpid(), _came.pop())


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    # Without an exception: those raised while a callback or an extension module runs are lost, and some crash it.
    os._exit(0)


def _keep(number: int, _frame: FrameType | None) -> None:
    _came.add(number)
