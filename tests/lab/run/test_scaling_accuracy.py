"""The capacity of a replica as the proxy learns it, against what engines give that are asked for more than they can."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from llmproxy.config import Config
from llmproxy.core.domain import Outcome
from llmproxy.core.scaling.need import Need
from llmproxy.lab.fleet.fleet_file import fleet_named
from llmproxy.lab.fleet.world import World
from llmproxy.lab.results.record import Record
from llmproxy.lab.run.proxy import LabProxy
from llmproxy.lab.run.replay import SETTLE_S, Run
from llmproxy.lab.run.virtual_time import run
from llmproxy.lab.traces.arrival import Arrival
from tests.lab.small import setup

pytestmark = pytest.mark.slow

ROOT = "llama-8b-h100"
LASTS_S = 160.0


class Watched(Run):
    """A run that asks at its end how many replicas are needed."""

    need: Need

    def _start_proxies(self, world: World) -> list[LabProxy]:
        proxies = super()._start_proxies(world)
        loop = asyncio.get_running_loop()

        def look() -> None:
            (self.need,) = proxies[0].pools.needs(loop.time()).values()

        loop.call_at(SETTLE_S + LASTS_S, look)
        return proxies


def watched(rate: float, prompt: int, output: int, replicas: int, scale: float) -> tuple[Need, float]:
    """(The number at the end, requests per second that ended in the second half of the time)."""
    rng, at_s, arrivals = Random(3), 0.0, list[Arrival]()
    while (at_s := at_s + rng.expovariate(rate)) < LASTS_S:
        varied = rng.uniform(0.7, 1.3), rng.uniform(0.7, 1.3)
        arrivals.append(Arrival(at_s, max(1, round(prompt * varied[0])), max(1, round(output * varied[1]))))
    config = Config.model_validate({"backends": [{"url": "http://a:1"}]})
    ended: list[Record] = []
    on = fleet_named(f"{replicas}x{ROOT}")
    one = Watched(setup(arrivals, "cost", on, config, prefill_scale=scale), on_record=ended.append)
    run(one.go())
    served = [record for record in ended if record.outcome is Outcome.COMPLETED]
    return one.need, sum(LASTS_S / 2.0 <= record.ended_s < LASTS_S for record in served) / (LASTS_S / 2.0)


# Below the largest batch, the time of a step at capacity is extrapolated: more sequences share it than were seen.
@pytest.mark.parametrize(
    ("prompt", "output", "rate", "scale", "within"),
    [(3_000, 300, 6.0, 1.0, 0.15), (3_000, 300, 6.0, 1.9, 0.1), (6_000, 60, 5.0, 1.0, 0.1), (6_000, 60, 5.0, 1.9, 0.1)],
)
def test_capacity_is_known_before_it_is_reached(
    prompt: int, output: int, rate: float, scale: float, within: float
) -> None:
    _, capacity = watched(1.5 * rate, prompt, output, 1, scale)
    need, _ = watched(2.0 * capacity * 0.6, prompt, output, 2, scale)
    assert need.capacity is not None
    assert need.capacity.requests_per_s == pytest.approx(capacity, rel=within)
    assert need.terms["work"] == pytest.approx(2.0 * 0.6 / 0.8, rel=0.2)
