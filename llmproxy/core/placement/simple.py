"""Placements that use only the views of the backends, and learn nothing."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from llmproxy.core.backends.view import View
from llmproxy.core.domain import Placed, Request
from llmproxy.core.placement.policy import Pick, picking


@picking("least_request")
def least_request(rng: Random) -> Pick:
    """Takes the backend with the lowest saturation (sequences in flight / limit). Ties are drawn at random."""

    def pick(_: Request, views: Sequence[View]) -> Placed:
        least = min(view.saturation for view in views)
        return _placed(rng.choice([view for view in views if view.saturation == least]), len(views))

    return pick


@picking("round_robin")
def round_robin(_: Random) -> Pick:
    """Takes the backend with a free slot that follows the previous choice in the order of names."""
    last = ""

    def pick(_: Request, views: Sequence[View]) -> Placed:
        nonlocal last
        after = [view for view in views if view.backend > last]
        chosen = min(after or views, key=lambda view: view.backend)
        last = chosen.backend
        return _placed(chosen, len(views))

    return pick


def _placed(view: View, candidates: int) -> Placed:
    return Placed(view.backend, -view.saturation, (("load", view.saturation),), candidates)
