"""Aliases with several weighted targets, and the alias `*` for all other names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmproxy.core.backends.catalogue import Aliases, Catalogue, Target
from llmproxy.core.domain import Outcome, Refused
from tests.core.make import listing

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


def test_what_nobody_serves_gets_nothing() -> None:
    assert drawn(catalogue(CANARY, "old")) == {"old": len(KEYS)}
    names = catalogue(CANARY, "other")
    with pytest.raises(Refused) as caught:
        names.resolve("chat")
    assert caught.value.outcome is Outcome.UNKNOWN_MODEL
    assert "`chat` stands for `" in caught.value.message


def test_what_will_be_served_again_keeps_its_share() -> None:
    names = catalogue(CANARY, "old")
    mine = next(key for key in KEYS if catalogue(CANARY, "old", "new").resolve("chat", key).model == "new")
    for names.named, names.promised in ((frozenset({"new"}), frozenset[str]()), (frozenset(), frozenset({"new"}))):
        assert names.resolve_alias("chat", mine) == "new"
        with pytest.raises(Refused) as caught:
            names.resolve("chat", mine)
        assert caught.value.outcome is Outcome.REJECTED_NO_BACKENDS


def test_its_own_name_may_share_an_alias() -> None:
    names = catalogue({"old": {"old": 9, "new": 1}}, "old", "new")
    assert drawn(names, "old")["new"] == pytest.approx(400, abs=60)
    assert [entry["id"] for entry in names.models()] == ["new", "old"]


def test_an_alias_is_followed_once() -> None:
    names = catalogue({"a": "b", "b": "c", "x": {"b": 1, "c": 1}}, "b", "c")
    assert names.resolve("a").model == "b"
    assert names.resolve("b").model == "c"
    assert drawn(names, "x").keys() == {"b", "c"}


def test_what_a_backend_serves_comes_first_beside_it() -> None:
    names = catalogue(CANARY, "old", "new", "third")
    assert {names.resolve("chat", key, "on-new").model for key in KEYS[:200]} == {"new"}
    assert {names.resolve("chat", key, "on-third").model for key in KEYS[:200]} == {"old", "new"}
    assert {names.resolve("chat", key, "gone").model for key in KEYS[:200]} == {"old", "new"}


def test_the_alias_of_all_other_names() -> None:
    names = catalogue({"*": "old", "chat": "new", "new": "new"}, "old", "new", "third")
    assert names.resolve("chat") == Target("chat", "new", "new", None, 4096)
    assert names.resolve("new").model == "new"
    assert names.resolve("third") == Target("third", "old", "old", None, 4096)
    assert names.resolve("made-up") == Target("old", "old", "old", None, 4096), "nobody configured this name"
    assert "made-up" not in names.targets
    assert [entry["id"] for entry in names.models()] == ["new", "old", "third", "chat"]


def test_all_other_names_may_be_shared() -> None:
    names = catalogue({"*": {"old": 9, "new": 1}}, "old", "new")
    assert drawn(names, "made-up")["new"] == pytest.approx(400, abs=60)
    assert names.resolve("\ud800", "key").model in ("old", "new"), "a name from JSON need not be Unicode"


def test_a_shared_alias_is_among_the_known_names() -> None:
    names = catalogue({**CANARY, "nowhere": {"gone": 1}}, "old")
    with pytest.raises(Refused, match="Known models: chat, old"):
        names.resolve("what")
