"""Objects of the inference extension: their entries, their order, and rejected objects."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmproxy.backends.kubernetes.extension import entries_of
from llmproxy.backends.kubernetes.objects import CustomObject
from llmproxy.config import Config, Entries, ModelConfig, ObjectiveConfig
from llmproxy.config.changes import in_force
from llmproxy.config.entries import with_entries
from tests.backends.kubernetes.api_server import Object, objective, rewrite, rule

POOLS = {("default", "qwen"), ("serving", "llama")}


def said(*objects: Object) -> Entries:
    return entries_of([(one["kind"], msgspec.convert(one, CustomObject)) for one in objects], POOLS)


def bands(entries: Entries) -> dict[str, Any]:
    return {one.name: one.criticality for _, one in entries.objectives}


def aliases(entries: Entries) -> dict[str, Any]:
    return {one.name: one.stands_for for _, one in entries.models}


def in_namespace(one: Object, namespace: str) -> Object:
    return one | {"metadata": one["metadata"] | {"namespace": namespace}}


def with_spec(one: Object, **spec: Any) -> Object:
    return one | {"spec": one["spec"] | spec}


# --- objectives -------------------------------------------------------------------------------------------------------


def test_the_priority_of_an_objective_is_its_band() -> None:
    found = said(objective("high", 10), objective("low", -(1 << 31)), objective("unset"))
    assert bands(found) == {"high": 10, "low": -(1 << 31), "unset": 0}
    assert found.objectives[0] == (
        "InferenceObjective default/high",
        ObjectiveConfig(name="high", criticality=10),
    )


def test_only_objects_of_the_pools_that_are_backends_count() -> None:
    others = [
        objective("a", 1, pool="other"),
        in_namespace(objective("b", 1), "serving"),
        objective("c", 1, poolRef={"name": "qwen", "kind": "Service"}),
        objective("d", 1, poolRef={"name": "qwen", "group": "example.com"}),
        with_spec(objective("e", 1, pool="other"), rules="which are wrong, and nobody's concern"),
    ]
    assert said(*others) == Entries()
    assert bands(
        said(
            in_namespace(objective("a", 1, pool="llama"), "serving"),
            objective("b", 2, poolRef={"name": "qwen"}),
            objective("c", 3, poolRef={"name": "qwen", "group": "inference.networking.x-k8s.io"}),
            objective("d", 4, poolRef=None, poolRefs=[{"name": "other"}, {"name": "qwen"}]),
            objective("e", 5, poolRef=None, poolSelector={}),
            objective("f", 6, poolSelector={"matchLabels": {"a": "b"}}),
        )
    ) == {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "f": 6}


def test_oldest_of_equally_named_objectives_counts() -> None:
    young = in_namespace(objective("batch", 7, pool="llama", created="2026-02-01"), "serving")
    found = said(young, objective("batch", -7))
    assert bands(found) == {"batch": -7}
    why = "InferenceObjective default/batch is older and has the same name, so it counts"
    assert found.problems == {("InferenceObjective serving/batch", why)}


def test_object_in_two_groups_counts_in_the_first() -> None:
    found = said(objective("batch", 1, created="2026-02-01"), objective("batch", 2))
    assert (bands(found), found.problems) == ({"batch": 1}, frozenset())


# --- rewrites ---------------------------------------------------------------------------------------------------------


def test_rules_are_aliases() -> None:
    found = said(
        rewrite("r", rule("a", "b", new=1, old=3), rule("c", only=None), rule("d", x=None, y=None), rule(rest=5))
    )
    assert aliases(found) == {
        "a": {"new": 1, "old": 3},
        "b": {"new": 1, "old": 3},
        "c": "only",
        "d": {"x": 1, "y": 1},
        "*": "rest",
    }
    assert {origin for origin, _ in found.models} == {"InferenceModelRewrite default/r"}


def test_a_target_that_is_named_twice_has_both_weights() -> None:
    twice = [{"modelRewrite": "x", "weight": 2}, {"modelRewrite": "y", "weight": 3}, {"modelRewrite": "x", "weight": 4}]
    assert aliases(said(rewrite("r", {"targets": twice}))) == {"*": {"x": 6, "y": 3}}


def test_the_oldest_object_counts_then_the_first_by_name_then_the_first_rule() -> None:
    young = rewrite("a", rule("m", young=1), rule(young=1), created="2026-03-01")
    old = rewrite("z", rule("m", old=1), rule("m", second=1), rule("n", old=1), created="2026-02-01")
    twin = rewrite("y", rule("m", twin=1), rule("o", twin=1), created="2026-02-01")
    for objects in ([young, old, twin], [twin, old, young], [old, young, twin]):
        found = said(*objects)
        assert aliases(found) == {"m": "twin", "n": "old", "o": "twin", "*": "young"}
        assert found.problems == frozenset(), "a rule that another one precedes is no mistake"


@given(st.data())
def test_the_order_of_objects_changes_nothing(data: st.DataObject) -> None:
    names = st.sampled_from("abc")
    one = st.builds(
        lambda name, of, to, day: rewrite(name, rule(*of, **dict.fromkeys(to, 1)), created=f"2026-01-0{day}"),
        names,
        st.lists(names, max_size=2),
        st.lists(names, min_size=1, max_size=2),
        st.integers(1, 3),
    )
    objects = data.draw(st.lists(one, max_size=6, unique_by=lambda found: found["metadata"]["name"]))
    assert said(*data.draw(st.permutations(objects))) == said(*objects)


# --- wrong objects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (objective("x", "high"), "Expected `int | null`, got `str` - at `spec.priority`"),
        (objective("x", True), "Expected `int | null`, got `bool` - at `spec.priority`"),
        (objective("x", 1 << 31), "Expected `int` <= 2147483647 - at `spec.priority`"),
        (objective("x", 1, latency=5), "Object contains unknown field `latency`"),
        (objective("x", 1, poolRef=None), "it names no InferencePool: set spec.poolRef"),
        (objective("x", 1, poolRef={"nam": "qwen"}), "Object contains unknown field `nam` - at `spec.poolRef`"),
        (objective("x", poolRef=None, poolSelector={"matchLabels": {"a": "b"}}), "spec.poolSelector is not read"),
        (objective("x") | {"spec": None}, "Expected `object`, got `null`"),
        (rewrite("x", rule("m", a=1, b=None)), "spec.rules[0].targets should all have a weight, or none"),
        (rewrite("x", rule("m", a=0)), "Expected `int` >= 1 - at `spec.rules[0].targets[0].weight`"),
        (rewrite("x", rule("m", a=1_000_001)), "Expected `int` <= 1000000"),
        (rewrite("x", rule("m", a=1), rule("n")), "spec.rules[1].targets is empty"),
        (rewrite("x", rule("*", a=1)), "spec.rules[0] matches a model '*', which is no name here"),
        (rewrite("x", rule("", a=1)), "Expected `str` of length >= 1"),
        (rewrite("x", {"matches": [{}], "targets": []}), "Object missing required field `model`"),
        (
            rewrite("x", {"matches": [{"model": {"value": "m"}, "headers": []}], "targets": []}),
            "unknown field `headers`",
        ),
        (
            rewrite("x", {"matches": [{"model": {"type": "Prefix", "value": "m"}}], "targets": []}),
            "Invalid enum value 'Prefix'",
        ),
        (objective("x" * 600, 1), "name: String should have at most 512 characters"),
        (with_spec(rewrite("x"), rules=None), "Expected `array`, got `null` - at `spec.rules`"),
    ],
)
def test_a_wrong_object_is_left_out_as_a_whole_and_no_other(wrong: Object, why: str) -> None:
    good = objective("good", 1), rewrite("good", rule("alias", model=1))
    found = said(good[0], wrong, good[1])
    assert (bands(found), aliases(found)) == ({"good": 1}, {"alias": "model"})
    ((origin, text),) = found.problems
    assert origin == f"{wrong['kind']} default/{wrong['metadata']['name']}"
    assert why in text


# --- beside the configuration -----------------------------------------------------------------------------------------


def combined(entries: Entries, **config: Any) -> tuple[Config, list[str]]:
    found, problems = with_entries(Config.model_validate(config), entries)
    return found, sorted(f"{origin}: {why}" for origin, why in problems)


def test_entries_are_added_to_the_configuration() -> None:
    found, problems = combined(
        said(objective("batch", -10), rewrite("r", rule("chat", new=1, old=9))),
        objectives=[{"name": "fast", "ttft_s": 1}],
        models=[{"name": "old", "criticality": "critical"}],
    )
    assert problems == []
    assert [one.name for one in found.objectives] == ["fast", "batch"]
    assert [(one.name, one.stands_for) for one in found.models] == [("old", None), ("chat", {"new": 1, "old": 9})]
    shown = {one.key: one for one in in_force(found)}
    assert shown["objectives[batch].criticality"].value == "-10"
    assert shown["objectives[batch].criticality"].origin == "InferenceObjective default/batch"
    assert shown["models[chat].targets"].origin == "InferenceModelRewrite default/r"
    assert shown["models[old].criticality"].origin == "default", "which is not known of a configuration without a file"


def test_configuration_overrides_objects() -> None:
    found, problems = combined(
        said(objective("fast", 5), rewrite("r", rule("chat", new=1), rule("plain", new=1))),
        objectives=[{"name": "fast", "criticality": "sheddable"}],
        models=[{"name": "chat", "target": "old"}, {"name": "plain", "ttft_s": 1}],
    )
    assert [(one.name, one.criticality) for one in found.objectives] == [("fast", "sheddable")]
    assert found.models == (
        ModelConfig(name="chat", target="old"),
        ModelConfig(name="plain", target="new", ttft_s=1),
    )
    shown = {one.key: one.origin for one in in_force(found)}
    assert shown["models[plain].target"] == "InferenceModelRewrite default/r"
    assert shown["models[chat].target"] == shown["objectives[fast].criticality"] == "default"
    assert problems == [
        "InferenceModelRewrite default/r: the configuration has an alias 'chat', which counts",
        "InferenceObjective default/fast: the configuration has an objective 'fast', which counts",
    ]


def test_band_without_a_name_has_the_name_of_its_objective() -> None:
    objects = [
        objective("first", 10),
        objective("second", 10, created="2026-01-02"),
        objective("urgent", 60),
        objective("mine", 50),
        objective("critical", 7),
        objective("high", 100),
    ]
    found, problems = combined(said(*objects), bands={"urgent": 50})
    assert (found.bands, problems) == ({"urgent": 50, "first": 10}, [])
    assert found.band_names()[100] == "critical"


def test_without_entries_nothing_changes() -> None:
    config = Config.model_validate({"models": [{"name": "a"}]})
    found, problems = with_entries(config, Entries())
    assert (found, found.model_fields_set, problems) == (config, config.model_fields_set, frozenset())
