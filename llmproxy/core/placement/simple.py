"""Placements that read the views alone and learn nothing."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from llmproxy.core.backends.view import View
from llmproxy.core.domain import Placed, Request
from llmproxy.core.placement.policy import Pick, picking

BLEND_WEIGHTS = {"queue": 2.0, "kv": 1.0, "load": 2.0, "lora": 1.0}
ADAPTER_SLOT_FREE = 0.6
"""Score if the adapter must be loaded into a free slot. A resident adapter scores 1, and an eviction 0."""


def _scores(request: Request, view: View) -> tuple[float, float, float, float]:
    """Returns (queue, KV cache, load, adapter) scores, each 0..1.

    Scores do not depend on the other backends, so a queue of one does not score like a queue of fifty.
    """
    kv_used = view.kv_used + (request.prompt_tokens / view.kv_tokens if view.kv_tokens else 0.0)
    return (
        1.0 / (1.0 + view.waiting),
        max(0.0, 1.0 - kv_used),
        max(0.0, 1.0 - view.load / view.limit),
        _adapter_score(request, view),
    )


def _adapter_score(request: Request, view: View) -> float:
    if request.adapter is None or request.adapter in view.resident:
        return 1.0
    if view.max_adapters is None or len(view.resident) < view.max_adapters:
        return ADAPTER_SLOT_FREE
    return 0.0


@picking("blend")
def blend(rng: Random) -> Pick:
    """Highest weighted sum of queue, KV cache, load and adapter scores; ties are drawn at random."""
    weigh_queue, weigh_kv, weigh_load, weigh_lora = BLEND_WEIGHTS.values()

    def pick(request: Request, views: Sequence[View]) -> Placed:
        best: list[View] = []
        best_score = -1.0
        for view in views:
            queue, kv, load, lora = _scores(request, view)
            # Rounded, so that a thousandth of the KV cache does not decide between two idle backends.
            score = round(weigh_queue * queue + weigh_kv * kv + weigh_load * load + weigh_lora * lora, 2)
            if score > best_score:
                best, best_score = [view], score
            elif score == best_score:
                best.append(view)
        chosen = best[0] if len(best) == 1 else rng.choice(best)
        terms = tuple(zip(BLEND_WEIGHTS, _scores(request, chosen), strict=True))
        return Placed(chosen.backend, best_score, terms, len(views))

    return pick


@picking("least_request")
def least_request(rng: Random) -> Pick:
    """Lowest saturation (sequences in flight / limit); ties are drawn at random."""

    def pick(_: Request, views: Sequence[View]) -> Placed:
        least = min(view.saturation for view in views)
        return _placed(rng.choice([view for view in views if view.saturation == least]), len(views))

    return pick


@picking("power_of_two")
def power_of_two(rng: Random) -> Pick:
    """The less saturated of two backends drawn at random (Mitzenmacher, "The power of two choices", 2001)."""

    def pick(_: Request, views: Sequence[View]) -> Placed:
        pair = views if len(views) < 2 else rng.sample(views, 2)
        return _placed(min(pair, key=lambda view: view.saturation), len(views))

    return pick


@picking("random")
def random_choice(rng: Random) -> Pick:
    """A random backend with room."""

    def pick(_: Request, views: Sequence[View]) -> Placed:
        return _placed(rng.choice(views), len(views))

    return pick


@picking("round_robin")
def round_robin(_: Random) -> Pick:
    """The backend with room that follows the previous choice in the order of names."""
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
