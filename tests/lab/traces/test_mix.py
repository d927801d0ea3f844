"""Parts of a trace, and a louder tenant in it: the same arrivals at the same times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

import pytest

from llmproxy.config import Config
from llmproxy.lab.run.runs import Simulation, prepared
from llmproxy.lab.traces import generate
from llmproxy.lab.traces.arrival import Arrival, Trace
from llmproxy.lab.traces.mix import SPREAD_S, Mix, mixed
from tests.lab.small import fleet, trace, traffic

BANDS = "gen:priority_mix,rate=20,duration_s=30"


def played(simulation: Simulation, rate_scale: float = 1.0) -> list[Arrival]:
    return list(prepared(simulation, 3, rate_scale)[0].arrivals())


def test_one_band_of_a_trace_is_exactly_its_part_of_the_whole() -> None:
    whole = Simulation(BANDS, fleet(), Config())
    part = replace(whole, mix=Mix(band="critical"))
    assert played(part, 1.7) == [one for one in played(whole, 1.7) if one.band == "critical"]
    assert 0 < len(played(part)) < len(played(whole))
    # Both take as long, and therefore warm up as long.
    assert prepared(part, 3, 1.7)[1] == prepared(whole, 3, 1.7)[1]


def test_all_in_one_band_are_the_same_requests() -> None:
    whole = Simulation(BANDS, fleet(), Config())
    assert played(replace(whole, mix=Mix(level=True))) == [replace(one, band="default") for one in played(whole)]


def test_louder_tenant_multiplies_and_the_others_stay() -> None:
    arrivals = traffic(count=200)
    louder = list(mixed(trace(arrivals), Mix(loud="t1", factor=4), 5).arrivals())
    assert [one.at_s for one in louder] == sorted(one.at_s for one in louder)
    before, after = Counter(one.tenant for one in arrivals), Counter(one.tenant for one in louder)
    assert after == {**before, "t1": 4 * before["t1"]}
    assert [one for one in louder if one.tenant != "t1"] == [one for one in arrivals if one.tenant != "t1"]
    originals = [one for one in arrivals if one.tenant == "t1"]
    copies = Counter((one.prompt_tokens, one.output_tokens) for one in louder if one.tenant == "t1")
    assert all(copies[one.prompt_tokens, one.output_tokens] >= 4 for one in originals)
    extra = [one for one in louder if one.tenant == "t1" and not one.blocks]
    assert len(extra) == 3 * before["t1"]
    for one in extra:
        assert any(0.0 <= one.at_s - first.at_s <= SPREAD_S for first in originals)


def test_without_it_the_others_come_when_they_came_beside_it() -> None:
    whole = Simulation("gen:noisy_neighbour,rate=20,duration_s=30,start_s=0,end_s=0,ramp_s=0", fleet(), Config())
    loud = replace(whole, mix=Mix(loud="tenant-1"))
    alone = replace(whole, mix=Mix(loud="tenant-1", without="tenant-1"))
    assert played(alone, 2.0) == [one for one in played(loud, 2.0) if one.tenant != "tenant-1"]
    assert prepared(alone, 3, 2.0)[1] == prepared(loud, 3, 2.0)[1]
    assert len(played(loud)) > len(played(whole))


def test_the_same_seed_makes_the_same_noise() -> None:
    what = trace(traffic(count=50))
    one, two, other = (list(mixed(what, Mix(loud="t1"), seed).arrivals()) for seed in (1, 1, 2))
    assert one == two != other


def test_unequal_tenants_ask_in_proportion_and_for_the_same() -> None:
    spec = "gen:unequal_tenants,tenants=3,ratio=3,rate=50,duration_s=60,ttft_slo_s=1.5"
    arrivals = list(generate(spec, 1).arrivals())
    counts = Counter(one.tenant for one in arrivals)
    assert len(arrivals) == pytest.approx(3_000, rel=0.1)
    assert counts["tenant-2"] / counts["tenant-1"] == pytest.approx(3, rel=0.25)
    assert counts["tenant-3"] / counts["tenant-2"] == pytest.approx(3, rel=0.2)
    assert {(one.prompt_tokens, one.output_tokens, one.ttft_slo_s) for one in arrivals} == {(512, 128, 1.5)}


def test_critical_bursts_end_each_period_above_an_even_load() -> None:
    spec = "gen:critical_bursts,rate=30,sheddable_rate=10,period_s=10,burst_s=2,duration_s=50"
    arrivals = list(generate(spec, 1).arrivals())
    assert [one.at_s for one in arrivals] == sorted(one.at_s for one in arrivals)
    critical = [one for one in arrivals if one.band == "critical"]
    assert len(critical) == pytest.approx(300, rel=0.2)
    assert all(one.at_s % 10 >= 8 for one in critical)
    sheddable = [one for one in arrivals if one.band == "sheddable"]
    assert len(sheddable) == pytest.approx(500, rel=0.2)
    assert len(critical) + len(sheddable) == len(arrivals)
    assert {one.prompt_tokens for one in sheddable} == {4_096}


@pytest.mark.parametrize(
    ("begins", "counts"),
    [
        ("critical_from_s=4,flood_from_s=0", {"first": 10, "after": 30}),
        ("critical_from_s=0,flood_from_s=4", {"before": 8, "first": 10, "after": 30}),
    ],
)
def test_critical_requests_come_evenly_beside_the_flood(begins: str, counts: Mapping[str, int]) -> None:
    spec = f"gen:critical_and_flood,{begins},every_s=0.5,flood=50,both_s=20,first_s=5,flood_output_tokens=100"
    arrivals = list(generate(spec, 1).arrivals())
    assert [one.at_s for one in arrivals] == sorted(one.at_s for one in arrivals)
    critical = [one for one in arrivals if one.band == "critical"]
    assert {later.at_s - one.at_s for one, later in pairwise(critical)} == {0.5}
    assert Counter(one.tenant for one in critical) == counts
    assert {one.at_s for one in critical if one.tenant == "first"} == {4.0 + 0.5 * i for i in range(10)}
    flood = [one for one in arrivals if one.band == "sheddable"]
    assert len(flood) == 50
    assert len(critical) + len(flood) == len(arrivals)
    assert len({one.at_s for one in flood}) == 1
    assert all(50 <= one.output_tokens <= 150 for one in flood)


def test_what_is_left_out_is_never_held() -> None:
    """A trace without end is read as far as it is asked for."""

    def endless() -> Iterator[Arrival]:
        number = 0
        while True:
            yield Arrival(float(number), 10, 10, tenant="ab"[number % 2])
            number += 1

    some = mixed(Trace("endless", endless), Mix(loud="a", without="b"), 1).arrivals()
    assert {next(some).tenant for _ in range(1_000)} == {"a"}
