"""The base class of placements, their shared helpers, and the registry of their names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import NamedTuple

from llmproxy.core.backends.view import View, rooms
from llmproxy.core.domain import Explained, Learned, NoCapacity, NoMatch, Placed, Request, Role, Usage, Verdict
from llmproxy.core.policy_registry import Registry
from llmproxy.core.queueing.claims import Claims

NO_CAPACITY = NoCapacity()
NO_MATCH = NoMatch(whole_model=False)
NO_MATCH_FOR_MODEL = NoMatch(whole_model=True)


class Placement(ABC):
    """Chooses one backend for one request. Only `place` must be defined; events and queries have defaults."""

    @abstractmethod
    def place(
        self, request: Request, views: Sequence[View], ceiling: float, excluded: frozenset[str], now: float
    ) -> Placed | NoCapacity | NoMatch:
        """Returns the chosen backend of `views`.

        `ceiling` (0..1] is the part of each batch limit that the request's band may fill. Backends in `excluded` are
        never chosen. Returns NoCapacity if no backend has a free slot under `ceiling`, and NoMatch if the backends with
        a free slot cannot serve this request, or are worse than to wait for the backend `NoMatch.later`.
        """

    def watch(self, claims: Claims) -> None:
        """Gives the placement the requests of its pool that wait for backends without room."""

    def booked(self, lease: int, request: Request, placed: Placed, now: float) -> None:
        """Event: `request` was granted the backend of `placed` under `lease`."""

    def recomputing(self, lease: int) -> None:
        """Event: the backend computes the prompt of a decode stage itself, without the blocks of the prefill stage."""

    def started(self, lease: int, now: float) -> None:
        """Event: the first token of a stream arrived, or the first bytes of another answer."""

    def finished(self, lease: int, verdict: Verdict, usage: Usage | None, now: float) -> None:
        """Event: the attempt under `lease` ended. `usage` is None if its tokens are unknown."""

    def cached(self, backend: str, hashes: Sequence[int]) -> None:
        """Event: `backend` has cached these blocks, a prompt and its answer, hashed like `Request.prefix`.

        Called shortly after `finished`, for some answers. The next request of the conversation begins with these
        blocks. A new leader of a cluster also gets blocks without the other events of their request, perhaps of the
        prompt alone.
        """

    def lost(self, backend: str) -> None:
        """Event: the process behind `backend` is gone or replaced, or the backend left the pool. Leases may go on."""

    def quote(
        self, request: Request, views: Sequence[View], ceiling: float, excluded: frozenset[str], now: float
    ) -> Quote | None:
        """Returns the cheapest backend, even if `place` would wait for it; None if none fits or prices are unknown."""
        return None

    def ready(self, views: Sequence[View], band: int, ceiling: float, now: float) -> list[View]:
        """Returns the backends of `views` that take a request of `band` now."""
        return [view for view, room in zip(views, rooms(views, ceiling), strict=True) if room]

    def changes_at(self, now: float) -> float | None:
        """Returns when a waiting request may find a backend although no event comes; None if that is not possible."""
        return None

    def work_s(self, requests: int, prompt_tokens: int, output_tokens: int, views: Sequence[View]) -> float | None:
        """Returns the seconds that the available `views` together need for this work; None if unknown."""
        return None

    def explained(self) -> Sequence[Explained]:
        """Returns the last decisions with all prices, the oldest first; empty without prices."""
        return ()

    def learned(self, backends: Iterable[str], now: float) -> Learned | None:
        """Returns the learned speed of the pool and of these backends; None for a placement that learns no speed."""
        return None


class Presets(Registry[Callable[[Random], Placement]]):
    """The registry of placements.

    A placement declares at registration whether it reads `Request.prefix` (`prefixes`) and uses `Placement.cached`
    (`answers`). Otherwise prompts or answers are not hashed.
    """

    def __init__(self) -> None:
        super().__init__("placement")
        self._prefixed: set[str] = set()
        self._answered: set[str] = set()

    def register(
        self, name: str, *, prefixes: bool = False, answers: bool = False
    ) -> Callable[[Callable[[Random], Placement]], Callable[[Random], Placement]]:
        """Returns a decorator that registers a factory under `name`. Raises ValueError if the name is taken."""
        if prefixes:
            self._prefixed.add(name)
        if answers:
            self._answered.add(name)
        return super().register(name)

    def reads_prefixes(self, name: str) -> bool:
        return name in self._prefixed

    def hears_answers(self, name: str) -> bool:
        return name in self._answered


class Quote(NamedTuple):
    """The cheapest backend for a request, its price in seconds, and the prompt tokens cached there."""

    total_s: float
    backend: str
    cached_tokens: float


Pick = Callable[[Request, Sequence[View]], Placed]
presets = Presets()


class FilteredPlacement(Placement):
    """Keeps the backends that serve the model, are not excluded, and have enough context and a slot under the ceiling.

    `pick` chooses one of them.
    """

    def __init__(self, pick: Pick) -> None:
        self._pick = pick

    def place(
        self, request: Request, views: Sequence[View], ceiling: float, excluded: frozenset[str], now: float
    ) -> Placed | NoCapacity | NoMatch:
        found = fitting(request, views, ceiling, excluded)
        return self._pick(request, found) if isinstance(found, list) else found

    def quote(
        self, request: Request, views: Sequence[View], ceiling: float, excluded: frozenset[str], now: float
    ) -> Quote | None:
        # All prices are equal, so requests are never split to save time.
        found = self.place(request, views, ceiling, excluded, now)
        return Quote(0.0, found.backend, 0.0) if isinstance(found, Placed) else None


def make(name: str, rng: Random) -> Placement:
    """Returns a new placement of the preset `name`. For an unknown name, raises ValueError with the known names."""
    return presets.get(name)(rng)


def picking(name: str) -> Callable[[Callable[[Random], Pick]], Callable[[Random], Pick]]:
    """Returns a decorator that registers a factory of pick functions as the placement `name`."""

    def register(factory: Callable[[Random], Pick]) -> Callable[[Random], Pick]:
        presets.register(name)(lambda rng: FilteredPlacement(factory(rng)))
        return factory

    return register


def fitting(
    request: Request, views: Sequence[View], ceiling: float, excluded: frozenset[str]
) -> list[View] | NoCapacity | NoMatch:
    """Returns the backends with a free slot under `ceiling` that can serve `request`, or why there is none."""
    roomy = [view for view, room in zip(views, rooms(views, ceiling), strict=True) if room]
    if not roomy:
        return NO_CAPACITY
    able = [view for view in roomy if request.model in view.served and view.backend not in excluded]
    if not able:
        return NO_MATCH_FOR_MODEL
    return with_context(request, able, views, excluded) or NO_MATCH


def context_tokens(request: Request) -> int:
    """Returns the context length that `request` needs, from estimated prompt tokens."""
    return request.prompt_tokens + (request.max_tokens or 1)


def could_serve(request: Request, excluded: frozenset[str], view: View) -> bool:
    """Returns whether a backend could serve `request`, apart from free slots."""
    if request.model not in view.served or view.backend in excluded:
        return False
    if request.backend not in (None, view.backend) or (view.role is Role.PREFILL and not request.splittable):
        return False
    return view.max_model_len is None or context_tokens(request) <= view.max_model_len


def with_context(request: Request, fitting: list[View], views: Sequence[View], excluded: frozenset[str]) -> list[View]:
    """Removes backends whose context is too short, if a backend of `views` outside `excluded` has a longer context.

    The prompt's length is an estimate. If even the longest context seems too short, the engine decides.
    """
    needed = context_tokens(request)
    for view in fitting:
        if view.max_model_len is not None and view.max_model_len < needed:
            break
    else:
        return fitting
    serving = (view for view in views if request.model in view.served and view.backend not in excluded)
    longest = max((view.max_model_len or needed for view in serving), default=needed)
    return [view for view in fitting if view.max_model_len is None or view.max_model_len >= min(needed, longest)]
