"""Aliases with several weighted targets, and the alias `*` for all other names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmproxy.core.backends.catalogue import Aliases, Catalogue, Target
from llmproxy.core.domain import Outcome
from tests.core.make import listing, refusal

CANARY: Aliases = {"chat": {"old": 9, "new": 1}}
KEYS = [f"request-{number}" for number in range(4_000)]


def catalogue(aliases: Aliases, *served: str) -> Catalogue:
    """Adds a backend `on-<model>` for each model."""
    made = Catalogue([f"on-{name}" for name in served], aliases)
    for name in served:
        made.listed(f"on-{name}", listing(base=name))
    return made


def drawn(names: Catalogue, name: str = "chat", keys: list[str] = KEYS) -> Counter[str]:
    return Counter(names.resolve(name, key).model for key in keys)


def test_a_shared_alias_is_divided_by_weight() -> None:
    names = catalogue(CANARY, "old", "new")
    found = drawn(names)
    assert found["old"] + found["new"] == len(KEYS)
    assert found["new"] == pytest.approx(400, abs=60), "three standard deviations"
    assert drawn(names, "chat", ["one"] * 50).total() == 50
    assert len(drawn(names, "chat", ["one"] * 50)) == 1, "the same key gets the same one"
    assert names.resolve("chat", "one").requested == "chat"


@given(weights=st.dictionaries(st.sampled_from("abcde"), st.floats(1e-6, 1e6), min_size=1), key=st.text())
def test_any_weights_and_any_key_give_one_of_the_names(weights: Mapping[str, float], key: str) -> None:
    names = catalogue({"chat": weights}, *"abcde")
    assert names.resolve("chat", key) == names.resolve("chat", key)
    assert names.resolve("chat", key).model in weights


def test_a_changed_weight_moves_no_more_requests_than_it_must() -> None:
    before, after = catalogue(CANARY, "old", "new"), catalogue({"chat": {"old": 8, "new": 2}}, "old", "new")
    moved = [key for key in KEYS if before.resolve("chat", key).model != after.resolve("chat", key).model]
    assert len(moved) == pytest.approx(400, abs=60)
    assert {after.resolve("chat", key).model for key in moved} == {"new"}


def test_unserved_names_of_a_shared_alias_get_nothing() -> None:
    assert drawn(catalogue(CANARY, "old")) == {"old": len(KEYS)}
    refused = refusal(catalogue(CANARY, "other").resolve, "chat")
    assert refused.outcome is Outcome.UNKNOWN_MODEL
    assert "no backend serves" in refused.message


def test_a_name_that_will_be_served_again_keeps_its_share() -> None:
    names = catalogue(CANARY, "old")
    mine = next(key for key in KEYS if catalogue(CANARY, "old", "new").resolve("chat", key).model == "new")
    for names.named, names.promised in ((frozenset({"new"}), frozenset[str]()), (frozenset(), frozenset({"new"}))):
        assert names.resolve_alias("chat", mine) == "new"
        assert refusal(names.resolve, "chat", mine).outcome is Outcome.REJECTED_NO_BACKENDS


@pytest.mark.parametrize(("alias", "name"), [("old", "old"), ("*", "made-up"), ("*", "\ud800")])
def test_any_name_may_be_a_shared_alias(alias: str, name: str) -> None:
    names = catalogue({alias: {"old": 9, "new": 1}}, "old", "new")
    assert drawn(names, name)["new"] == pytest.approx(400, abs=60)
    assert [entry["id"] for entry in names.models()] == ["new", "old"]


def test_an_alias_is_followed_once() -> None:
    names = catalogue({"a": "b", "b": "c", "x": {"b": 1, "c": 1}}, "b", "c")
    assert names.resolve("a").model == "b"
    assert names.resolve("b").model == "c"
    assert drawn(names, "x").keys() == {"b", "c"}


def test_a_conversation_stays_with_the_model_of_its_backend() -> None:
    names = catalogue(CANARY, "old", "new", "third")
    for backend, models in (("on-new", {"new"}), ("on-third", {"old", "new"}), ("gone", {"old", "new"})):
        assert {names.resolve("chat", key, backend).model for key in KEYS[:200]} == models


def test_the_alias_of_all_other_names() -> None:
    names = catalogue({"*": "old", "chat": "new", "new": "new"}, "old", "new", "third")
    assert names.resolve("chat") == Target("chat", "new", "new", None, 4096)
    assert names.resolve("new").model == "new"
    assert names.resolve("third") == Target("third", "old", "old", None, 4096)
    assert names.resolve("made-up") == Target("old", "old", "old", None, 4096), "nobody configured this name"
    assert "made-up" not in names.targets
    assert [entry["id"] for entry in names.models()] == ["new", "old", "third", "chat"]


def test_a_shared_alias_is_among_the_known_names() -> None:
    names = catalogue({**CANARY, "nowhere": {"gone": 1}}, "old")
    assert "Known models: chat, old" in refusal(names.resolve, "what").message
