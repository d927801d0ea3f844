"""The fields of `/debug/live` that `top` and `whatif` read.

They are checked once before they are drawn.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from llmproxy.tools.top.ask import AskError


class Summary(Struct, frozen=True):
    """The state of the proxy in a sentence."""

    level: str
    text: str


class ClusterSeen(Struct, frozen=True):
    """The members of the cluster and its leader; None if the leader is unknown."""

    leader: str | None
    members: tuple[str, ...]


class Minute(Struct, frozen=True):
    """Counts of requests that ended in the last `span_s` seconds."""

    span_s: float
    completed: int
    refused: int
    failed: int
    cancelled: int
    retries: int
    preemptions: int
    outcomes: dict[str, int] = msgspec.field(default_factory=dict)  # Requests that were refused or failed, by outcome.


class Quantiles(Struct, frozen=True):
    """Quantiles in seconds; None without requests."""

    p50: float | None
    p95: float | None
    p99: float | None


class Band(Struct, frozen=True):
    """A band, with the requests of all pools together. The times are measured over the last minute."""

    band: str
    waiting: int
    oldest_s: float
    grants_per_s: float
    reasons: tuple[str, ...]
    wait_s: Quantiles
    ttft_s: Quantiles


class Backend(Struct, frozen=True):
    backend: str
    role: str
    state: str
    why: str
    since_s: float
    pool: str | None
    load: int
    limit: int | None
    kv_used: float | None
    output_tokens_per_s: float
    hit_share: float | None
    tokens_slower: float | None


class Flow(Struct, frozen=True):
    """A flow with requests in the last minute, or with waiting requests."""

    band: str
    flow: str
    tokens_per_s: float
    share: float | None
    due: float | None
    weight: float
    waiting: int
    oldest_s: float


class Pool(Struct, frozen=True):
    pool: str


class Event(Struct, frozen=True):
    """An event of the proxy or of a backend. `at_s` is on the same clock as `Document.now_s`."""

    at_s: float
    level: str
    event: str
    backend: str | None
    text: str


class Document(Struct, frozen=True):
    """The answer of `/debug/live`. The newest event is the first."""

    version: str
    fairness: str
    now_s: float
    unix_s: Annotated[float, Meta(ge=0.0, lt=1e11)]
    summary: Summary
    minute: Minute
    bands: tuple[Band, ...]
    pools: tuple[Pool, ...]
    backends: tuple[Backend, ...]
    more_backends: int
    flows: tuple[Flow, ...]
    events: tuple[Event, ...]
    row: dict[str, float]
    cluster: ClusterSeen | None = None


Read = TypeVar("Read", bound=Struct)


def read(found: dict[str, Any], kind: type[Read]) -> Read:
    """Converts an answer of the proxy to `kind`. Raises AskError if its fields differ, as in another version."""
    try:
        return msgspec.convert(found, kind)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise AskError(f"this is not what this version of llmproxy reads: {error}") from None
