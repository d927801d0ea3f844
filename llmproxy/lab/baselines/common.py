"""Helpers of the baseline routers: candidate backends, requests in flight, and the blocks of a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from random import Random

from llmproxy.core.backends.view import View
from llmproxy.core.domain import NoCapacity, NoMatch, Placed, Request, Usage, Verdict
from llmproxy.core.placement.policy import NO_CAPACITY, NO_MATCH_FOR_MODEL, Placement, context_tokens
from llmproxy.lab.baselines.index import Block
from llmproxy.lab.baselines.policy import Surroundings


def candidates(request: Request, views: Sequence[View], excluded: frozenset[str]) -> list[View] | NoCapacity | NoMatch:
    """Returns the healthy backends that serve the model with a long enough context, whether or not they have free
    slots.

    If no context is long enough, returns all healthy backends: a router without a queue leaves the refusal to the
    engine.
    """
    up = [view for view in views if view.available]
    if not up and views:
        return NO_CAPACITY
    found = [view for view in up if request.model in view.served and view.backend not in excluded]
    if not found:
        return NO_MATCH_FOR_MODEL
    needed = context_tokens(request)
    return [view for view in found if view.max_model_len is None or view.max_model_len >= needed] or found


def prompt_blocks(request: Request, around: Surroundings) -> dict[Block, int]:
    """Maps the blocks of the prompt, in order, to their numbers of tokens. The last block may be partial.

    Blocks without an id in the trace get new ids: they match nothing, but take space in an index.
    """
    prompt, size = around.prompts[request.id], around.block_tokens
    count = -(-prompt.tokens // size)
    blocks: list[Block] = list(prompt.blocks[:count])
    blocks += [(request.id, i) for i in range(len(blocks), count)]
    sized = dict.fromkeys(blocks, size)
    if blocks:
        sized[blocks[-1]] = prompt.tokens - size * (count - 1)
    return sized


def highest(scores: Sequence[float], rng: Random) -> int:
    """Returns the index of the highest of `scores`. Ties are drawn at random."""
    best = max(scores)
    equals = [i for i, score in enumerate(scores) if score == best]
    return equals[0] if len(equals) == 1 else rng.choice(equals)


def best(views: Sequence[View], scores: Sequence[float], terms: Mapping[str, Sequence[float]], rng: Random) -> Placed:
    """Returns the view with the highest score; ties are drawn at random. `scores` and `terms` have the order of
    `views`.
    """
    at = highest(scores, rng)
    return Placed(views[at].backend, scores[at], tuple((name, part[at]) for name, part in terms.items()), len(views))


class ImmediatePlacement(Placement):
    """A router without a queue: each request gets a backend at once, so limits and bands have no effect."""

    def place(
        self, request: Request, views: Sequence[View], ceiling: float, excluded: frozenset[str], now: float
    ) -> Placed | NoCapacity | NoMatch:
        found = candidates(request, views, excluded)
        return self.choose(request, found) if isinstance(found, list) else found

    def choose(self, request: Request, views: Sequence[View]) -> Placed:
        """Chooses a backend among `views`, which must not be empty."""
        raise NotImplementedError


class Ledger:
    """The amount (requests or tokens) in flight on each backend."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[str, int]] = {}
        self._sums: dict[str, int] = {}

    def give(self, lease: int, backend: str, amount: int = 1) -> None:
        self._held[lease] = backend, amount
        self._sums[backend] = self._sums.get(backend, 0) + amount

    def take_back(self, lease: int) -> None:
        """Subtracts the amount of `lease`. A second call changes nothing."""
        backend, amount = self._held.pop(lease, ("", 0))
        left = self._sums.get(backend, 0) - amount
        if left:
            self._sums[backend] = left
        else:
            self._sums.pop(backend, None)

    def amount(self, backend: str) -> int:
        return self._sums.get(backend, 0)

    def each(self, views: Iterable[View]) -> list[int]:
        return [self._sums.get(view.backend, 0) for view in views]


class Counting(ImmediatePlacement):
    """Counts the requests in flight that this router sent."""

    def __init__(self) -> None:
        self.in_flight = Ledger()

    def booked(self, lease: int, request: Request, placed: Placed, now: float) -> None:
        self.in_flight.give(lease, placed.backend)

    def finished(self, lease: int, verdict: Verdict, usage: Usage | None, now: float) -> None:
        self.in_flight.take_back(lease)
