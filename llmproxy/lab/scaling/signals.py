"""Signals of autoscalers: the need that the proxy computes, and common gauges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from llmproxy.core.backends.view import View
from llmproxy.core.scaling.need import Need
from llmproxy.lab.scaling.hpa import DEFAULTS, FOLLOWING, HpaRules


@dataclass(frozen=True, slots=True)
class Look:
    """The inputs of an autoscaling signal at one moment.

    `up` replicas serve, and the autoscaler wanted `asked` at its last reading. `need` is the result of `/scale`, None
    with several pools. `waiting` counts requests in the proxies' queues. `late` is the p90 of the last minute's times
    to first token, each divided by its objective; None without requests.
    """

    now: float
    up: int
    asked: int
    need: Need | None
    views: Sequence[View]
    waiting: int
    late: float | None


@dataclass(frozen=True, slots=True)
class Signal:
    """A metric with its target per replica and its scaling rules."""

    value: Callable[[Look], float | None]
    target: float
    rules: HpaRules = DEFAULTS


LATE_UP, LATE_DOWN = 0.55, 0.40


def _ours(look: Look) -> float | None:
    return None if look.need is None else look.need.need


def _running(look: Look) -> float:
    return float(sum(view.reading.running for view in look.views if view.available and view.reading is not None))


def _queue(look: Look) -> float:
    return float(look.waiting + sum(view.waiting for view in look.views if view.available))


def _late(look: Look) -> float | None:
    """Returns a value that asks for more replicas above `LATE_UP` of the objective, and for fewer below `LATE_DOWN`."""
    if look.late is None:
        return None
    late = min(look.late, 2.0)
    if late > LATE_UP:
        return look.asked * (1.0 + (late * look.up / max(1, look.asked) / LATE_UP - 1.0))
    return float(look.asked if late > LATE_DOWN else max(1, look.asked - 1))


SIGNALS: Mapping[str, Signal] = {
    "ours": Signal(_ours, 1.0, FOLLOWING),
    "static": Signal(lambda _: float("inf"), 1.0),
    "hpa_queue": Signal(_queue, 5.0),
    "hpa_batch": Signal(_running, 16.0),
    "slo_p90": Signal(_late, 1.0),
}
"""Signals by their names in `--scale`."""
