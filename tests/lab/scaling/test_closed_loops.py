"""Clients that wait for each answer send more as soon as there are more replicas. The number must come to rest."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from llmproxy.config import Config
from llmproxy.lab.fleet.fleet_file import fleet_named
from llmproxy.lab.fleet.spec import Autoscale
from llmproxy.lab.run.replay import Run, Setup
from llmproxy.lab.run.virtual_time import run
from llmproxy.lab.scaling.signals import Look
from llmproxy.lab.traces.arrival import Arrival
from tests.lab.small import setup

pytestmark = pytest.mark.slow

CLIENTS, TURNS, THINK_S = 60, 40, 2.0
MOST = 8


def loop(rng: Random) -> Arrival:
    """A client that sends a request two seconds after each answer."""
    turn: Arrival | None = None
    for _ in range(TURNS):
        prompt, output = rng.randint(2_700, 5_300), rng.randint(200, 400)
        turn = Arrival(rng.random() * 30.0, prompt, output, think_s=THINK_S, then=turn)
    assert turn is not None
    return turn


class Looked(Run):
    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.looks: list[Look] = []

    def looked(self, look: Look, _: int) -> None:
        self.looks.append(look)


def test_clients_that_wait_for_each_answer_bring_the_number_to_rest_below_the_most() -> None:
    rng = Random(1)
    came = sorted((loop(rng) for _ in range(CLIENTS)), key=lambda one: one.at_s)
    scaling = {"start_s": 60.0, "target_tpot_s": 0.1, "min": 1, "max": MOST}
    config = Config.model_validate({"backends": [{"url": "http://a:1"}], "scaling": scaling})
    fleet = replace(fleet_named(f"{MOST}xqwen-32b-h100-tp2"), autoscale=Autoscale("ours", 1, 60.0))
    one = Looked(replace(setup(came, "cost", fleet, config), duration_s=400.0))
    result = run(one.go()).result("ours", 1, 1.0, 1.0)
    assert (result.refused, result.failed) == (0, 0)
    needs = [look.need.need for look in one.looks if look.need is not None and look.need.sure and look.now < 420.0]
    # It rises while replicas start and clients are served sooner, and rests from then on.
    rest = needs[-6:]
    assert max(rest) - min(rest) < 0.3
    assert 1.5 < max(rest) < MOST / 2
