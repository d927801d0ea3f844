"""Handlers for signals that arrive while the program is loading and checking its configuration.

Without a handler, SIGHUP and SIGUSR2 end a process, and SIGTERM ends it with an exit code that looks like a failure.
Service managers may send all three at any time.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn

_LATER = (signal.SIGHUP, signal.SIGUSR2)

_recorded: set[int] = set()


def remember() -> None:
    """Makes SIGTERM and SIGINT end this process at once with exit code 0.

    Records SIGHUP and SIGUSR2, which `send_again` repeats.
    """
    end_at_once()
    for number in _LATER:
        signal.signal(number, _record)


def end_at_once() -> None:
    """Makes SIGTERM and SIGINT end this process at once with exit code 0."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)


def send_again() -> None:
    """Sends each recorded signal to this process again. Call it after the final handlers are set."""
    while _recorded:
        os.kill(os.getpid(), _recorded.pop())


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    # An exception raised in a callback or an extension module would be lost, or would crash the module.
    os._exit(0)


def _record(number: int, _frame: FrameType | None) -> None:
    _recorded.add(number)
