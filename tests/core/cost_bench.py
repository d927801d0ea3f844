"""A `CostPlacement` with a clock and backends of known prefill and decode speed."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from llmproxy.core.backends.view import View
from llmproxy.core.domain import NoMatch, Placed, Request, Usage, Verdict
from llmproxy.core.placement.cost import CostPlacement
from llmproxy.core.placement.prefix_index import PrefixIndex
from llmproxy.core.queueing.claims import Claims
from tests.core.make import request, view

NONE: frozenset[str] = frozenset()
BLOCK_TOKENS = 100.0
BOTH = frozenset({"base", "lora", "other"})
TOKEN_S = 1 / 15_000
"""Prefill time per token. All three times are the initial assumptions of the placement."""
BASE_S = 0.03
"""Fixed time per prefill."""
STEP_S = 0.01
"""Time per output token."""


class CostBench:
    """A placement with its prefix index and its leases."""

    def __init__(self, seed: int = 7, without: frozenset[str] = NONE) -> None:
        self.index = PrefixIndex()
        self.cost = CostPlacement(Random(seed), self.index, without)
        self.claims = Claims()
        self.cost.watch(self.claims)
        self.now = 0.0
        self.leases = 0

    def place(self, asked: Request, views: Sequence[View], ceiling: float = 1.0) -> Placed:
        found = self.cost.place(asked, views, ceiling, NONE, self.now)
        assert isinstance(found, Placed), found
        return found

    def waits(self, asked: Request, views: Sequence[View], ceiling: float = 1.0) -> bool:
        found = self.cost.place(asked, views, ceiling, NONE, self.now)
        if isinstance(found, NoMatch):
            assert found.later
            self.claims.add(asked, found, self.now)
            return True
        assert isinstance(found, Placed)
        return False

    def terms(self, asked: Request, on: View) -> dict[str, float]:
        return dict(self.place(asked, [on]).terms)

    def book(self, asked: Request, on: str | View) -> int:
        return self.take(asked, self.place(asked, [view(on, max_model_len=None) if isinstance(on, str) else on]))

    def take(self, asked: Request, placed: Placed) -> int:
        self.leases += 1
        if asked.id in self.claims.backends:
            self.claims.drop(asked.id)
        self.cost.booked(self.leases, asked, placed, self.now)
        return self.leases

    def finish(self, lease: int, output_tokens: int = 10, cached_tokens: int | None = None) -> None:
        usage = Usage(10, output_tokens, cached_tokens)
        self.cost.finished(lease, Verdict.SERVED, usage, self.now)

    def start(self, asked: Request, on: str | View, slower: float = 1.0, more_s: float = 0.0) -> int:
        """Books a request on a backend without other prefills. Its first byte comes `more_s` later than expected."""
        lease = self.book(asked, on)
        self.now += slower * (BASE_S + self.cost._flights[lease].work_tokens * TOKEN_S) + more_s
        self.cost.started(lease, self.now)
        return lease

    def serve(self, asked: Request, on: str | View, slower: float = 1.0, more_s: float = 0.0) -> None:
        """Serves a request alone on a backend, from its booking to its end."""
        lease = self.start(asked, on, slower, more_s)
        self.now += 9 * slower * STEP_S
        self.finish(lease)

    def teach(self, backend: str, times: int, slower: float = 1.0) -> None:
        """Serves `times` streams on a backend that is `slower` times as slow as assumed."""
        for i in range(times):
            self.serve(streamed(prompt_tokens=200 * (1 + i % 10)), backend, slower)


def streamed(**given: Any) -> Request:
    return request(**({"stream": True} | given))


def chain(first: int, blocks: int, **given: Any) -> Request:
    """Returns a request whose prompt consists of full blocks, numbered from `first`."""
    prefix = tuple(range(first, first + blocks))
    facts = {"prefix": prefix, "prefix_tokens": BLOCK_TOKENS, "prompt_tokens": int(blocks * BLOCK_TOKENS)}
    return streamed(**(facts | given))
