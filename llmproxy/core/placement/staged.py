"""Whether a request is split: its prompt computed on one backend, and its answer on another one.

Backends have roles: `prefill`, `decode`, or `both`. A pool in which all have `both` splits nothing. In any other one, a
request that may be split is priced twice in seconds: as a whole where that costs least, and as two stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from llmproxy.core.backends.view import View
from llmproxy.core.domain import (
    Explained,
    Learned,
    NoCapacity,
    NoMatch,
    Placed,
    Request,
    Role,
    Slo,
    Stage,
    Usage,
    Verdict,
)
from llmproxy.core.placement.policy import Placement, Quote
from llmproxy.core.settings import Disaggregation, Splitting

FAILURES_MAX = 3
"""After so many prompts in a row that did not arrive, a backend computes none for others for a while."""
REST_S, REST_MAX_S = 5.0, 60.0
"""How long that while is: the first, doubled with each further failure, and the longest."""
SURE_S = 0.005
"""A split has to be cheaper by so much: no estimate is better, and one call is simpler than two."""


def as_prefill(request: Request) -> Request:
    """The stage of `request` that computes its prompt: one token, of which the client sees nothing.

    Its end is seen like the first token of a stream, and no objective for the tokens after it holds.
    """
    slo = request.slo
    if slo is not None and slo.tpot_s is not None:
        slo = None if slo.ttft_s is None else Slo(slo.ttft_s)
    return replace(request, stage=Stage.PREFILL, stream=True, output_tokens=1, max_tokens=1, slo=slo)


def as_decode(request: Request) -> Request:
    """The stage of `request` that fetches what was computed and brings the answer."""
    return replace(request, stage=Stage.DECODE)


def as_stage(request: Request, stage: Stage) -> Request:
    """One stage of `request`, which is a whole one."""
    if stage is Stage.WHOLE:
        return request
    return as_prefill(request) if stage is Stage.PREFILL else as_decode(request)


def staged(placement: Placement, settings: Disaggregation) -> StagedPlacement:
    """A placement that places stages, by `settings` unless it has an own way to split requests."""
    return placement if isinstance(placement, StagedPlacement) else StagedPlacement(placement, settings)


class StagedPlacement(Placement):
    """Places whole requests and stages by another placement.

    Whole requests and answers go to backends that are not meant for prompts alone, while one of those that serves their
    model is available.
    What `settings` ask for:

    - `auto`: a request is split where both stages together cost less, by the prices of the other placement. A placement
      without prices splits nothing.
    - `always`: a request is split where both stages have room, and `never` splits none.
    - `tokens`: as `always`, for prompts of which so many tokens are in no cache of a backend that could answer.
    """

    def __init__(self, inner: Placement, settings: Disaggregation) -> None:
        self.inner = inner
        self.settings = settings
        self._split_up = True
        self._answering: list[View] = []
        self._answering_for: dict[str, set[str]] = {}
        self._failures: dict[str, int] = {}
        self._rests_until_s: dict[str, float] = {}

    def begin(self, views: Sequence[View]) -> None:
        """A pass over these backends begins. What it asks for later may leave some of them out."""
        both = Role.BOTH
        self._split_up = True in [view.role is not both for view in views]
        self._answering, self._answering_for = [], {}
        if self._split_up:
            self._answering = [view for view in views if view.available and view.role is not Role.PREFILL]

    def place(
        self, request: Request, views: Sequence[View], ceiling: float, excluded: frozenset[str], now: float
    ) -> Placed | NoCapacity | NoMatch:
        if not self._split_up:
            return self.inner.place(request, views, ceiling, excluded, now)
        # What only one backend has is answered there, whatever its role.
        answering = views if request.backend is not None else self.answering(request, views, excluded)
        splits = request.stage is Stage.WHOLE and request.splittable
        if splits and answering is not views and self.settings.splitting is not Splitting.NEVER:
            split = self._split(request, views, answering, ceiling, excluded, now)
            if split is not None:
                return split
        placed = self.inner.place(request, answering, ceiling, excluded, now)
        if isinstance(placed, Placed) and request.stage is Stage.WHOLE:
            return replace(placed, unsplit=True)
        return placed

    def answering(self, request: Request, views: Sequence[View], excluded: frozenset[str]) -> Sequence[View]:
        """Those of `views` that are meant for answers; `views` itself where none that is available is for `request`.

        Engines enforce no role, so that backends for prompts are there for want of others.
        """
        model = request.model
        if model not in self._answering_for:
            self._answering_for[model] = {view.backend for view in self._answering if model in view.served}
        if self._answering_for[model] <= excluded:
            return views
        return [view for view in views if view.role is not Role.PREFILL]

    def _split(
        self,
        request: Request,
        views: Sequence[View],
        answering: Sequence[View],
        ceiling: float,
        excluded: frozenset[str],
        now: float,
    ) -> Placed | NoMatch | None:
        """A place for the prompt, beside one for the answer; None where the request is to be served as a whole."""
        inner = self.inner
        prompt = as_prefill(request)
        rests = self._rests_until_s
        prefilling = [view for view in views if view.role is not Role.DECODE and rests.get(view.backend, now) <= now]
        prefill = inner.quote(prompt, prefilling, ceiling, excluded, now)
        whole = inner.quote(request, answering, ceiling, excluded, now)
        if prefill is None:
            return None
        others = [view for view in answering if view.backend != prefill.backend]
        answer = inner.quote(as_decode(request), others, ceiling, excluded, now)
        if answer is None or not self._pays(request, prefill, answer, whole):
            return None
        chosen = [view for view in prefilling if view.backend == prefill.backend]
        placed = inner.place(prompt, chosen, ceiling, excluded, now)
        if isinstance(placed, Placed):
            return replace(placed, answers_on=answer.backend, score=placed.score + answer.total_s)
        if isinstance(placed, NoMatch) and placed.later:
            return placed
        return None

    def _pays(self, request: Request, prefill: Quote, answer: Quote, whole: Quote | None) -> bool:
        splitting, tokens = self.settings.splitting, self.settings.min_uncached_tokens
        if splitting is Splitting.AUTO:
            return whole is None or prefill.total_s + answer.total_s < whole.total_s - SURE_S
        cached_tokens = 0.0 if whole is None else whole.cached_tokens
        return request.prompt_tokens - cached_tokens >= tokens

    def transferred(self, backend: str, now: float, *, arrived: bool) -> None:
        """A prompt that `backend` computed for another one arrived there, or did not."""
        if arrived:
            self._failures.pop(backend, None)
            self._rests_until_s.pop(backend, None)
            return
        failures = self._failures[backend] = self._failures.get(backend, 0) + 1
        if failures >= FAILURES_MAX:
            rest_s = min(REST_S * 2.0 ** min(failures - FAILURES_MAX, 10), REST_MAX_S)
            self._rests_until_s[backend] = now + rest_s

    # --- all else is for the other placement --------------------------------------------------------------------------

    def quote(
        self, request: Request, views: Sequence[View], ceiling: float, excluded: frozenset[str], now: float
    ) -> Quote | None:
        return self.inner.quote(request, views, ceiling, excluded, now)

    def booked(self, lease: int, request: Request, placed: Placed, now: float) -> None:
        self.inner.booked(lease, request, placed, now)

    def recomputing(self, lease: int) -> None:
        self.inner.recomputing(lease)

    def started(self, lease: int, now: float) -> None:
        self.inner.started(lease, now)

    def finished(self, lease: int, verdict: Verdict, usage: Usage | None, now: float) -> None:
        self.inner.finished(lease, verdict, usage, now)

    def cached(self, backend: str, hashes: Sequence[int]) -> None:
        self.inner.cached(backend, hashes)

    def lost(self, backend: str) -> None:
        self._failures.pop(backend, None)
        self._rests_until_s.pop(backend, None)
        self.inner.lost(backend)

    def ready(self, views: Sequence[View], band: int, ceiling: float, now: float) -> list[View]:
        return self.inner.ready(views, band, ceiling, now)

    def changes_at(self, now: float) -> float | None:
        return self.inner.changes_at(now)

    def work_s(self, requests: int, prompt_tokens: int, output_tokens: int, views: Sequence[View]) -> float | None:
        return self.inner.work_s(requests, prompt_tokens, output_tokens, views)

    def explained(self) -> Sequence[Explained]:
        return self.inner.explained()

    def learned(self, backends: Iterable[str], now: float) -> Learned | None:
        return self.inner.learned(backends, now)
