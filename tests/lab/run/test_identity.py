"""The identity of an arrival: flow, weight, objective, limits and longest wait, as a gateway would read them."""

from __future__ import annotations

from typing import Any

import pytest

from llmproxy.config import Config, hash_of
from llmproxy.core.backends.catalogue import Target
from llmproxy.core.domain import Slo
from llmproxy.lab.run.identity import IdentityReader
from llmproxy.lab.traces.arrival import Arrival

TARGET = Target("base", "base", "base", None)


def tenant(name: str, **given: Any) -> dict[str, Any]:
    return {"name": name, "keys": [hash_of(name)], **given}


def identity_reader(**sections: Any) -> IdentityReader:
    return IdentityReader(Config.model_validate(sections))


@pytest.mark.parametrize(
    ("flow", "expected"),
    [("model", "base"), ("tenant", "acme"), ("tenant+model", "acme+base"), ("header:x-tenant", "acme")],
)
def test_the_flow_is_what_the_configuration_says(flow: str, expected: str) -> None:
    found = identity_reader(scheduling={"flow": flow}).identity(Arrival(0.0, 1, 1, tenant="acme"), TARGET, 0)
    assert (found.flow, found.tenant) == (expected, "acme")


def test_the_weight_is_that_of_the_flow_else_of_the_tenant() -> None:
    reader = identity_reader(
        scheduling={"flow": "tenant", "weights": {"b": 5.0}}, tenants=[tenant("a", weight=3.0), tenant("b", weight=2.0)]
    )
    weights = [reader.identity(Arrival(0.0, 1, 1, tenant=name), TARGET, 0).weight for name in "abc"]
    assert weights == [3.0, 5.0, 1.0]


def test_objective_is_taken_part_by_part_in_order() -> None:
    reader = identity_reader(tenants=[tenant("a", ttft_s=2.0)], models=[{"name": "base", "ttft_s": 9.0, "tpot_s": 0.5}])
    assert reader.identity(Arrival(0.0, 1, 1, tenant="a"), TARGET, 0).slo == Slo(2.0, 0.5)
    assert reader.identity(Arrival(0.0, 1, 1, tenant="a", ttft_slo_s=1.0), TARGET, 0).slo == Slo(1.0, 0.5)
    assert reader.identity(Arrival(0.0, 1, 1, tpot_slo_s=0.1), TARGET, 0).slo == Slo(9.0, 0.1)
    assert identity_reader().identity(Arrival(0.0, 1, 1), TARGET, 0).slo is None


def test_arrival_can_only_shorten_the_ttl_of_its_band() -> None:
    reader = identity_reader(queue={"max_wait_s": 10.0, "band_max_wait_s": {"sheddable": 100.0}})
    asked = ((None, 0), (None, -100), (50.0, 0), (50.0, -100))
    arrivals = [(Arrival(0.0, 1, 1, max_wait_s=max_wait_s), band) for max_wait_s, band in asked]
    waits_s = [reader.identity(arrival, TARGET, band).max_wait_s for arrival, band in arrivals]
    assert waits_s == [10.0, 100.0, 10.0, 50.0]


def test_limits_are_configured_and_bands_capped_by_tenant() -> None:
    reader = identity_reader(
        tenants=[tenant("a", limits={"in_flight": 2}, band_max="default")],
        models=[{"name": "base", "limits": {"requests_per_min": 60}}, {"name": "other"}],
    )
    assert reader.identity(Arrival(0.0, 1, 1, tenant="a"), TARGET, 0).limits == ("tenant:a", "model:base")
    assert reader.identity(Arrival(0.0, 1, 1, tenant="b"), TARGET, 0).limits == ("model:base",)
    bands = [reader.band(Arrival(0.0, 1, 1, tenant=name, band="critical")) for name in "ab"]
    assert bands == [0, 100]
