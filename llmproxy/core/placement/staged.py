"""Decides whether a request is split: its prompt is computed on one backend, and its answer on another.

Backends have the role `prefill`, `decode` or `both`. A pool in which every role is `both` splits nothing. In other
pools a splittable request is priced twice: on the cheapest backend as a whole, and as two stages.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from llmproxy.core.backends.view import View
from llmproxy.core.domain import NoCapacity, NoMatch, Placed, Request, Role, Slo, Stage
from llmproxy.core.placement.policy import Placement, Quote
from llmproxy.core.settings import Disaggregation, Splitting

FAILURES_MAX = 3  # Consecutive failed transfers after which a backend gets no prefill stages for a pause.
# Pause of a backend after so many failed transfers, in seconds. Each further failure doubles it, up to the maximum.
PAUSE_S, PAUSE_MAX_S = 5.0, 60.0
SURE_S = 0.005  # A split must be cheaper by this time, because estimates are no more exact and one call is simpler.


def as_prefill(request: Request) -> Request:
    """Returns the prefill stage of `request`, which generates one token that the client does not see.

    The stage is marked as a stream, because its end shows the same as the first byte of a stream: the prompt is
    computed. The objective per output token is dropped.
    """
    slo = request.slo
    if slo is not None and slo.tpot_s is not None:
        slo = None if slo.ttft_s is None else Slo(slo.ttft_s)
    return replace(request, stage=Stage.PREFILL, stream=True, output_tokens=1, max_tokens=1, slo=slo)


def as_decode(request: Request) -> Request:
    """Returns the decode stage of `request`, which fetches the computed prompt and generates the answer."""
    return replace(request, stage=Stage.DECODE)


def as_stage(request: Request, stage: Stage) -> Request:
    """Returns the given stage of `request`, an unsplit request."""
    if stage is Stage.WHOLE:
        return request
    return as_prefill(request) if stage is Stage.PREFILL else as_decode(request)


class StagedPlacement(Placement):
    """Places whole requests and stages by another placement, `inner`. Only `inner` has prices and learned speeds.

    Whole requests and decode stages avoid backends of role `prefill` while another backend of their model is available.
    `settings.splitting` decides which requests are split:

    - `auto`: if both stages together cost less than the whole request, by the prices of `inner`. A placement without
      prices splits nothing.
    - `always`: if the decode stage has room, and the prefill stage has room or `inner` would wait for it.
    - `never`: no request.
    - `tokens`: as `always`, for prompts with at least `min_uncached_tokens` tokens that the cheapest backend for the
      whole request has not cached.
    """

    def __init__(self, inner: Placement, settings: Disaggregation) -> None:
        self.inner = inner
        self.observer = inner  # The placement that gets the events of leases.
        self.settings = settings
        self._split_up = True  # Whether the pool has a backend of role `prefill` or `decode`.
        # The available backends of this pass that are not of role `prefill`, and model -> their names.
        self._answering: list[View] = []
        self._answering_for: dict[str, set[str]] = {}
        self._failures: dict[str, int] = {}  # Prefill backend -> consecutive failed transfers.
        self._paused_until_s: dict[str, float] = {}

    def begin(self, views: Sequence[View]) -> None:
        """Begins a scheduling pass over all `views`. Later calls of the pass may get only some of them."""
        self._split_up = False
        for view in views:
            if view.role is not Role.BOTH:
                self._split_up = True
        self._answering, self._answering_for = [], {}
        if self._split_up:
            self._answering = [view for view in views if view.available and view.role is not Role.PREFILL]

    def place(
        self, request: Request, views: Sequence[View], ceiling: float, excluded: frozenset[str], now: float
    ) -> Placed | NoCapacity | NoMatch:
        if not self._split_up:
            return self.inner.place(request, views, ceiling, excluded, now)
        # A request bound to one backend goes there whatever the backend's role.
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
        """Returns the `views` without role `prefill`; as a last resort all, because engines ignore roles."""
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
        """Returns the prefill placement, which names the decode backend; None if the request is not split.

        Returns NoMatch if the split request should wait for the prefill backend that `later` names.
        """
        inner = self.inner
        prompt = as_prefill(request)
        paused = self._paused_until_s
        prefilling = [view for view in views if view.role is not Role.DECODE and paused.get(view.backend, now) <= now]
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
        """Records that the transfer of a prompt that `backend` computed succeeded (`arrived`) or failed."""
        if arrived:
            self._failures.pop(backend, None)
            self._paused_until_s.pop(backend, None)
            return
        failures = self._failures[backend] = self._failures.get(backend, 0) + 1
        if failures >= FAILURES_MAX:
            pause_s = min(PAUSE_S * 2.0 ** min(failures - FAILURES_MAX, 10), PAUSE_MAX_S)
            self._paused_until_s[backend] = now + pause_s

    def forget_transfers(self, backend: str) -> None:
        """Forgets the failed transfers of a backend whose process is gone."""
        self._failures.pop(backend, None)
        self._paused_until_s.pop(backend, None)

    def ready(self, views: Sequence[View], band: int, ceiling: float, now: float) -> list[View]:
        return self.inner.ready(views, band, ceiling, now)
