"""What may happen to backends: what clients saw, what replicas saw, and the log."""

from __future__ import annotations

import pytest

from tests.faults.scenes import SCENES, Scene, perform


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
async def test_when(scene: Scene) -> None:
    played = await perform(scene)
    assert (played.clients, played.outcomes, played.events) == (scene.clients, scene.outcomes, scene.events)
    assert len(played.exits) == sum(played.outcomes.values()), "one line for each request"
