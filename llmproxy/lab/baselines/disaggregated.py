"""Routers for disaggregated prefill and decode.

Each router chooses both replicas when a request comes. There are two simplifications. If the decode replica is gone
when the prompt is computed, another is chosen. Without a prefill replica, the decode replica computes the prompt. The
real routers answer with an error, or as configured. In a fleet without roles, only the decode policy chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from llmproxy.config import Config, settings_of
from llmproxy.core.backends.view import View
from llmproxy.core.domain import NoCapacity, NoMatch, Placed, Request, Role, Stage, Usage, Verdict
from llmproxy.core.placement.policy import Placement
from llmproxy.core.placement.staged import StagedPlacement, as_prefill
from llmproxy.lab.baselines.common import prompt_blocks
from llmproxy.lab.baselines.dynamo import KvCost, KvEventCaches, PredictedCaches
from llmproxy.lab.baselines.endpoint_picker import SCRAPE_S, EndpointPicker, sticky
from llmproxy.lab.baselines.plain import PowerOfTwo
from llmproxy.lab.baselines.policy import Baseline, Surroundings, baselines
from llmproxy.lab.baselines.sglang import CacheAware

Splits = Callable[[int, int], bool]
"""(Prompt tokens, tokens cached at the chosen decode replica) -> whether another replica computes the prompt."""


@dataclass(slots=True)
class KnownCaches:
    """The blocks that the router expects in each replica's cache. The real cache may have others."""

    around: Surroundings
    caches: KvEventCaches | PredictedCaches

    def tokens(self, request: Request, backend: str) -> tuple[int, int]:
        """Returns (tokens of the prompt, tokens cached at `backend`)."""
        blocks = prompt_blocks(request, self.around)
        return sum(blocks.values()), self.caches.tokens(request, blocks, [backend])[0]

    def routed(self, request: Request, backend: str) -> None:
        self.caches.routed(backend, prompt_blocks(request, self.around))


class SplitRouter(StagedPlacement):
    """Chooses a decode replica, and then perhaps a prefill replica, by separate policies."""

    def __init__(self, prefill: Placement, decode: Placement, known: KnownCaches, splits: Splits) -> None:
        super().__init__(decode, settings_of(Config()).disaggregation)
        self.observer = self
        self._prefill = prefill
        self._known = known
        self._splits = splits
        self._chosen: dict[str, str] = {}
        self._leases: dict[int, tuple[Placement, Request]] = {}

    def place(
        self, request: Request, views: Sequence[View], ceiling: float, excluded: frozenset[str], now: float
    ) -> Placed | NoCapacity | NoMatch:
        answering = self.answering(request, views, excluded)
        if request.stage is Stage.DECODE:
            chosen = self._chosen.pop(request.id)
            here = [view for view in answering if view.backend == chosen and view.available]
            return self.inner.place(request, here or answering, ceiling, excluded, now)
        placed = self.inner.place(request, answering, ceiling, excluded, now)
        if not isinstance(placed, Placed) or not request.splittable:
            return placed
        others = [view for view in views if view.role is not Role.DECODE and view.backend != placed.backend]
        if not self._split_up or not others or not self._splits(*self._known.tokens(request, placed.backend)):
            return placed
        prompt = self._prefill.place(as_prefill(request), others, ceiling, excluded, now)
        if not isinstance(prompt, Placed):
            return placed
        self._chosen[request.id] = placed.backend
        return replace(prompt, answers_on=placed.backend)

    def booked(self, lease: int, request: Request, placed: Placed, now: float) -> None:
        part = self._prefill if request.stage is Stage.PREFILL else self.inner
        self._leases[lease] = part, request
        if part is self.inner:
            self._known.routed(request, placed.backend)
        part.booked(lease, request, placed, now)

    def started(self, lease: int, now: float) -> None:
        self._leases[lease][0].started(lease, now)

    def finished(self, lease: int, verdict: Verdict, usage: Usage | None, now: float) -> None:
        part, request = self._leases.pop(lease)
        if request.stage is Stage.PREFILL and verdict is not Verdict.SERVED:
            self._chosen.pop(request.id, None)
        part.finished(lease, verdict, usage, now)

    def lost(self, backend: str) -> None:
        self._known.caches.lost(backend)
        for part in (self._prefill, self.inner):
            part.lost(backend)


@baselines.register("vllm_router_pd")
def vllm_router_pd() -> Baseline:
    def make(around: Surroundings) -> Placement:
        known = KnownCaches(around, PredictedCaches(around))
        prefill = CacheAware(around, 0.3, 64.0, 1.5)
        return SplitRouter(prefill, PowerOfTwo(around.rng), known, lambda *_: True)

    about = "vllm-router with two pools: every prompt is computed elsewhere, cache-aware; decode by power of two"
    return Baseline("vllm_router_pd", about, make)


@baselines.register("llmd_pd")
def llmd_pd(*, uncached: float = 512.0) -> Baseline:
    """Returns llm-d's rule: split a request if the decode replica lacks at least `uncached` tokens of its prompt."""

    def make(around: Surroundings) -> Placement:
        known = KnownCaches(around, PredictedCaches(around))
        # The defaults of `epp_sticky`.
        profile = sticky(0.8, 18.0, 15_928.0)
        prefill, decode = (EndpointPicker(around, gate=False, profile=profile) for _ in range(2))
        return SplitRouter(prefill, decode, known, lambda prompt, cached: prompt - cached >= uncached)

    about = "llm-d: the endpoint picker for each pool, split from so many tokens that the decode replica has not cached"
    return Baseline("llmd_pd", about, make, SCRAPE_S)


@baselines.register("dynamo_pd")
def dynamo_pd(*, uncached: float = 2_048.0, share: float = 0.7) -> Baseline:
    """Returns Dynamo's rule: split a request if the decode replica lacks at least `uncached` tokens, or the part
    `share`, of its prompt.
    """

    def make(around: Surroundings) -> Placement:
        known = KnownCaches(around, KvEventCaches(around))
        prefill, decode = (KvCost(around, KvEventCaches(around), 1.0, 1.0) for _ in range(2))

        def splits(prompt: int, cached: int) -> bool:
            return prompt - cached >= uncached or prompt - cached >= share * prompt

        return SplitRouter(prefill, decode, known, splits)

    return Baseline("dynamo_pd", "NVIDIA Dynamo: its KV router for each pool, conditional disaggregation", make)
