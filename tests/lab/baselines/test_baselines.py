from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from msgspec.structs import replace

from llmproxy.core.backends.view import View
from llmproxy.core.domain import Grant, NoCapacity, NoMatch, Placed, Verdict
from llmproxy.core.lease_events import Returned, Started
from llmproxy.core.pools import Pools
from llmproxy.lab.baselines import baseline_named
from llmproxy.lab.baselines.policy import baselines
from tests.core.make import DEFAULTS, listing, reading, view
from tests.lab.baselines.baseline_world import NAMES, World, views
from tests.lab.small import printed_with_hash_seeds

GATED = ("epp_blend", "epp_sticky(gate=1)")


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def seen(*given: View) -> list[View]:
    """Views with a reading of this moment, which the gated policies insist on."""
    return [replace(one, reading=reading(100.0)) for one in given]


# --- what holds for all -----------------------------------------------------------------------------------------------


def test_the_names_are_fixed() -> None:
    assert set(baselines.names()) == set(NAMES)
    assert [baseline_named(name).name for name in NAMES] == list(NAMES)
    assert [name for name in NAMES if baseline_named(name).scrape_s is not None] == [
        "epp_blend",
        "epp_sticky",
        "llmd_pd",
    ]
    assert {baseline_named(name).scrape_s for name in GATED} == {0.05}


def test_only_those_up_that_serve_the_model_are_chosen_however_full(name: str) -> None:
    world = World(name)
    fleet = seen(
        view("down", available=False),
        view("foreign", served=frozenset({"other"})),
        view("failed"),
        view("full", load=99, limit=1, kv_used=1.0),
    )
    for _ in range(10):
        placed = world.place(world.ask(1), fleet, excluded=frozenset({"failed"}))
        assert isinstance(placed, Placed)
        assert placed.backend == "full"


def test_no_capacity_differs_from_no_match(name: str) -> None:
    world = World(name)
    up, down = seen(view("up"), view("down", available=False, served=frozenset({"base", "lora"})))
    assert world.place(world.ask(1), [down]) == NoCapacity()
    assert world.place(world.ask(1, adapter="lora"), [up, down]) == NoMatch(whole_model=True)
    assert world.place(world.ask(1), [up], excluded=frozenset({"up"})) == NoMatch(whole_model=True)


def test_a_long_prompt_goes_where_it_fits_and_anywhere_when_nowhere(name: str) -> None:
    world = World(name)
    fleet = seen(view("short", max_model_len=1_000), view("long", max_model_len=2_000))
    asked = world.ask(tokens=1_900, max_tokens=100)
    assert {world.serve(asked, fleet) for _ in range(10)} == {"long"}
    assert isinstance(world.place(world.ask(tokens=1_900, max_tokens=101), fleet), Placed)


