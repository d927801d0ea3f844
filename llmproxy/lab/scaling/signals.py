"""What autoscalers follow: our number, single gauges as people configure them, and one who knows the future."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from llmproxy.core.backends.view import View
from llmproxy.core.scaling.need import Need
from llmproxy.lab.scaling.hpa import DEFAULTS, FOLLOWING, HpaRules


@dataclass(frozen=True, slots=True)
class Look:
    """What an autoscaler may see at one moment. `waiting` counts requests in the proxies' queues.

    `late` is the 90 % quantile of the time to the first token of the last minute over its objective, None without
    requests. `coming` is how many replicas the work of the near future needs.
    """

    now: float
    up: int
    asked: int
    need: Need | None
    views: Sequence[View]
    waiting: int
    late: float | None
    coming: float | None


@dataclass(frozen=True, slots=True)
class Signal:
    """A metric with its target for each replica, and the rules by which it is followed."""

    about: str
    value: Callable[[Look], float | None]
    target: float
    rules: HpaRules = DEFAULTS


START_AHEAD_S = 30.0
"""How much earlier than a replica takes to start the one who knows the future asks: two looks of an autoscaler."""
LATE_UP, LATE_DOWN = 0.55, 0.40


def _ours(look: Look) -> float | None:
    return look.need.need if look.need is not None and look.need.sure else None


def _running(look: Look) -> float:
    return float(sum(view.reading.running for view in look.views if view.available and view.reading is not None))


def _queue(look: Look) -> float:
    return float(look.waiting + sum(view.waiting for view in look.views if view.available))


def _kv_used(look: Look) -> float:
    return sum(view.kv_used for view in look.views if view.available)


def _coming(look: Look) -> float | None:
    return look.coming


def _late(look: Look) -> float | None:
    """Two-sided: more above `LATE_UP` of the objective, fewer below `LATE_DOWN` of it."""
    if look.late is None:
        return None
    late = min(look.late, 2.0)
    if late > LATE_UP:
        return look.asked * (1.0 + (late * look.up / max(1, look.asked) / LATE_UP - 1.0))
    return float(look.asked if late > LATE_DOWN else max(1, look.asked - 1))


SIGNALS: Mapping[str, Signal] = {
    "ours": Signal("the work in replicas, as /scale says it", _ours, 1.0, FOLLOWING),
    "static": Signal("as many as there may be, always", lambda _: float("inf"), 1.0),
    "hpa_queue": Signal("requests that wait, 5 for each replica", _queue, 5.0),
    "hpa_batch": Signal("requests that run, 16 for each replica", _running, 16.0),
    "hpa_batch_100": Signal("the same, 100 for each replica", _running, 100.0),
    "kv_threshold": Signal("KV-cache in use, 0.8 of each replica", _kv_used, 0.8),
    "slo_p90": Signal("90 % quantile of the time to the first token over its objective", _late, 1.0),
    "oracle": Signal("the work that will come, known in advance", _coming, 1.0, FOLLOWING),
}  # fmt: skip
"""By the names of `--scale`."""


class Future:
    """The work of a trace in seconds of a replica, for one who knows it. `works` are (second, work), in order."""

    def __init__(self, works: Sequence[tuple[float, float]], ahead_s: float, window_s: float) -> None:
        self._at_s = [at_s for at_s, _ in works]
        self._sums = [0.0]
        for _, work in works:
            self._sums.append(self._sums[-1] + work)
        self._ahead_s, self._window_s = ahead_s, window_s

    def most(self, now: float, utilisation: float) -> float:
        """Replicas for the busiest window from now until one that is asked for now has served for a while."""
        found, at_s = 0.0, now
        while at_s <= now + self._ahead_s:
            found = max(found, self._between(at_s, at_s + self._window_s) / self._window_s)
            at_s += self._window_s / 2.0
        return found / utilisation

    def _between(self, begin_s: float, end_s: float) -> float:
        return self._sums[bisect_left(self._at_s, end_s)] - self._sums[bisect_left(self._at_s, begin_s)]
