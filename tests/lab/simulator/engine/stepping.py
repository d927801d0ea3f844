"""Runs an engine step by step, with requests at given times."""

from __future__ import annotations

from collections.abc import Iterable

from llmproxy.lab.simulator.engine.engine import Engine
from llmproxy.lab.simulator.engine.sequence import EngineRequest


def stepped(engine: Engine, coming: Iterable[tuple[float, EngineRequest]]) -> tuple[dict[str, float], dict[str, float]]:
    """When each request got its first token, and when its last one; `coming` are in the order of their times."""
    waiting = list(coming)
    firsts: dict[str, float] = {}
    lasts: dict[str, float] = {}
    now = 0.0
    while waiting or engine.busy:
        if not engine.busy:
            now = max(now, waiting[0][0])
        while waiting and waiting[0][0] <= now:
            engine.add(waiting.pop(0)[1])
        step = engine.step()
        now += step.duration_s
        for name in step.emitted:
            firsts.setdefault(name, now)
        lasts.update(dict.fromkeys(step.finished, now))
    return firsts, lasts
