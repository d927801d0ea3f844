"""Signals of autoscalers: the need that the proxy computes, and common gauges."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, inf

from llmproxy.core.backends.view import View
from llmproxy.core.scaling.need import Need
from llmproxy.lab.scaling.hpa import DEFAULTS, FOLLOWING, HpaRules


@dataclass(frozen=True, slots=True)
class Look:
    """The inputs of an autoscaling signal at one moment.

    `up` replicas serve, and the autoscaler wanted `asked` at its last reading. `need` is the result of `/scale`, None
    with several pools. `waiting` counts requests in the proxies' queues. `late` is the p90 of the last minute's times
    to first token, each divided by its objective; None without requests. `prompt_tokens` and `output_tokens` are means
    over the same requests. `uncached_tokens` is the prefill work of requests without a first token.
    """

    now: float
    up: int
    asked: int
    need: Need | None
    views: Sequence[View]
    waiting: int
    late: float | None
    prompt_tokens: float
    output_tokens: float
    uncached_tokens: int


Value = Callable[[Look], float | None]


@dataclass(frozen=True, slots=True)
class Signal:
    """A metric with its target per replica and its scaling rules. Each run creates a `reader`, which may have state."""

    about: str
    reader: Callable[[], Value]
    target: float
    rules: HpaRules = DEFAULTS


def _gauge(about: str, value: Value, target: float, rules: HpaRules = DEFAULTS) -> Signal:
    return Signal(about, lambda: value, target, rules)


LATE_UP, LATE_DOWN = 0.55, 0.40
PREFILL_TOKENS_PER_S, BACKLOG_S = 15_928.0, 1.5
"""llm-d's calibration of `token_aware` for Qwen3-32B on two H100, and the seconds of prefill that may wait."""


def _ours(look: Look) -> float | None:
    return None if look.need is None else look.need.need


def _running(look: Look) -> float:
    return float(sum(view.reading.running for view in look.views if view.available and view.reading is not None))


def _queue(look: Look) -> float:
    return float(look.waiting + sum(view.waiting for view in look.views if view.available))


def _kv_used(look: Look) -> float:
    return sum(view.kv_used for view in look.views if view.available)


def _late(look: Look) -> float | None:
    """Returns a value that asks for more replicas above `LATE_UP` of the objective, and for fewer below `LATE_DOWN`."""
    if look.late is None:
        return None
    late = min(look.late, 2.0)
    if late > LATE_UP:
        return look.asked * (1.0 + (late * look.up / max(1, look.asked) / LATE_UP - 1.0))
    return float(look.asked if late > LATE_DOWN else max(1, look.asked - 1))


def _tokens(look: Look) -> float:
    """Returns the larger of two loads: seconds of pending prefill / `BACKLOG_S`, and KV cache usage / 0.8."""
    return max(look.uncached_tokens / PREFILL_TOKENS_PER_S / BACKLOG_S, _kv_used(look) / 0.8)


class _Saturation:
    """The second analyser of llm-d's workload-variant autoscaler: tokens in use and expected, divided by the capacity.

    A replica's capacity is 0.8 of its KV cache, or the mean usage of the last ten samples with five or more waiting
    requests, if that is less. The signal asks for more replicas above 0.85 of the capacity, but not while replicas
    start, and for fewer below 0.70.
    """

    EVERY_S = 60.0
    UP, DOWN = 0.85, 0.70

    def __init__(self) -> None:
        self._saturated: deque[float] = deque(maxlen=10)
        self._looked_s = -inf
        self._wanted: float | None = None

    def __call__(self, look: Look) -> float | None:
        if look.now - self._looked_s < self.EVERY_S:
            return self._wanted
        self._looked_s = look.now
        up = [view for view in look.views if view.available and view.kv_tokens]
        if not up:
            return None
        in_use = 0.0
        for view in up:
            tokens = view.kv_used * (view.kv_tokens or 0)
            in_use += tokens
            if view.waiting >= 5:
                self._saturated.append(tokens)
        capacity = 0.8 * sum(view.kv_tokens or 0 for view in up) / len(up)
        if self._saturated:
            capacity = min(capacity, sum(self._saturated) / len(self._saturated))
        engines = sum(view.waiting for view in up)
        demand = in_use + engines * look.prompt_tokens + look.waiting * (look.prompt_tokens + look.output_tokens)
        more = ceil((demand / self.UP - look.asked * capacity) / capacity)
        fewer = floor((look.asked * capacity - demand / self.DOWN) / capacity)
        if more > 0:
            self._wanted = float(look.asked if look.asked > look.up else look.asked + more)
        else:
            self._wanted = float(look.asked - max(0, fewer))
        return self._wanted


SIGNALS: Mapping[str, Signal] = {
    "ours": _gauge("the work in replicas, as /scale says it", _ours, 1.0, FOLLOWING),
    "static": _gauge("as many as there may be, always", lambda _: float("inf"), 1.0),
    "hpa_queue": _gauge("requests that wait, 5 for each replica", _queue, 5.0),
    "hpa_batch": _gauge("requests that run, 16 for each replica", _running, 16.0),
    "hpa_batch_100": _gauge("the same, 100 for each replica", _running, 100.0),
    "kv_threshold": _gauge("KV-cache in use, 0.8 of each replica", _kv_used, 0.8),
    "token_aware": _gauge("seconds of prompts (Qwen3-32B on two H100), or KV-cache", _tokens, 1.0),
    "wva": Signal("tokens in use and in queues over the capacity of a replica, two-sided", _Saturation, 1.0),
    "slo_p90": _gauge("90 % quantile of the time to the first token over its objective", _late, 1.0),
}  # fmt: skip
"""Signals by their names in `--scale`."""
