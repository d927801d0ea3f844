"""Routers with disaggregated prefill and decode: the split requests, and the replicas of both stages."""

from __future__ import annotations

import pytest
from msgspec import structs

from llmproxy.core.domain import Placed, Role, Stage, Verdict
from llmproxy.core.placement.staged import as_decode, as_prefill
from tests.core.make import view
from tests.lab.baselines.baseline_world import BLOCK, World

VIEWS = [view("p", role=Role.PREFILL), view("d", role=Role.DECODE), view("e", role=Role.DECODE)]
PAIRED = ("vllm_router_pd", "llmd_pd", "dynamo_pd")


def split(world: World, tokens: int) -> Placed:
    asked = structs.replace(world.ask(*range(tokens // BLOCK), tokens=tokens), splittable=True)
    world.policy.begin(VIEWS)  # type: ignore[attr-defined]
    placed = world.placed(asked, VIEWS)
    world.policy.booked(1, as_prefill(asked) if placed.answers_on else asked, placed, world.now)
    if placed.answers_on:
        world.policy.finished(1, Verdict.SERVED, None, world.now)
        answer = world.placed(as_decode(asked), VIEWS)
        assert answer.backend == placed.answers_on
        world.policy.booked(2, as_decode(asked), answer, world.now)
        world.policy.finished(2, Verdict.SERVED, None, world.now)
    return placed


@pytest.mark.parametrize("name", PAIRED)
def test_a_long_prompt_goes_to_one_pool_and_its_answer_to_the_other(name: str) -> None:
    placed = split(World(name), 8 * BLOCK)
    assert placed.backend == "p"
    assert placed.answers_on in ("d", "e")


@pytest.mark.parametrize("name", PAIRED)
def test_what_cannot_be_split_goes_where_answers_go(name: str) -> None:
    world = World(name)
    asked = world.ask(*range(8))
    world.policy.begin(VIEWS)  # type: ignore[attr-defined]
    assert world.placed(asked, VIEWS).backend in ("d", "e")


@pytest.mark.parametrize(("name", "splits"), [("vllm_router_pd", True), ("llmd_pd", False), ("dynamo_pd", True)])
def test_a_short_prompt_is_split_by_those_that_always_do_and_by_its_share(name: str, splits: bool) -> None:
    assert (split(World(name), 200).answers_on is not None) == splits


@pytest.mark.parametrize(("cached", "splits"), [(0, True), (3_400, True), (3_700, False)])
def test_dynamo_asks_for_tokens_and_for_a_share_that_are_not_cached(cached: int, splits: bool) -> None:
    world = World("dynamo_pd(uncached=600,share=0.2)")
    world.cached = {"d": cached, "e": cached}
    assert (split(world, 8 * BLOCK).answers_on is not None) == splits


def test_a_prompt_that_the_decode_replica_has_stays_there() -> None:
    world = World("llmd_pd")
    first = split(world, 8 * BLOCK)
    asked = structs.replace(world.ask(*range(8)), splittable=True)
    placed = world.placed(asked, VIEWS)
    assert (placed.backend, placed.answers_on) == (first.answers_on, None)


@pytest.mark.parametrize("name", PAIRED)
def test_where_the_decode_replica_is_gone_another_one_is_taken(name: str) -> None:
    world = World(name)
    asked = structs.replace(world.ask(*range(8)), splittable=True)
    world.policy.begin(VIEWS)  # type: ignore[attr-defined]
    placed = world.placed(asked, VIEWS)
    left = [structs.replace(one, available=one.backend != placed.answers_on) for one in VIEWS]
    answer = world.placed(as_decode(asked), left)
    assert answer.backend in {"d", "e"} - {placed.answers_on}
    assert asked.stage is Stage.WHOLE
