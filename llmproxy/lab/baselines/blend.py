"""A weighted sum of scores, like the scorers of Kubernetes endpoint pickers, with this proxy's queue in front."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from llmproxy.core.backends.view import View
from llmproxy.core.domain import Placed, Request
from llmproxy.core.placement.policy import FilteredPlacement, Placement

BLEND_WEIGHTS = {"queue": 2.0, "kv": 1.0, "load": 2.0, "lora": 1.0}
ADAPTER_SLOT_FREE = 0.6
"""Score if the adapter must be loaded into a free slot. A resident adapter scores 1, and an eviction 0."""


def _scores(request: Request, view: View) -> tuple[float, float, float, float]:
    """Returns (queue, KV cache, load, adapter) scores, each 0..1.

    Scores do not depend on other backends, so a queue of one scores better than a queue of fifty.
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


def blend(rng: Random) -> Placement:
    """Returns a placement by the highest weighted sum of queue, KV cache, load and adapter scores. Ties are drawn at
    random.
    """
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

    return FilteredPlacement(pick)
