"""The choices of the endpoint picker of llm-d and the Gateway API Inference Extension (EPP, v0.10).

It has two default configurations: `epp_blend` is the weighted sum of scores of EPP's default code, `epp_sticky` the
"sticky until saturated" of its newer guides. Filters, scorers, weights and thresholds are as documented there.
Differences:

* Only backends with room are candidates, and a request waits if there are none. EPP's flow control, with one gate for
  the whole pool, is not used.
* Prompts are hashed in whole blocks of 512 bytes, not in blocks of 64 tokens with a partial last block. Prompt lengths
  come from the learned bytes per token, not from four bytes per token.
* Two known defects of its index are fixed, as in later versions: heads evicted before their tails, and a capacity of
  16-token blocks counted in 64-token blocks.
* A backend whose process is gone is forgotten at once, not within two minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from llmproxy.core.backends.view import View
from llmproxy.core.domain import NoCapacity, NoMatch, Placed, Request, Usage, Verdict
from llmproxy.core.placement.policy import Placement, fitting
from llmproxy.core.placement.prefix_index import PrefixIndex
from llmproxy.lab.baselines.common import Ledger, highest

PROMPT_TOKENS_MAX = 131_072
"""Only this many tokens at the beginning of a prompt are looked up and recorded."""
INDEX_TOKENS = 31_250 * 64
"""Capacity of the prefix index per backend while the size of its KV cache is unknown: blocks times tokens per block."""
TOKEN_LOAD_FULL = 4_194_304


class Index(Protocol):
    """The prompt blocks that were recently sent to each backend; see `PrefixIndex`."""

    def match(self, hashes: Sequence[int]) -> dict[str, int]: ...

    def record(self, backend: str, hashes: Sequence[int]) -> None: ...

    def resize(self, backend: str, blocks: int) -> None: ...

    def forget(self, backend: str) -> None: ...


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """The length of a prompt, and its `blocks` of `block_tokens` each."""

    tokens: int
    blocks: Sequence[int]
    block_tokens: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend that may be chosen for one prompt."""

    view: View
    # Share of the prompt's blocks that the backend has probably cached, 0..1.
    match: float
    cached_tokens: int
    # Uncached tokens of this prompt.
    new_tokens: int
    # Uncached tokens of earlier prompts without a first byte.
    tokens_in_flight: int


@dataclass(frozen=True, slots=True)
class Scored:
    """The candidates that passed a profile's filters. Scores and terms are in the same order."""

    kept: Sequence[Candidate]
    scores: Sequence[float]
    terms: Mapping[str, Sequence[float]]


Profile = Callable[[Sequence[Candidate]], Scored]
"""EPP's scheduling profile: filters and weighted scorers. The highest score wins; ties are drawn at random."""


def blend(queue: float = 2.0, kv: float = 2.0, prefix: float = 3.0) -> Profile:
    """queue-scorer, kv-cache-utilization-scorer and prefix-cache-scorer, weighted.

    The queue score is min-max normalized over the candidates, so a difference of one request weighs as much as a
    difference of fifty. Queue and KV cache usage come from the last reading, so all requests between two readings see
    the same best backend.
    """

    def scored(candidates: Sequence[Candidate]) -> Scored:
        readings = [candidate.view.reading for candidate in candidates]
        waiting = [reading.waiting if reading is not None else 0 for reading in readings]
        shortest, longest = min(waiting), max(waiting)
        spread = longest - shortest
        queues = [(longest - w) / spread if spread else 1.0 for w in waiting]
        kvs = [1.0 - ((reading.kv_used or 0.0) if reading is not None else 0.0) for reading in readings]
        prefixes = [candidate.match for candidate in candidates]
        scores = [queue * q + kv * k + prefix * p for q, k, p in zip(queues, kvs, prefixes, strict=True)]
        return Scored(candidates, scores, {"queue": queues, "kv": kvs, "prefix": prefixes})

    return scored


