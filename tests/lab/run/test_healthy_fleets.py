"""No replica of a healthy fleet is ejected under any load. `LLMPROXY_TEST_SEEDS=100` tries more loads."""

from __future__ import annotations

import os
from random import Random

import pytest

from llmproxy.lab.run.replay import replay
from llmproxy.lab.traces.arrival import Arrival
from tests.lab.small import fleet, setup

pytestmark = pytest.mark.slow

SEEDS = int(os.environ.get("LLMPROXY_TEST_SEEDS", "3"))
REQUESTS = 300
STEP_S, PROMPT_TOKEN_S = 0.01, 5e-5
"""Rough times of a replica, in seconds. The load is chosen by them."""


def drawn(rng: Random, places: int) -> list[Arrival]:
    """Return a random load for `places`: nearly idle to far too much, even or in bursts, short or long answers."""
    whole, long, cold = (rng.choice((0.0, 0.5, 1.0)), rng.choice((0.0, 0.1)), rng.choice((0.0, 0.3)))
    prompt, output = rng.choice((100, 1_000)), rng.choice((4, 40, 400))
    service_s = prompt * PROMPT_TOKEN_S + output * STEP_S
    rate, burst = rng.uniform(0.1, 1.5) * places / service_s, rng.choice((1, 1, 30))
    made, at_s = list[Arrival](), 0.0
    for number in range(REQUESTS):
        if number % burst == 0:
            at_s += burst * rng.expovariate(rate)
        prompt_tokens = rng.randint(4_000, 7_000) if rng.random() < long else rng.randint(1, 2 * prompt)
        adapter = f"adapter-{rng.randint(0, 11)}" if rng.random() < cold else None
        blocks = tuple(range(number * 1_000, number * 1_000 + prompt_tokens // 64 + 1))
        made.append(
            Arrival(
                at_s,
                prompt_tokens,
                rng.randint(1, 2 * output),
                blocks,
                tenant=f"t{rng.randint(0, 3)}",
                adapter=adapter,
                whole=rng.random() < whole,
            )
        )
    return made


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_replica_of_a_healthy_fleet_is_ejected(seed: int) -> None:
    rng = Random(seed)
    count, sequences = rng.randint(2, 5), rng.choice((2, 8, 32))
    arrivals = drawn(rng, count * sequences)
    policy = rng.choice(("cost", "cost", "blend"))
    of = setup(arrivals, policy, fleet(count, max_num_seqs=sequences, max_loras=rng.choice((2, 16))), seed=seed)
    assert replay(of).result(policy, seed, 1.0, 1.0).ejections == 0
