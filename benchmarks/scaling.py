"""Fleets that scale in virtual time: what following each signal keeps of the objectives, and what it costs.

    .venv/bin/python -m benchmarks.scaling [WORKLOAD ...]

The workloads: llm-d's published ramp, a step to four times the rate, half a day in an hour, a mix that changes at a
constant rate, and bursts after idle times. Each runs on up to twelve Qwen3-32B replicas that take 110 s to start, asked
every 15 s, under every signal of `llmproxy.lab.scaling.signals`. *Attained* is the share of all requests that kept
3 s to the first token and 0.1 s per token; *replicas* are paid ones on average, starting and leaving ones included.
The oracle knows the work to come, in seconds of a replica as the static fleet showed them. Some twenty minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from math import cos, pi
from random import Random

from llmproxy.config import Config
from llmproxy.core.scaling.need import KV_MARGIN
from llmproxy.lab.fleet.fleet_file import fleet_named
from llmproxy.lab.fleet.spec import Autoscale
from llmproxy.lab.policies.by_name import plan_named
from llmproxy.lab.results.result import RunResult
from llmproxy.lab.run.replay import Run, Setup
from llmproxy.lab.run.virtual_time import run
from llmproxy.lab.scaling.signals import SIGNALS, START_AHEAD_S, Future
from llmproxy.lab.traces.arrival import Arrival, Trace

FLEET = "12xqwen-32b-h100-tp2"
MOST, LEAST, START_S = 12, 2, 110.0
TTFT_S, TPOT_S = 3.0, 0.1
Phase = tuple[float, Callable[[float], float], int, int]
"""Seconds, requests per second at a second of it, prompt and output tokens on average."""


def steady(rate: float) -> Callable[[float], float]:
    return lambda _: rate


RAMP = [(400.0, steady(rate), 4_000, 1_000) for rate in (2.0, 4.0, 6.0, 8.0, 10.0, 4.0, 1.0)]
WORKLOADS: dict[str, list[Phase]] = {
    "ramp": RAMP,
    "step": [(900.0, steady(2.0), 4_000, 1_000), (1_500.0, steady(8.0), 4_000, 1_000)],
    "diurnal": [(3_600.0, lambda at_s: 5.5 - 4.5 * cos(2.0 * pi * at_s / 3_600.0), 4_000, 1_000)],
    "shift": [
        (600.0, steady(5.0), prompt, output)
        for prompt, output in ((512, 1_500), (9_000, 100), (2_000, 500), (4_000, 1_000))
    ],
    "bursts": [
        part for _ in range(3) for part in ((600.0, steady(0.2), 4_000, 1_000), (200.0, steady(8.0), 4_000, 1_000))
    ],
}


def arrivals(phases: Sequence[Phase], seed: int) -> list[Arrival]:
    """Poisson arrivals of all phases; lengths vary by a third."""
    rng, begin_s, found = Random(seed), 0.0, list[Arrival]()
    for lasts_s, rate_at, prompt, output in phases:
        at_s, most = 0.0, max(rate_at(lasts_s * part / 50.0) for part in range(51))
        while (at_s := at_s + rng.expovariate(most)) < lasts_s:
            if rng.random() * most <= rate_at(at_s):
                sizes = round(prompt * rng.uniform(0.67, 1.33)), round(output * rng.uniform(0.67, 1.33))
                found.append(Arrival(begin_s + at_s, *sizes, ttft_slo_s=TTFT_S, tpot_slo_s=TPOT_S))
        begin_s += lasts_s
    return found


def simulated(
    workload: str, signal: str, seed: int, costs: tuple[float, float] | None
) -> tuple[RunResult, tuple[float, float]]:
    """One run, and what it learned: seconds of a replica for a prompt token and for an output token."""
    came = arrivals(WORKLOADS[workload], seed)
    scaling = {"target_tpot_s": TPOT_S, "start_s": START_S, "min": LEAST, "max": MOST}
    config = Config.model_validate({"backends": [{"url": "http://a:1"}], "scaling": scaling})
    fleet = replace(fleet_named(FLEET), autoscale=Autoscale(signal, LEAST, START_S))
    setup = Setup(
        Trace(workload, lambda: iter(came)), fleet, plan_named("cost", config), config, seed, 1.0,
        sum(phase[0] for phase in WORKLOADS[workload]), (),
    )  # fmt: skip
    one = Run(setup)
    if costs is not None:
        works = [
            (arrival.at_s, arrival.prompt_tokens * costs[0] + arrival.output_tokens * costs[1]) for arrival in came
        ]
        one.future = Future(works, START_S + START_AHEAD_S, 60.0)
    recorder = run(one.go())
    (watched,) = one.proxies[0].pools.scaling.pools.values()
    line = watched.curve.line
    assert line is not None
    held_tokens = sum(one.prompt_tokens + one.output_tokens / 2.0 for one in came) / len(came)
    seats = max(1.0, KV_MARGIN * fleet.replicas[0].kv_tokens / held_tokens)
    return recorder.result(signal, seed, 1.0, 1.0), (line.token_s, line.at(seats) / seats)


def workload_table(workload: str, seed: int = 1) -> str:
    """One workload under every signal, as rows of Markdown."""
    static, costs = simulated(workload, "static", seed, None)
    results = {"static": static}
    for signal in SIGNALS:
        if signal != "static":
            results[signal] = simulated(workload, signal, seed, costs)[0]
    assert results["oracle"].replicas is not None
    base = results["oracle"].replicas.mean
    rows = []
    for signal, result in results.items():
        scaled = result.replicas
        assert scaled is not None
        rows.append(
            f"| {workload} | {signal} | {result.goodput or 0.0:.3f} | {scaled.mean:.2f} | {scaled.mean / base:.2f} "
            f"| {scaled.peak} | {scaled.turns} | {result.refused + result.failed} |"
        )
    return "\n".join(rows)


def main() -> None:
    chosen = sys.argv[1:] or list(WORKLOADS)
    print("| workload | signal | attained | replicas | of the oracle's | peak | turns | lost |\n" + "| --- " * 8 + "|")
    with ProcessPoolExecutor(2) as pool:
        for table in pool.map(workload_table, chosen):
            print(table, flush=True)


if __name__ == "__main__":
    main()