def sticky(match: float = 0.8, penalty_s: float = 18.0, rate: float = 15_928.0) -> Profile:
    """prefix-cache-affinity-filter, then token-load-scorer.

    A backend is warm if it has at least the share `match` of the prompt's blocks. If there are warm backends, only they
    are candidates, unless the least loaded of them would begin more than `penalty_s` later than the least loaded other
    backend, at `rate` prompt tokens per second. With `penalty_s` 0 there is no such exception. The candidate with the
    fewest tokens in flight, this prompt's uncached tokens included, wins.
    """

    def warm_candidates(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        warm = [candidate for candidate in candidates if candidate.match >= match]
        others = [candidate for candidate in candidates if candidate.match < match]
        if not warm or not others:
            return candidates
        ahead_tokens = min(one.tokens_in_flight for one in warm) - min(one.tokens_in_flight for one in others)
        return candidates if penalty_s and ahead_tokens / rate > penalty_s else warm

    def scored(candidates: Sequence[Candidate]) -> Scored:
        kept = warm_candidates(candidates)
        loads = [candidate.tokens_in_flight + candidate.new_tokens for candidate in kept]
        scores = [1.0 - min(1.0, load / TOKEN_LOAD_FULL) for load in loads]
        return Scored(kept, scores, {"tokens": loads, "match": [candidate.match for candidate in kept]})

    return scored


class EndpointPicker(Placement):
    """A profile with its prefix index and the work in flight.

    Work in flight is counted in uncached prompt tokens, until the first byte. Prompts (not answers) are indexed when a
    request is sent, before it succeeds.
    """

    def __init__(self, rng: Random, profile: Profile, index: Index | None = None) -> None:
        self._rng = rng
        self._profile = profile
        self._index: Index = PrefixIndex() if index is None else index
        self._kv_tokens: dict[str, int] = {}
        self.tokens_in_flight = Ledger()

    def place(
        self, request: Request, views: Sequence[View], ceiling: float, excluded: frozenset[str], now: float
    ) -> Placed | NoCapacity | NoMatch:
        found = fitting(request, views, ceiling, excluded)
        return self.choose(request, found) if isinstance(found, list) else found

    def choose(self, request: Request, views: Sequence[View]) -> Placed:
        """Returns the choice. `views` must not be empty."""
        prompt = self.prompt(request)
        blocks = self._known_blocks(prompt)
        matches = self._index.match(blocks)
        candidates = []
        for view in views:
            matched = matches.get(view.backend, 0)
            cached_tokens = min(prompt.tokens, round(matched * prompt.block_tokens))
            candidates.append(
                Candidate(
                    view,
                    match=matched / len(blocks) if blocks else 0.0,
                    cached_tokens=cached_tokens,
                    new_tokens=prompt.tokens - cached_tokens,
                    tokens_in_flight=self.tokens_in_flight.amount(view.backend),
                )
            )
        scored = self._profile(candidates)
        at = highest(scored.scores, self._rng)
        chosen = scored.kept[at]
        self._fit_index(chosen.view, prompt)
        terms = tuple((name, part[at]) for name, part in scored.terms.items())
        return Placed(chosen.view.backend, scored.scores[at], terms, len(views), chosen.cached_tokens)

    def prompt(self, request: Request) -> PromptBlocks:
        """Returns the length and blocks of the prompt of `request`."""
        return PromptBlocks(request.prompt_tokens, request.prefix, request.prefix_tokens)

    def booked(self, lease: int, request: Request, placed: Placed, now: float) -> None:
        prompt = self.prompt(request)
        self.tokens_in_flight.give(lease, placed.backend, prompt.tokens - placed.cached_tokens)
        self._index.record(placed.backend, self._known_blocks(prompt))

    def started(self, lease: int, now: float) -> None:
        self.tokens_in_flight.take_back(lease)

    def finished(self, lease: int, verdict: Verdict, usage: Usage | None, now: float) -> None:
        self.tokens_in_flight.take_back(lease)

    def lost(self, backend: str) -> None:
        self._index.forget(backend)
        # The index forgot its capacity too, so `_fit_index` must set it again.
        self._kv_tokens.pop(backend, None)

    def _known_blocks(self, prompt: PromptBlocks) -> Sequence[int]:
        if not prompt.blocks:
            return ()
        return prompt.blocks[: max(1, int(PROMPT_TOKENS_MAX / prompt.block_tokens))]

    def _fit_index(self, view: View, prompt: PromptBlocks) -> None:
        """Make the index of this backend as large as its KV cache."""
        known = view.reading.kv_tokens if view.reading is not None else None
        # A size stays valid when later readings fail.
        kv_tokens = known or self._kv_tokens.get(view.backend, INDEX_TOKENS)
        if prompt.blocks and self._kv_tokens.get(view.backend) != kv_tokens:
            self._kv_tokens[view.backend] = kv_tokens
            self._index.resize(view.backend, max(1, int(kv_tokens / prompt.block_tokens)))


ENDPOINT_PICKERS: Mapping[str, Callable[[Random], EndpointPicker]] = {
    "epp_blend": lambda rng: EndpointPicker(rng, blend()),
    "epp_sticky": lambda rng: EndpointPicker(rng, sticky()),
}
"""The default configurations by name. Requests wait in the proxy's waiting room."""
