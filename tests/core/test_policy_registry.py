from __future__ import annotations

from collections.abc import Callable

import pytest

from llmproxy.core.placement.policy import presets
from llmproxy.core.policy_registry import Registry
from llmproxy.core.queueing import fairness


def test_a_name_finds_its_factory_and_is_taken_once() -> None:
    registry: Registry[Callable[[], object]] = Registry("colour")
    registry.register("red")(lambda: 1)
    registry.register("blue")(lambda: 2)
    assert registry.get("red")() == 1
    assert set(registry.names()) == {"blue", "red"}
    with pytest.raises(ValueError, match="colour 'red' is registered twice"):
        registry.register("red")(lambda: 3)
    assert registry.get("red")() == 1


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    registry: Registry[Callable[[], object]] = Registry("colour")
    registry.register("red")(lambda: 1)
    with pytest.raises(ValueError, match="unknown colour 'read'; known: red"):
        registry.get("read")


def test_the_names_that_a_configuration_may_use() -> None:
    assert set(fairness.policies.names()) == {"fair_share", "fcfs", "round_robin", "slo"}
    assert set(presets.names()) == {"cost", "least_request", "round_robin", "session"}
    assert {name for name in presets.names() if presets.reads_prefixes(name)} == {"cost"}
    assert {name for name in presets.names() if presets.hears_answers(name)} == {"cost"}
