"""A little scripted world around one baseline: a clock, prompts, and a fleet of views."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from llmproxy.core.backends.view import View
from llmproxy.core.domain import NoCapacity, NoMatch, Placed, Request, Verdict
from llmproxy.lab.baselines import baseline_named
from llmproxy.lab.baselines.policy import KnownPrompt, Surroundings
from tests.core.make import request, view

NAMES = (
    "random",
    "round_robin",
    "least_request",
    "power_of_two",
    "cache_aware",
    "epp_blend",
    "epp_sticky",
    "dynamo_cost",
    "session",
    "vllm_router_pd",
    "llmd_pd",
    "dynamo_pd",
)
NONE: frozenset[str] = frozenset()
BLOCK = 512


class World:
    """A fleet with a clock that only the test moves. Every request arrives at the current time."""

    def __init__(self, baseline: str, seed: int = 7) -> None:
        self.now = 100.0
        self.prompts: dict[str, KnownPrompt] = {}
        self.cached: dict[str, int] = {}
        kv_events = lambda: lambda _: self.cached  # noqa: E731
        around = Surroundings(Random(seed), lambda: self.now, self.prompts, BLOCK, kv_events)
        self.policy = baseline_named(baseline).make(around)
        self._leases = 0

    def ask(
        self,
        *blocks: int,
        tokens: int | None = None,
        session: str | None = None,
        arrived_s: float | None = None,
        max_tokens: int | None = None,
        adapter: str | None = None,
    ) -> Request:
        tokens = len(blocks) * BLOCK if tokens is None else tokens
        arrived_s = self.now if arrived_s is None else arrived_s
        made = request(
            prompt_tokens=tokens,
            arrived_s=arrived_s,
            deadline_s=self.now + 60.0,
            max_tokens=max_tokens,
            adapter=adapter,
        )
        self.prompts[made.id] = KnownPrompt(tokens, blocks, session)
        return made

    def place(
        self, asked: Request, views: Sequence[View], excluded: frozenset[str] = NONE
    ) -> Placed | NoCapacity | NoMatch:
        return self.policy.place(asked, views, 1.0, excluded, self.now)

    def placed(self, asked: Request, views: Sequence[View]) -> Placed:
        found = self.place(asked, views)
        assert isinstance(found, Placed), found
        return found

    def send(self, asked: Request, views: Sequence[View]) -> tuple[str, int]:
        """Place and book, as the scheduler does; answer the backend and the lease."""
        placed = self.placed(asked, views)
        self._leases += 1
        self.policy.booked(self._leases, asked, placed, self.now)
        return placed.backend, self._leases

    def serve(self, asked: Request, views: Sequence[View]) -> str:
        """Send a request and end its answer at once."""
        backend, lease = self.send(asked, views)
        self.policy.started(lease, self.now)
        self.policy.finished(lease, Verdict.SERVED, None, self.now)
        return backend


def views(*names: str) -> list[View]:
    return [view(name, max_model_len=None) for name in names]
