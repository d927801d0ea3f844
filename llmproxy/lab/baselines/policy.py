"""The definition of a baseline: its placement, the order of its queue, and its metrics interval."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from llmproxy.core.placement.policy import Placement
from llmproxy.core.policy_registry import Registry


@dataclass(frozen=True, slots=True)
class KnownPrompt:
    """The properties of a prompt that a proxy can read from its text."""

    tokens: int
    # Ids as in `Arrival.blocks`, without the answer. Each adapter has separate ids.
    blocks: tuple[int, ...]
    session: str | None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The inputs of a baseline besides the views."""

    rng: Random
    clock: Callable[[], float]
    # Request id -> prompt of the live request.
    prompts: Mapping[str, KnownPrompt]
    block_tokens: int
    # Subscribes to the KV events of the engines. Returns a function from a request id to a dict: backend -> cached
    # prompt tokens, without the backends that have none.
    kv_events: Callable[[], Callable[[str], Mapping[str, int]]]


@dataclass(frozen=True, slots=True)
class Baseline:
    """A published policy with its documented defaults."""

    name: str
    # The source of the algorithm, in one line.
    about: str
    make: Callable[[Surroundings], Placement]
    # Interval at which the policy reads metrics; None if it reads none.
    scrape_s: float | None = None


baselines: Registry[Callable[[], Baseline]] = Registry("baseline")
