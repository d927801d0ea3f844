"""KEDA's metrics-api trigger and the HPA behind it, read from their sources, follow `/scale` as its number says.

The trigger looks up `valueLocation` in the bytes by GJSON's rule (dots separate keys), takes a number, and hands on
thousandths, cut off. The HPA divides by the target and rounds up.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from random import Random

import pytest
import yaml
from msgspec import structs

from llmproxy.config import Config
from llmproxy.core.scaling.need import Need, RoleNeed
from llmproxy.gateway.admin.debug import page_response
from llmproxy.gateway.admin.scale import shown
from llmproxy.lab.fleet.fleet_file import fleet_named
from llmproxy.lab.fleet.spec import Autoscale
from llmproxy.lab.run.replay import Run, Setup
from llmproxy.lab.run.virtual_time import run
from llmproxy.lab.scaling.hpa import FOLLOWING
from llmproxy.lab.scaling.signals import Look
from llmproxy.lab.traces.arrival import Arrival
from tests import ROOT
from tests.lab.small import setup

pytestmark = pytest.mark.slow

MOST = 8


def milli_of(body: bytes, location: str) -> int:
    """Returns the value that the trigger reads, in thousandths. Raises ValueError for an error of the trigger."""
    value = json.loads(body)
    for key in location.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"valueLocation must point to a number, got {value!r}")
    return int(value * 1_000)


def replicas_of(milli: int, target_milli: int, least: int, most: int) -> int:
    """The HPA's rule for an external metric with an average value, its tolerance being 0."""
    return max(least, min(most, ceil(milli / target_milli)))


def body_of(need: Need, name: str = "sim") -> bytes:
    body = page_response(shown(name, need, {"up": need.up}, named=False)).body
    assert isinstance(body, bytes)
    return body


class Recorded(Run):
    """A run that keeps every look of the autoscaler."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.looks: list[tuple[Look, int]] = []

    def looked(self, look: Look, wanted: int) -> None:
        self.looks.append((look, wanted))


@pytest.fixture(scope="module")
def hour() -> Sequence[tuple[Look, int]]:
    """An hour of a rate that rises and falls, on 2 to 8 replicas that start in 60 s."""
    rng, at_s, came = Random(3), 0.0, list[Arrival]()
    while (at_s := at_s + rng.expovariate(1.4)) < 3_600.0:
        if rng.random() < 1.0 - abs(at_s - 1_800.0) / 1_900.0:
            came.append(Arrival(at_s, rng.randint(30_000, 50_000), rng.randint(100, 300)))
    config = Config.model_validate(
        {"backends": [{"url": "http://a:1"}], "scaling": {"start_s": 60.0, "target_tpot_s": 0.1, "min": 2, "max": MOST}}
    )
    fleet = replace(fleet_named(f"{MOST}xqwen-32b-h100-tp2"), autoscale=Autoscale("ours", 2, 60.0))
    one = Recorded(setup(came, "cost", fleet, config))
    run(one.go())
    return one.looks


def test_keda_and_the_hpa_come_to_the_number_of_the_answer_over_an_hour(hour: Sequence[tuple[Look, int]]) -> None:
    assert len(hour) > 200
    found = []
    for look, _ in hour:
        need = look.need
        assert need is not None
        milli = milli_of(body_of(need), "need")
        assert milli == pytest.approx(need.need * 1_000, abs=1.0)
        found.append(replicas_of(milli, 1_000, 2, MOST))
        assert found[-1] == need.desired
    # The hour asked for more and for fewer.
    assert min(found) == 2
    assert max(found) >= 5


def test_what_is_followed_is_never_below_it_for_longer_than_a_look_and_comes_down(
    hour: Sequence[tuple[Look, int]],
) -> None:
    followed = [wanted for _, wanted in hour]
    asked = [look.need.desired for look, _ in hour if look.need is not None]
    assert all(have >= need for have, need in zip(followed, asked, strict=True))
    assert max(followed) == max(asked)
    assert followed[-1] < max(followed)


def test_the_manifest_reads_what_is_there(hour: Sequence[tuple[Look, int]]) -> None:
    _, scaled = yaml.safe_load_all((ROOT / "deploy/kustomize/overlays/autoscale/keda.yaml").read_text())
    metadata = scaled["spec"]["triggers"][0]["metadata"]
    assert (metadata["valueLocation"], metadata["targetValue"]) == ("need", "1")
    behaviour = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert float(behaviour["scaleUp"]["tolerance"]) == FOLLOWING.tolerance
    need = hour[len(hour) // 2][0].need
    assert need is not None
    body = body_of(structs.replace(need, roles={"prefill": RoleNeed(2, 1.5, 1)}))
    assert milli_of(body, "roles.prefill.need") == 1_500
    assert milli_of(body, "terms.work") == int(round(need.terms["work"], 3) * 1_000)
    with pytest.raises(ValueError, match="must point to a number"):
        milli_of(body, "reason.text")
