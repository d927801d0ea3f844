"""Records of adapters, and the requests that backends get, from listings alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from llmproxy.core import adapters as module
from llmproxy.core.adapters import ADAPTERS_MAX, BACKOFF_MAX_S, AdapterPlan, Adapters, Reply, Report
from llmproxy.core.domain import Listing, ModelCard, Outcome, Refused
from llmproxy.core.pools import Pools
from tests.core.make import BASE, kill, pools, refusal

FLEET: dict[str, int | None] = {"a": None, "b": None, "c": None}


class World:
    """Backends of one pool (three by default) that accept every change, except those in `refusing`."""

    def __init__(self, fleet: Mapping[str, int | None] = FLEET, **given: Any) -> None:
        self.pools: Pools = pools(fleet, **given)
        self.adapters = Adapters(self.pools)
        self.refusing: dict[str, int | None] = {}
        self.now = 0.0

    def lists(self, backend: str, base: str = BASE, **roots: str) -> None:
        cards = [ModelCard(name, base, None, {"root": root}) for name, root in roots.items()]
        self.pools.listed(backend, Listing(self.now, (ModelCard(base, None, 4096), *cards)))

    def load(self, name: str = "x", replicas: int | None = None, path: str = "/x", **more: Any) -> Report:
        given: dict[str, Any] = {"model": None, "in_place": False} | more
        return self.ends(self.adapters.load(name, path, {}, replicas=replicas, **given))

    def unload(self, name: str = "x", replicas: int | None = None) -> Report:
        return self.ends(self.adapters.unload(name, {}, None, replicas))

    def ends(self, plan: AdapterPlan) -> Report:
        replies = [Reply(b, self.refusing.get(b, 200), b not in self.refusing, "") for b in plan.backends]
        for reply in replies:
            if reply.taken:
                roots = {card.name: card.fields["root"] for card in self.cards(reply.backend)}
                roots.pop(plan.change.name, None)
                if plan.change.path is not None:
                    roots[plan.change.name] = plan.change.path
                self.lists(reply.backend, plan.change.pool, **roots)
        return self.adapters.end(plan, tuple(replies), self.now)

    def cards(self, backend: str) -> list[ModelCard]:
        listing = self.pools.backends[backend].listing
        return [card for card in listing.cards if card.parent is not None] if listing is not None else []

    def asked(self, report: Report) -> list[str]:
        return [reply.backend for reply in report.replies]

    def due(self, backend: str) -> list[tuple[str, str]]:
        return [(change.kind, change.name) for change in self.adapters.due(backend, self.now)]

    def answers(self, backend: str, status: int) -> None:
        (change,) = self.adapters.due(backend, self.now)
        self.adapters.replied(change, Reply(backend, status, status == 200, ""), self.now)

    def refusal(self, name: str = "x", **more: Any) -> Refused:
        return refusal(self.load, name, **more)

    @property
    def standings(self) -> list[tuple[str, bool, int]]:
        """Returns (backend, done, failures) of the only adapter."""
        (state,) = self.adapters.states()[0]
        return [(one.backend, one.done, one.failures) for one in state.standings]

    @property
    def remembered(self) -> dict[str, str | None]:
        return {state.name: state.path for state in self.adapters.states()[0]}


@pytest.fixture
def world() -> World:
    return World()


# --- chosen backends --------------------------------------------------------------------------------------------------


def test_all_of_the_pool_are_asked_and_so_is_who_joins_it_later() -> None:
    world = World({**FLEET, "late": None}, listings={"late": Listing(0.0, ())})
    assert world.asked(world.load()) == ["a", "b", "c"]
    assert world.due("a") == []
    world.lists("late")
    assert world.due("late") == [("load", "x")]
    world.lists("late", base="other")
    assert world.due("late") == []


def test_some_replicas_are_the_available_ones_with_the_fewest_adapters(world: World) -> None:
    world.lists("a", one="/1", two="/2")
    world.lists("b", one="/1")
    assert world.asked(world.load("x", 1)) == ["c"]
    assert world.asked(world.load("y", 2)) == ["b", "c"]
    kill(world.pools, "c")
    assert world.asked(world.load("z", 2)) == ["a", "b"]
    assert world.asked(world.load("v", 3)) == ["a", "b", "c"], "a backend that is down rather than too few backends"
    assert world.due("c") == []
    assert "`replicas` is 4, and 3 backends" in world.refusal("w", replicas=4).message


def test_change_under_way_counts_as_an_adapter(world: World) -> None:
    plans = [world.adapters.load(name, "/x", {}, None, 1, False) for name in ("x", "y", "z")]
    assert [plan.backends for plan in plans] == [("a",), ("b",), ("c",)]
    assert world.adapters.is_changing("x")
    world.adapters.abandon(plans[0])
    assert not world.adapters.is_changing("x")
    assert world.remembered == {}


def test_backend_with_the_adapter_is_chosen_first(world: World) -> None:
    world.lists("b", one="/1", x="/x")
    assert world.asked(world.load(replicas=1)) == ["b"]
    assert world.asked(world.load(replicas=2)) == ["a", "b"]
    assert world.asked(world.load(replicas=1)) == ["a", "b"], "all backends with the adapter get the request"
    assert world.asked(world.load()) == ["a", "b", "c"]


def test_a_replacement_goes_to_all_that_have_it(world: World) -> None:
    world.load(replicas=2)
    refused = world.refusal(path="/new")
    assert (refused.outcome, "from another path" in refused.message) == (Outcome.BAD_REQUEST, True)
    assert world.asked(world.load(path="/new", replicas=1, in_place=True)) == ["a", "b"]
    assert world.remembered == {"x": "/new"}


def test_unloading_some_takes_the_fullest(world: World) -> None:
    world.load()
    world.lists("b", x="/x", y="/y")
    assert world.asked(world.unload(replicas=1)) == ["b"]
    assert world.due("b") == []
    assert world.asked(world.unload()) == ["a", "c"]
    assert world.remembered == {}


def test_adapter_loaded_by_hand_can_be_unloaded(world: World) -> None:
    world.lists("b", x="/x")
    assert world.asked(world.unload()) == ["b"]
    caught = refusal(world.unload)
    assert "cannot be found" in caught.message
    assert caught.outcome is Outcome.UNKNOWN_MODEL


# --- repeated requests ------------------------------------------------------------------------------------------------


def test_returning_backend_without_the_adapter_is_asked_again(world: World) -> None:
    world.load("x")
    world.load("y", 1)
    for backend in FLEET:
        world.lists(backend)
    assert world.due("a") == [("load", "x"), ("load", "y")]
    assert world.due("b") == [("load", "x")]
    world.lists("b", x="/elsewhere")
    assert world.due("b") == [("load", "x")], "the path differs"
    world.lists("b", x="/x")
    assert world.due("b") == []


def test_a_listing_without_paths_is_believed(world: World) -> None:
    world.load()
    world.pools.listed("a", Listing(1.0, (ModelCard(BASE, None, 4096), ModelCard("x", BASE, None))))
    assert world.due("a") == []


def test_a_replacement_is_due_until_it_was_taken(world: World) -> None:
    world.load()
    world.refusing = {"b": None}
    world.load(in_place=True)
    world.now = 1.0
    assert (world.due("a"), world.due("b")) == ([], [("load", "x")]), "a listing does not show whether weights are new"
    world.answers("b", 200)
    assert world.due("b") == []
    world.lists("b")
    assert world.due("b") == [("load", "x")]


def test_unloaded_adapter_is_not_loaded_again(world: World) -> None:
    world.load()
    world.unload()
    world.lists("a")
    assert world.due("a") == []


def test_backend_that_missed_an_unload_is_asked_when_it_returns(world: World) -> None:
    world.load()
    world.refusing = {"b": None, "c": None}
    assert world.unload().remembered
    world.now = 1.0
    assert world.due("b") == [("unload", "x")]
    assert world.remembered == {"x": None}
    world.lists("b")
    assert world.due("b") == [], "a fresh process has nothing to unload"
    world.answers("c", 200)
    assert world.remembered == {}
    world.lists("c", x="/x")
    assert world.due("c") == [], "an operator loaded it by hand later"


def test_retries_come_ever_more_slowly_and_start_anew_with_a_change(world: World) -> None:
    world.refusing = {"b": 500}
    world.load()
    pauses, since = [], world.now
    for _ in range(9):
        while not world.due("b"):
            world.now += 0.5
        pauses.append(world.now - since)
        since = world.now
        world.answers("b", 500)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, BACKOFF_MAX_S, BACKOFF_MAX_S, BACKOFF_MAX_S]
    assert world.standings == [("a", True, 0), ("b", False, 10), ("c", True, 0)]
    world.load()
    world.now += 1.0
    assert world.due("b")
    world.refusing = {}
    world.load()
    assert world.standings == [(backend, True, 0) for backend in "abc"]


def test_no_backend_is_asked_again_during_a_change(world: World) -> None:
    world.load()
    world.lists("a")
    plan = world.adapters.load("x", "/new", {}, None, None, True)
    assert world.due("a") == []
    world.ends(plan)
    world.lists("a")
    (change,) = world.adapters.due("a", 0.0)
    assert change.path == "/new"


def test_result_of_an_overtaken_change_is_ignored(world: World) -> None:
    world.load()
    world.lists("a")
    (old,) = world.adapters.due("a", 0.0)
    world.load(path="/new", in_place=True)
    world.lists("a", x="/new")
    world.adapters.replied(old, Reply("a", 500, False, ""), 0.0)
    assert [failures for _, _, failures in world.standings] == [0, 0, 0]


def test_a_backend_that_went_to_another_model_is_left_alone(world: World) -> None:
    world.load("x", 1)
    world.lists("a", base="other")
    assert world.due("a") == []
    assert world.asked(world.unload()) == []
    assert world.remembered == {}


# --- records ----------------------------------------------------------------------------------------------------------


def test_adapter_that_all_backends_refuse_is_not_remembered(world: World) -> None:
    world.refusing = dict.fromkeys("abc", 404)
    assert not world.load().remembered
    assert world.remembered == {}
    world.refusing = {"a": 404, "b": None, "c": 404}
    assert not world.load().remembered
    world.refusing = dict.fromkeys("abc", None)
    assert world.load().remembered, "no backend has refused"
    world.refusing = {"a": 404}
    assert world.load().remembered


def test_replacement_that_all_backends_refuse_changes_nothing(world: World) -> None:
    world.load()
    world.refusing = dict.fromkeys("abc", 404)
    assert not world.load(path="/typo", in_place=True).remembered
    assert world.remembered == {"x": "/x"}
    world.lists("a")
    assert [change.path for change in world.adapters.due("a", 0.0)] == ["/x"]
    assert not world.unload().remembered
    assert world.remembered == {"x": "/x"}


def test_memory_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ADAPTERS_MAX == 1024
    monkeypatch.setattr(module, "ADAPTERS_MAX", 3)
    for name in "xyz":
        world.load(name)
    assert "unload one first" in world.refusal("w").message
    world.load("x")
    world.refusing = {"c": None}
    world.unload("y")
    assert world.remembered == {"x": "/x", "y": None, "z": "/x"}
    world.load("w")
    assert list(world.remembered) == ["w", "x", "z"], "an unloading that is still to be done gives way"


def test_nothing_is_said_to_be_done_on_a_backend_that_is_down(world: World) -> None:
    world.load()
    kill(world.pools, "b")
    assert world.standings == [("a", True, 0), ("b", False, 0), ("c", True, 0)]


def test_shown_adapters_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHOWN_MAX", 7)
    for name in "xyz":
        world.load(name)
    states, more = world.adapters.states()
    assert ([state.name for state in states], more) == (["x", "y"], 1)


# --- names ------------------------------------------------------------------------------------------------------------


def two_pools(**given: Any) -> World:
    world = World({"a": None, "b": None}, **given)
    world.lists("b", base="other")
    return world


def test_with_two_models_the_model_is_named_once() -> None:
    world = two_pools()
    assert "set `model`" in world.refusal().message
    assert world.refusal(model="nope").outcome is Outcome.UNKNOWN_MODEL
    assert world.asked(world.load(model="other")) == ["b"]
    assert world.asked(world.load()) == ["b"], "the adapter is known by now"
    assert "adapter of `other` already" in world.refusal(model=BASE).message
    assert world.refusal(model="x").outcome is Outcome.UNKNOWN_MODEL, "an adapter is no base model"
    world.lists("a", y="/y")
    assert "adapter of `base` already" in world.refusal("y", model="other").message
    assert world.asked(world.unload("x")) == ["b"]


def test_unloading_an_adapter_of_another_model_changes_nothing_here() -> None:
    world = two_pools()
    world.load(model="other")
    world.lists("a", x="/x")
    report = world.ends(world.adapters.unload("x", {}, BASE, None))
    assert (world.asked(report), report.remembered, world.remembered) == (["a"], False, {"x": "/x"})
    world.lists("b", base="other")
    assert world.due("b") == [("load", "x")]


def test_nothing_is_loaded_where_nobody_is_left() -> None:
    world = two_pools()
    world.load(model="other")
    world.lists("b")
    assert world.refusal().outcome is Outcome.REJECTED_NO_BACKENDS


def test_an_adapter_has_no_name_that_means_something_else() -> None:
    world = two_pools(aliases={"fast": BASE, "future": "x"})
    assert "is an alias" in world.refusal("fast", model=BASE).message
    assert "is an alias" in world.refusal("future", model=BASE).message
    assert "conflicts with a served base model" in world.refusal("other", model=BASE).message
    assert world.asked(world.load(model="fast")) == ["a"], "an alias of a base model names it as well"


def test_adapter_names_go_before_the_alias_of_all_other_names() -> None:
    world = two_pools(aliases={"*": "other", "x": "x"})
    assert world.asked(world.load("x", model=BASE)) == ["a"], "a name mapped to itself is no alias"
    assert world.asked(world.load("y", model=BASE)) == ["a"]
    world.lists("a", z="/z")
    assert "the name of an adapter of `base` already" in world.refusal("z", model="other").message


def test_nothing_can_be_loaded_before_a_backend_was_read() -> None:
    world = World(listings=dict.fromkeys(FLEET, Listing(0.0, ())))
    assert world.refusal().outcome is Outcome.REJECTED_NO_BACKENDS


def test_a_name_that_will_be_served_again_is_not_unknown() -> None:
    world = World({"a": None}, aliases={"nick": "x"})
    world.load()
    world.lists("a")
    for name in ("x", "nick"):
        caught = refusal(world.pools.catalogue.resolve, name)
        assert (caught.outcome, caught.retry_after_s) == (Outcome.REJECTED_NO_BACKENDS, 1.0)
    world.unload()
    assert refusal(world.pools.catalogue.resolve, "x").outcome is Outcome.UNKNOWN_MODEL


def test_an_adapter_stays_with_its_replicas_when_their_base_model_gets_another_name() -> None:
    world = World()
    world.load()
    world.load("y")
    cards = (ModelCard("new", None, None), ModelCard(BASE, None, None), ModelCard("x", "new", None, {"root": "/x"}))
    for backend in FLEET:
        world.pools.listed(backend, Listing(1.0, cards))
    assert world.pools.catalogue.pools == ("new",)
    assert world.due("a") == [("load", "y")]
    world.pools.listed("a", Listing(2.0, cards[:1]))
    assert sorted(world.due("a")) == [("load", "x"), ("load", "y")]
    assert {state.pool for state in world.adapters.states()[0]} == {"new"}