def test_nothing_stays_counted_when_all_leases_ended(name: str) -> None:
    world = World(name)
    fleet = seen(view("a", max_model_len=None), view("b", max_model_len=None))
    policy = world.policy
    leases = [world.send(world.ask(i // 3, 100 + i), fleet)[1] for i in range(30)]
    for lease in leases[::2]:
        policy.started(lease, world.now)
        policy.finished(lease, Verdict.SERVED, None, world.now)
    policy.lost("b")
    for lease in leases[1::2]:
        policy.finished(lease, Verdict.LOST, None, world.now)
    for counter in ("in_flight", "tokens_in_flight", "prefill_tokens", "active"):
        if hasattr(policy, counter):
            assert [getattr(policy, counter).amount(backend) for backend in "ab"] == [0, 0]


def test_one_seed_always_chooses_alike(name: str) -> None:
    def choices(seed: int) -> list[str]:
        world = World(name, seed)
        return [world.send(world.ask(i % 7, 50 + i, session=f"s{i}"), seen(*views(*"abcd")))[0] for i in range(60)]

    assert choices(1) == choices(1)


SCRIPT = """
from tests.lab.baselines.baseline_world import NAMES, World, views
from tests.lab.baselines.test_baselines import seen
for name in NAMES:
    world = World(name)
    print(name, *(world.send(world.ask(i % 5, 9 + i // 2, session=f"s{i}"), seen(*views("x", "y", "z", "w")))[0]
                  for i in range(40)))
"""


@pytest.mark.slow
def test_the_seed_of_string_hashes_decides_nothing() -> None:
    one, other = printed_with_hash_seeds(SCRIPT)
    assert one == other
    assert len(one.splitlines()) == len(NAMES)


# --- under the production scheduler -----------------------------------------------------------------------------------


def pools_under(world: World) -> Pools:
    made = Pools(dataclasses.replace(DEFAULTS, fairness="fcfs"), {"a": 1, "b": 1}, {}, lambda: world.policy)
    for backend in ("a", "b"):
        made.backends[backend].answered(world.now)
        made.listed(backend, listing(max_model_len=None))
        made.backends[backend].observe(reading(world.now))
    return made


def test_limits_of_the_proxy_hold_nobody_back(name: str) -> None:
    world = World(name)
    pools = pools_under(world)
    for i in range(40):
        pools.submit(world.ask(i), world.now)
    granted = pools.decide(world.now)
    assert len(granted) == 40
    pools.check(world.now)
    for grant in granted:
        assert isinstance(grant, Grant)
        pools.apply(Started(grant.lease), world.now)
        pools.apply(Returned(grant.lease, Verdict.SERVED), world.now)
    pools.check(world.now)


@pytest.mark.parametrize("name", GATED)
def test_a_closed_gate_opens_with_the_next_scrape(name: str) -> None:
    world = World(name)
    pools = pools_under(world)
    for backend in ("a", "b"):
        pools.backends[backend].observe(reading(world.now, waiting=5))
    for i in range(3):
        pools.submit(world.ask(i), world.now)
    assert pools.decide(world.now) == []
    world.now += 0.05
    pools.backends["a"].observe(reading(world.now, waiting=4))
    assert len(pools.decide(world.now)) == 3


# --- the plain ones ---------------------------------------------------------------------------------------------------


def test_random_takes_each_about_as_often() -> None:
    world = World("random")
    found = Counter(world.serve(world.ask(1), views(*"abcd")) for _ in range(4_000))
    assert all(900 <= found[name] <= 1_100 for name in "abcd"), found


def test_round_robin_goes_by_name() -> None:
    world = World("round_robin")
    assert "".join(world.send(world.ask(1), views("c", "a", "b"))[0] for _ in range(7)) == "abcabca"


def test_least_request_counts_what_it_sent_and_not_what_the_views_say() -> None:
    world = World("least_request")
    fleet = [view("a", load=50), view("b", load=0)]
    sent = Counter(world.send(world.ask(1), fleet)[0] for _ in range(10))
    assert sent == {"a": 5, "b": 5}
    assert {World("least_request", seed).send(world.ask(1), fleet)[0] for seed in range(9)} <= {"a", "b"}


def test_least_request_draws_between_equals() -> None:
    world = World("least_request")
    found = Counter(world.serve(world.ask(1), views(*"ab")) for _ in range(400))
    assert min(found.values()) > 150


def test_power_of_two_never_takes_the_fullest_of_three() -> None:
    world = World("power_of_two")
    for name, times in (("b", 1), ("c", 2)):
        for _ in range(times):
            world.send(world.ask(1), views(name))
    found = Counter(world.placed(world.ask(1), views(*"abc")).backend for _ in range(300))
    assert found["c"] == 0
    assert found["a"] > found["b"] > 0


# --- session ----------------------------------------------------------------------------------------------------------


def test_a_session_stays_and_only_those_of_a_lost_backend_move() -> None:
    world = World("session")
    eight = views(*(f"r{i}" for i in range(8)))

    def owners(fleet: list[View]) -> dict[str, str]:
        return {key: world.serve(world.ask(1, session=key), fleet) for key in (f"user-{i}" for i in range(800))}

    before, without = owners(eight), owners(eight[:3] + eight[4:])
    assert all(50 <= times <= 160 for times in Counter(before.values()).values())
    assert {key for key in before if before[key] != without[key]} == {key for key in before if before[key] == "r3"}
    assert "r3" not in without.values()
    assert owners(eight) == before


def test_without_a_session_the_lowest_rate_of_a_minute_wins() -> None:
    world = World("session")
    fleet = views(*"abc")
    for name, times in (("a", 3), ("b", 1), ("c", 2)):
        for _ in range(times):
            world.serve(world.ask(1), views(name))
    assert world.placed(world.ask(1), fleet).backend == "b"
    world.now += 30.0
    for _ in range(2):
        world.serve(world.ask(1), views("b"))
    assert world.placed(world.ask(1), fleet).backend == "c"
    world.now += 30.0
    placed = world.placed(world.ask(1), fleet)
    assert (placed.backend, placed.score) == ("a", 0.0)


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_name_carries_parameters_and_is_spelled_in_one_way() -> None:
    assert baseline_named("epp_sticky( penalty_s = 2, match=0.50 )").name == "epp_sticky(match=0.5,penalty_s=2)"
    assert baseline_named("epp_sticky(match=0.8)").name == "epp_sticky"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("epp_stiky", r"unknown baseline 'epp_stiky'; known: "),
        ("epp_sticky(mach=1)", r"unknown parameter of epp_sticky: 'mach' \(nearest: 'match'"),
        ("random(seed=1)", r"unknown parameter of random: 'seed'; it has none"),
        ("epp_sticky(match=0.5", r"parameters are written like"),
        ("epp_sticky(match)", r"parameters are written like"),
        ("epp_sticky(match=x)", r"found 'match=x'"),
        ("epp_sticky(match=nan)", r"found 'match=nan'"),
        ("epp_sticky(match=inf)", r"found 'match=inf'"),
        ("epp_sticky(match=-1)", r"found 'match=-1'"),
        ("epp_sticky(match=1,match=1)", r"match is given twice"),
    ],
)
def test_a_wrong_name_is_answered_with_what_was_meant(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        baseline_named(text)
