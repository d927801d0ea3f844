"""Where: filters, scorers and a picker over the fleet's views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from llmproxy.core.domain import NoCapacity, NoMatch, Placed, Request, Usage, Verdict
from llmproxy.core.fleet import View
from llmproxy.core.registry import Registry

NO_CAPACITY = NoCapacity()
NO_MATCH = NoMatch(whole_model=False)
NO_MATCH_FOR_MODEL = NoMatch(whole_model=True)


class Placement(Protocol):
    """Chooses one backend for one request, and hears what became of its choices."""

    def place(
        self, request: Request, views: Sequence[View], ceiling: float, excluded: frozenset[str]
    ) -> Placed | NoCapacity | NoMatch:
        """Answer the backend, or why there is none: no room under `ceiling` anywhere, or none for this request."""

    def booked(self, lease: int, request: Request, backend: str) -> None:
        """The choice was taken: `request` goes to `backend` under `lease`."""

    def started(self, lease: int) -> None:
        """The first byte of the answer arrived."""

    def finished(self, lease: int, verdict: Verdict, usage: Usage | None) -> None:
        """The attempt ended; `usage` is None where its tokens are unknown."""

    def lost(self, backend: str) -> None:
        """The process behind `backend` is gone, and all that it had cached."""


class Unobserved:
    """For a placement that needs no news of its choices: the views tell it all."""

    def booked(self, lease: int, request: Request, backend: str) -> None:
        pass

    def started(self, lease: int) -> None:
        pass

    def finished(self, lease: int, verdict: Verdict, usage: Usage | None) -> None:
        pass

    def lost(self, backend: str) -> None:
        pass


Pick = Callable[[Request, Sequence[View]], Placed]
presets: Registry[Callable[[Random], Pick]] = Registry("placement")


class FilteredPlacement(Unobserved):
    """The filters every preset shares, then the preset's own choice among those that passed."""

    def __init__(self, pick: Pick) -> None:
        self._pick = pick

    def place(
        self, request: Request, views: Sequence[View], ceiling: float, excluded: frozenset[str]
    ) -> Placed | NoCapacity | NoMatch:
        roomy = [view for view in views if view.has_room(ceiling)]
        if not roomy:
            return NO_CAPACITY
        fitting = [view for view in roomy if request.model in view.served and view.backend not in excluded]
        if not fitting:
            return NO_MATCH_FOR_MODEL
        fitting = _with_context(request, fitting, [view for view in views if view.backend not in excluded])
        if not fitting:
            return NO_MATCH
        return self._pick(request, fitting)


def make(name: str, rng: Random) -> Placement:
    """The placement preset `name`. Raises ValueError naming the known ones."""
    return FilteredPlacement(presets.get(name)(rng))


def context_tokens(request: Request) -> int:
    """How long a context `request` needs, as far as is known before the engine has counted."""
    return request.prompt_tokens + (request.max_tokens or 1)


def _with_context(request: Request, fitting: list[View], views: Sequence[View]) -> list[View]:
    """Drop backends whose context is too short while a longer one exists among `views`.

    The prompt's length is an estimate: where even the longest context seems too short, the engine itself must say so.
    """
    needed = context_tokens(request)
    if all(view.max_model_len is None or view.max_model_len >= needed for view in fitting):
        return fitting
    longest = max((v.max_model_len or needed for v in views if request.model in v.served), default=needed)
    return [view for view in fitting if view.max_model_len is None or view.max_model_len >= min(needed, longest)]


# --- presets ----------------------------------------------------------------------------------------------------------

BLEND_WEIGHTS = {"queue": 2.0, "kv": 1.0, "load": 2.0, "lora": 1.0}
ADAPTER_SLOT_FREE = 0.6
"""Loading an adapter into a free slot costs less than evicting one, and more than having it."""


def _scores(request: Request, view: View) -> tuple[float, float, float, float]:
    """Queue, cache, load and adapter, each 0..1 and absolute: one request must not look like fifty of them."""
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


@presets.register("blend")
def blend(rng: Random) -> Pick:
    """Weighted sum of queue depth, KV use, load and adapter residency; ties drawn at random."""
    weigh_queue, weigh_kv, weigh_load, weigh_lora = BLEND_WEIGHTS.values()

    def pick(request: Request, views: Sequence[View]) -> Placed:
        best: list[View] = []
        best_score = -1.0
        for view in views:
            queue, kv, load, lora = _scores(request, view)
            # Rounded, so that a thousandth of KV-cache does not decide between two equally idle backends.
            score = round(weigh_queue * queue + weigh_kv * kv + weigh_load * load + weigh_lora * lora, 2)
            if score > best_score:
                best, best_score = [view], score
            elif score == best_score:
                best.append(view)
        chosen = best[0] if len(best) == 1 else rng.choice(best)
        terms = tuple(zip(BLEND_WEIGHTS, _scores(request, chosen), strict=True))
        return Placed(chosen.backend, best_score, terms, len(views))

    return pick


@presets.register("least_request")
def least_request(rng: Random) -> Pick:
    """Fewest sequences in flight for its size; ties drawn at random."""

    def pick(request: Request, views: Sequence[View]) -> Placed:
        del request
        least = min(view.saturation for view in views)
        return _placed(rng.choice([view for view in views if view.saturation == least]), len(views))

    return pick


@presets.register("power_of_two")
def power_of_two(rng: Random) -> Pick:
    """The less loaded of two drawn at random (Mitzenmacher, "The power of two choices", 2001)."""

    def pick(request: Request, views: Sequence[View]) -> Placed:
        del request
        pair = views if len(views) < 2 else rng.sample(views, 2)
        return _placed(min(pair, key=lambda view: view.saturation), len(views))

    return pick


@presets.register("random")
def random_choice(rng: Random) -> Pick:
    """Any backend with room."""

    def pick(request: Request, views: Sequence[View]) -> Placed:
        del request
        return _placed(rng.choice(views), len(views))

    return pick


@presets.register("round_robin")
def round_robin(rng: Random) -> Pick:
    """The next backend by name that has room, after the one that was served last."""
    del rng
    last = ""

    def pick(request: Request, views: Sequence[View]) -> Placed:
        nonlocal last
        del request
        after = [view for view in views if view.backend > last]
        chosen = min(after or views, key=lambda view: view.backend)
        last = chosen.backend
        return _placed(chosen, len(views))

    return pick


def _placed(view: View, candidates: int) -> Placed:
    return Placed(view.backend, -view.saturation, (("load", view.saturation),), candidates)
