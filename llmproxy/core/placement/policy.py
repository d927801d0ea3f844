"""The face of a placement, what all of them share, and the registry of their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Protocol

from llmproxy.core.backends.backend import View
from llmproxy.core.domain import Explained, Learned, NoCapacity, NoMatch, Placed, Request, Usage, Verdict
from llmproxy.core.policy_registry import Registry

NO_CAPACITY = NoCapacity()
NO_MATCH = NoMatch(whole_model=False)
NO_MATCH_FOR_MODEL = NoMatch(whole_model=True)


class Placement(Protocol):
    """Chooses one backend for one request, and hears what became of its choices."""

    def place(
        self, request: Request, views: Sequence[View], ceiling: float, excluded: frozenset[str], now: float
    ) -> Placed | NoCapacity | NoMatch:
        """Answer the backend, or why there is none: no room under `ceiling` anywhere, or none for this request."""

    def booked(self, lease: int, request: Request, placed: Placed, now: float) -> None:
        """The choice was taken: `request` goes where `placed` says under `lease`."""

    def started(self, lease: int, now: float) -> None:
        """The first byte of the answer arrived."""

    def finished(self, lease: int, verdict: Verdict, usage: Usage | None, now: float) -> None:
        """The attempt ended; `usage` is None where its tokens are unknown."""

    def cached(self, backend: str, hashes: Sequence[int]) -> None:
        """`backend` holds these blocks: a prompt and the answer after it, as `Request.prefix` names them.

        Told a little after `finished`, of some answers; the next turn of a conversation begins with them.
        """

    def lost(self, backend: str) -> None:
        """The process behind `backend` is gone, or serves another pool: nothing that it had cached is of use any more.

        Leases on it may still run, and are told of to their end.
        """

    def explained(self) -> Sequence[Explained]:
        """The last choices with what they were between, the oldest first; a placement without prices has none."""

    def learned(self, backends: Iterable[str], now: float) -> Learned | None:
        """How fast it takes the pool and these backends of it to be; None from a placement without prices."""


class Unobserved:
    """For a placement that needs no news of its choices: the views tell it all."""

    def booked(self, lease: int, request: Request, placed: Placed, now: float) -> None:
        pass

    def started(self, lease: int, now: float) -> None:
        pass

    def finished(self, lease: int, verdict: Verdict, usage: Usage | None, now: float) -> None:
        pass

    def cached(self, backend: str, hashes: Sequence[int]) -> None:
        pass

    def lost(self, backend: str) -> None:
        pass

    def explained(self) -> Sequence[Explained]:
        return ()

    def learned(self, backends: Iterable[str], now: float) -> Learned | None:
        pass


class Presets(Registry[Callable[[Random], Placement]]):
    """Placements by name, each filed with whether it looks at `Request.prefix`: else no prompt need be hashed.

    Those that look at prefixes may want to hear of answers too (`Placement.cached`): else none need be read.
    """

    def __init__(self) -> None:
        super().__init__("placement")
        self._prefixed: set[str] = set()
        self._answered: set[str] = set()

    def register(
        self, name: str, *, prefixes: bool = False, answers: bool = False
    ) -> Callable[[Callable[[Random], Placement]], Callable[[Random], Placement]]:
        """Return a decorator that files its subject under `name`. Raises ValueError when the name is taken."""
        if prefixes:
            self._prefixed.add(name)
        if answers:
            self._answered.add(name)
        return super().register(name)

    def reads_prefixes(self, name: str) -> bool:
        """Whether the preset `name` looks at the prefixes of prompts."""
        return name in self._prefixed

    def hears_answers(self, name: str) -> bool:
        """Whether the preset `name` wants to be told of answers that are cached."""
        return name in self._answered


Pick = Callable[[Request, Sequence[View]], Placed]
presets = Presets()


class FilteredPlacement(Unobserved):
    """The filters every preset shares, then the preset's own choice among those that passed."""

    def __init__(self, pick: Pick) -> None:
        self._pick = pick

    def place(
        self, request: Request, views: Sequence[View], ceiling: float, excluded: frozenset[str], now: float
    ) -> Placed | NoCapacity | NoMatch:
        del now
        found = fitting(request, views, ceiling, excluded)
        return self._pick(request, found) if isinstance(found, list) else found


def make(name: str, rng: Random) -> Placement:
    """The placement preset `name`. Raises ValueError naming the known ones."""
    return presets.get(name)(rng)


def picking(name: str) -> Callable[[Callable[[Random], Pick]], Callable[[Random], Pick]]:
    """Return a decorator that files what makes a pick among fitting backends as the placement `name`."""

    def file(factory: Callable[[Random], Pick]) -> Callable[[Random], Pick]:
        presets.register(name)(lambda rng: FilteredPlacement(factory(rng)))
        return factory

    return file


def fitting(
    request: Request, views: Sequence[View], ceiling: float, excluded: frozenset[str]
) -> list[View] | NoCapacity | NoMatch:
    """The backends with room under `ceiling` that can serve `request`, of which there is at least one, or why none."""
    roomy = [view for view in views if view.has_room(ceiling)]
    if not roomy:
        return NO_CAPACITY
    able = [view for view in roomy if request.model in view.served and view.backend not in excluded]
    if not able:
        return NO_MATCH_FOR_MODEL
    return with_context(request, able, views, excluded) or NO_MATCH


def any_room(views: Sequence[View], ceiling: float) -> bool:
    """Whether one of `views` has room under `ceiling`."""
    for view in views:  # noqa: SIM110 - the first has room as a rule: a generator costs more than it
        if view.has_room(ceiling):
            return True
    return False


def highest(scores: Sequence[float], rng: Random) -> int:
    """The position of the highest of `scores`, equals drawn at random."""
    best = max(scores)
    equals = [i for i, score in enumerate(scores) if score == best]
    return equals[0] if len(equals) == 1 else rng.choice(equals)


class Ledger:
    """What each backend was given and has not yet returned. Both dictionaries hold live leases alone."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[str, int]] = {}
        self._sums: dict[str, int] = {}

    def give(self, lease: int, backend: str, amount: int = 1) -> None:
        self._held[lease] = backend, amount
        self._sums[backend] = self._sums.get(backend, 0) + amount

    def take_back(self, lease: int) -> None:
        """Return what was given under `lease`; a second time changes nothing."""
        backend, amount = self._held.pop(lease, ("", 0))
        left = self._sums.get(backend, 0) - amount
        if left:
            self._sums[backend] = left
        else:
            self._sums.pop(backend, None)

    def of(self, backend: str) -> int:
        return self._sums.get(backend, 0)

    def each(self, views: Iterable[View]) -> list[int]:
        return [self._sums.get(view.backend, 0) for view in views]


def context_tokens(request: Request) -> int:
    """How long a context `request` needs, as far as is known before the engine has counted."""
    return request.prompt_tokens + (request.max_tokens or 1)


def with_context(request: Request, fitting: list[View], views: Sequence[View], excluded: frozenset[str]) -> list[View]:
    """Drop backends whose context is too short while a longer one exists among `views` less the `excluded`.

    The prompt's length is an estimate: where even the longest context seems too short, the engine itself must say so.
    """
    needed = context_tokens(request)
    if not [view for view in fitting if view.max_model_len is not None and view.max_model_len < needed]:
        return fitting
    serving = (view for view in views if request.model in view.served and view.backend not in excluded)
    longest = max((view.max_model_len or needed for view in serving), default=needed)
    return [view for view in fitting if view.max_model_len is None or view.max_model_len >= min(needed, longest)]
