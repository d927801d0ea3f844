"""Hot prefixes under placement by cost: kept where they are, spread as far as they must be, and never thrown about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest

from llmproxy.lab.results.record import Record
from llmproxy.lab.traces.arrival import Arrival
from tests.lab.small import fleet, records_of, setup

BLOCK_TOKENS = 64
SYSTEM_BLOCKS = 32
QUESTION_BLOCKS = 4
PROMPT_TOKENS = (SYSTEM_BLOCKS + QUESTION_BLOCKS) * BLOCK_TOKENS
SYSTEM_TOKENS = SYSTEM_BLOCKS * BLOCK_TOKENS


def asked(rates: list[tuple[float, float]], prefixes: int, output_tokens: int, seed: int = 1) -> Iterator[Arrival]:
    """Questions behind one of so many system prompts, at (requests/s, seconds) one after the other."""
    rng, at_s, began_s, number = Random(seed), 0.0, 0.0, 0
    for rate, span_s in rates:
        while (at_s := at_s + rng.expovariate(rate)) < began_s + span_s:
            number += 1
            which = rng.randrange(prefixes)
            system = [which * 1_000 + i for i in range(SYSTEM_BLOCKS)]
            question = [-(number * 100 + i) - 1 for i in range(QUESTION_BLOCKS)]
            yield Arrival(at_s, PROMPT_TOKENS, output_tokens, (*system, *question))
        at_s = began_s = began_s + span_s


def hits(found: list[Record], first_s: float, last_s: float) -> float:
    """Of the prompt tokens that arrived within, the share that was cached."""
    some = [one for one in found if first_s <= one.arrived_s < last_s]
    return sum(one.hit_tokens or 0 for one in some) / sum(one.arrival.prompt_tokens for one in some)


def computed(found: list[Record]) -> int:
    """How many times a system prompt was computed."""
    return sum((one.hit_tokens or 0) < SYSTEM_TOKENS / 2 for one in found)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_hot_system_prompt_is_spread_over_replicas(seed: int) -> None:
    on = fleet(4, max_num_seqs=32)
    found = records_of(setup(asked([(40.0, 20.0)], 1, 150, seed), "cost", on, seed=seed))
    shares = Counter(one.backend for one in found)
    assert max(shares.values()) < 0.4 * len(found), shares
    assert min(shares.values()) > 0.1 * len(found), shares
    assert computed(found) <= 3 * 4, "each replica computes it once, or a few times at once, and keeps it"
    assert max(one.ttft_s or 99.0 for one in found if one.arrived_s > 2.0) < 0.5


def test_a_system_prompt_that_one_replica_can_serve_stays_there() -> None:
    found = records_of(setup(asked([(2.0, 30.0)], 1, 50), "cost", fleet(4)))
    assert max(Counter(one.backend for one in found).values()) > 0.9 * len(found)
    assert computed(found) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_burst_that_breaks_affinity_does_not_spiral_into_misses(seed: int) -> None:
    """More system prompts than one replica can cache, and room for one copy of each in all: a guard that spreads them
    under load makes misses, which make load. When the burst is over, everything has to be found again.
    """
    # Twenty system prompts of 2,048 tokens in four caches of 20,000, beside what runs.
    on = fleet(4, kv_tokens=20_000, max_num_seqs=16)
    found = records_of(setup(asked([(16.0, 30.0), (64.0, 6.0), (16.0, 30.0)], 20, 60, seed), "cost", on, seed=seed))
    before, after = hits(found, 10.0, 30.0), hits(found, 50.0, 66.0)
    assert before > 0.75
    assert after > 0.95 * before
    assert max(one.ttft_s or 99.0 for one in found if one.arrived_s > 50.0) < 1.0
