"""The capacity of a replica as the proxy learns it, against what an engine gives.

    .venv/bin/python -m benchmarks.lab.scaling.accuracy

*True* is the most requests per second that one replica ends in the second five of ten minutes, whatever is offered.
(With far more than it can do it ends fewer: where the KV-cache runs full, engines drop answers and compute them again.)
Four replicas then see a ramp from 20 to 90 % of theirs within ten minutes, and from the fifth minute on the learned
capacity is compared with it every half minute. Three mixes of tokens, prompts at the modelled cost and 1.9 times as
dear. The first line is llm-d's published mix: 1.45 requests per second, measured on real replicas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

from benchmarks.lab.scaling.runs import work_of
from benchmarks.lab.scaling.workloads import TPOT_S, TTFT_S, steady
from llmproxy.config import Config
from llmproxy.core.domain import Outcome
from llmproxy.core.scaling.need import Need
from llmproxy.lab.fleet.fleet_file import fleet_named
from llmproxy.lab.fleet.world import World
from llmproxy.lab.policies.by_name import plan_named
from llmproxy.lab.results.record import Record
from llmproxy.lab.run.proxy import LabProxy
from llmproxy.lab.run.replay import SETTLE_S, Run, Setup
from llmproxy.lab.run.virtual_time import run
from llmproxy.lab.traces.arrival import Arrival, Trace

PROFILE = "qwen-32b-h100-tp2"
MIXES = (4_000, 1_000), (9_000, 100), (512, 1_500)
SCALES = 1.0, 1.9
LASTS_S, LOOK_FROM_S, LOOK_EVERY_S = 600.0, 300.0, 30.0
REPLICAS, LEAST, MOST = 4, 0.2, 0.9
OFFERED = 0.9, 1.0, 1.1, 1.2, 1.3
"""Rates that are tried, over what the profile of the engine says."""


class Watched(Run):
    """A run that looks at the number from `LOOK_FROM_S` on."""

    def _start_proxies(self, world: World) -> list[LabProxy]:
        proxies, self.needs = super()._start_proxies(world), list[Need]()
        loop = asyncio.get_running_loop()

        def look() -> None:
            self.needs += proxies[0].pools.needs(loop.time()).values()

        for number in range(int((LASTS_S - LOOK_FROM_S) / LOOK_EVERY_S) + 1):
            loop.call_at(SETTLE_S + LOOK_FROM_S + number * LOOK_EVERY_S - 0.001, look)
        return proxies


def watched(
    rate_at: Callable[[float], float], mix: tuple[int, int], replicas: int, scale: float, seed: int
) -> tuple[list[Need], float]:
    """The numbers, and requests per second that ended in the second half."""

    def arrivals() -> Iterator[Arrival]:
        rng, at_s, most = Random(seed), 0.0, max(rate_at(0.0), rate_at(LASTS_S))
        while (at_s := at_s + rng.expovariate(most)) < LASTS_S:
            if rng.random() * most <= rate_at(at_s):
                prompt, output = (round(mean * rng.uniform(0.67, 1.33)) for mean in mix)
                yield Arrival(at_s, prompt, output, ttft_slo_s=TTFT_S, tpot_slo_s=TPOT_S)

    came, ended = list(arrivals()), list[Record]()
    config = Config.model_validate({"backends": [{"url": "http://a:1"}]})
    setup = Setup(
        Trace("ramp", lambda: iter(came)), fleet_named(f"{replicas}x{PROFILE}"), plan_named("cost", config), config,
        seed, scale, LASTS_S, (),
    )  # fmt: skip
    one = Watched(setup, on_record=ended.append)
    run(one.go())
    served = sum(r.outcome is Outcome.COMPLETED and LASTS_S / 2.0 <= r.ended_s < LASTS_S for r in ended)
    return one.needs, served / (LASTS_S / 2.0)


def true_capacity(mix: tuple[int, int], scale: float, seed: int = 1) -> float:
    """The most requests per second that one replica ends."""
    spec = fleet_named(f"1x{PROFILE}").replicas[0]
    scaled = replace(spec, profile=replace(spec.profile, prefill_factor=scale))
    rates = [one / work_of(Arrival(0.0, *mix), scaled) for one in OFFERED]
    return max(watched(steady(rate), mix, 1, scale, seed)[1] for rate in rates)


def learned_ratios(mix: tuple[int, int], scale: float, true: float, seed: int = 1) -> list[float]:
    """Learned capacity over the `true` one, look by look."""

    def rate_at(at_s: float) -> float:
        return REPLICAS * true * (LEAST + (MOST - LEAST) * at_s / LASTS_S)

    needs = watched(rate_at, mix, REPLICAS, scale, seed)[0]
    return [need.capacity.requests_per_s / true for need in needs if need.capacity is not None]


def main() -> None:
    print("| prompt and output tokens | cost of prompts | true, 1/s | learned over true | at the end |")
    print("| --- " * 5 + "|")
    for mix in MIXES:
        for scale in SCALES:
            true = true_capacity(mix, scale)
            found = learned_ratios(mix, scale, true)
            print(
                f"| {mix[0]:,} and {mix[1]:,} | x{scale:g} | {true:.2f} | {min(found):.2f} to {max(found):.2f} "
                f"| {found[-1]:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
