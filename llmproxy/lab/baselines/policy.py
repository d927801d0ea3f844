"""What a replay can be run under: a named placement, its waiting room, and how old its readings are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from llmproxy.core.placement.policy import Placement
from llmproxy.core.policy_registry import Registry


@dataclass(frozen=True, slots=True)
class KnownPrompt:
    """What a proxy can know of a prompt because it holds the text: its length, its blocks, and whose session it is.

    `blocks` are ids as in `Arrival.blocks`, of the prompt alone, made distinct for each adapter.
    """

    tokens: int
    blocks: tuple[int, ...]
    session: str | None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a baseline may use beside the views: `prompts` of the live requests by request id, and a clock.

    `kv_events()` subscribes to the engines' KV events. It answers with a function from a request id to the tokens of
    that prompt that each backend is known to have cached, as far as events have come; those without any are left out.
    """

    rng: Random
    clock: Callable[[], float]
    prompts: Mapping[str, KnownPrompt]
    block_tokens: int
    kv_events: Callable[[], Callable[[str], Mapping[str, int]]]


@dataclass(frozen=True, slots=True)
class Baseline:
    """A published policy with its documented defaults.

    `scrape_s` is how often it reads the replicas' metrics, None where it never does. `fairness` orders its waiting
    room, which stays empty where it binds at once. `about` says in one line whose algorithm it is.
    """

    name: str
    about: str
    make: Callable[[Surroundings], Placement]
    scrape_s: float | None = None
    fairness: str = "fcfs"


baselines: Registry[Callable[[], Baseline]] = Registry("baseline")
