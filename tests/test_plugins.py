"""Policies of third parties."""

from __future__ import annotations

import pytest

from llmproxy import plugins
from llmproxy.config import Config, settings_of
from llmproxy.core.placement import policy
from llmproxy.core.queueing import charge, fairness, ordering


@pytest.mark.parametrize(
    ("offered", "used"),
    [
        (plugins.fairness_policies, fairness.policies),
        (plugins.orderings, ordering.orderings),
        (plugins.charges, charge.charges),
        (plugins.placements, policy.presets),
    ],
)
def test_a_plugin_registers_where_the_core_looks(offered: object, used: object) -> None:
    assert offered is used


def test_a_policy_without_its_hooks_cannot_be_made() -> None:
    class Mine(plugins.FairnessPolicy):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Mine(settings_of(Config()))  # type: ignore[abstract]
