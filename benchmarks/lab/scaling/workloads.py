"""The workloads: arrivals over time on up to twelve Qwen3-32B replicas, on two H100 each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import merge
from math import cos, pi
from pathlib import Path
from random import Random
from typing import Any

from llmproxy.lab.traces import trace_named
from llmproxy.lab.traces.arrival import Arrival

TTFT_S, TPOT_S = 3.0, 0.1
AZURE = Path(__file__).resolve().parents[2] / "traces" / "azure2023_conv.csv.gz"
AZURE_RATE = 4.0
PROMPT_TOKENS, OUTPUT_TOKENS = 4_000, 1_000


@dataclass(frozen=True, slots=True)
class Phase:
    """`rate_at` are requests per second at a second of the phase; tokens are means. `more` is put into each arrival."""

    lasts_s: float
    rate_at: Callable[[float], float]
    prompt_tokens: int = PROMPT_TOKENS
    output_tokens: int = OUTPUT_TOKENS
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Workload:
    """Arrivals by seed. `least` is the fewest replicas, and `settings` those of the proxy that differ."""

    about: str
    arrivals: Callable[[int], Sequence[Arrival]]
    lasts_s: float
    least: int = 2
    settings: dict[str, Any] = field(default_factory=dict)


def steady(rate: float) -> Callable[[float], float]:
    return lambda _: rate


def day(least: float, most: float, period_s: float) -> Callable[[float], float]:
    return lambda at_s: (least + most) / 2.0 - (most - least) / 2.0 * cos(2.0 * pi * at_s / period_s)


def poisson(phases: Sequence[Phase], seed: int) -> Iterator[Arrival]:
    """Arrivals of one phase after the other; lengths vary by a third."""
    rng, begin_s = Random(seed), 0.0
    for phase in phases:
        at_s, most = 0.0, max(phase.rate_at(phase.lasts_s * part / 50.0) for part in range(51))
        while most and (at_s := at_s + rng.expovariate(most)) < phase.lasts_s:
            if rng.random() * most <= phase.rate_at(at_s):
                means = phase.prompt_tokens, phase.output_tokens
                prompt, output = (round(mean * rng.uniform(0.67, 1.33)) for mean in means)
                yield Arrival(begin_s + at_s, prompt, output, ttft_slo_s=TTFT_S, tpot_slo_s=TPOT_S, **phase.more)
        begin_s += phase.lasts_s


def of(about: str, *streams: Sequence[Phase], **more: Any) -> Workload:
    """One or several streams of phases at once."""

    def arrivals(seed: int) -> list[Arrival]:
        found = (poisson(phases, 1_000 * i + seed) for i, phases in enumerate(streams))
        return list(merge(*found, key=lambda one: one.at_s))

    return Workload(about, arrivals, max(sum(one.lasts_s for one in phases) for phases in streams), **more)


def azure(seed: int) -> list[Arrival]:
    """The recorded times, so much faster; the seed varies nothing."""
    return [
        replace(one, at_s=one.at_s / AZURE_RATE, ttft_slo_s=TTFT_S, tpot_slo_s=TPOT_S)
        for one in trace_named(str(AZURE), seed).arrivals()
    ]


BATCH = {"band": "sheddable"}
IMPATIENT = {"max_wait_s": 10.0, "retries": 5, "retry_after_s": 1.0}
WORKLOADS: dict[str, Workload] = {
    "ramp": of("llm-d's published ramp", [Phase(400.0, steady(rate)) for rate in (2.0, 4.0, 6.0, 8.0, 10.0, 4.0, 1.0)]),
    "step": of("a step to four times the rate", [Phase(900.0, steady(2.0)), Phase(1_500.0, steady(8.0))]),
    "diurnal": of("a day in an hour", [Phase(3_600.0, day(1.0, 10.0, 3_600.0))]),
    "shift": of(
        "mixes of tokens, one after the other, at a constant rate",
        [
            Phase(600.0, steady(5.0), prompt, output)
            for prompt, output in ((512, 1_500), (9_000, 100), (2_000, 500), (4_000, 1_000))
        ],
    ),
    "bursts": of("idle times and bursts", [Phase(600.0, steady(0.2)), Phase(200.0, steady(8.0))] * 3),
    "azure": Workload("Azure's conversations of 2023, four times as fast", azure, 780.0),
    "storm": of(
        "a step, and clients that wait 10 s and ask again up to five times",
        [Phase(600.0, steady(2.5), more=IMPATIENT), Phase(900.0, steady(7.0), more=IMPATIENT)],
    ),
    "bands": of(
        "half a day, and batch work of a lower band all the time",
        [Phase(1_800.0, day(1.0, 6.0, 1_800.0))],
        [Phase(1_800.0, steady(2.0), more=BATCH)],
    ),
    "batch": of("batch work alone", [Phase(600.0, steady(4.0), more=BATCH)]),
    "zero": of(
        "nothing, then 4 requests a second at once",
        [Phase(60.0, steady(0.0)), Phase(400.0, steady(4.0))],
        least=0,
        settings={"queue": {"no_backend_wait_s": 600.0, "max_wait_s": 600.0}},
    ),
}  # fmt: skip
