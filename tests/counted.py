"""Counts calls, for tests that work does not grow with an input."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def calls_in(run: Callable[[], object]) -> int:
    """Returns how many functions `run` calls, those of Python and those in C."""
    events: list[str] = []

    def profile(_frame: FrameType, event: str, _arg: object) -> None:
        events.append(event)

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return events.count("call") + events.count("c_call")
