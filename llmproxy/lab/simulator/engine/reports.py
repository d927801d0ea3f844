"""Reports of an engine: the result of a step, the gauges that vLLM publishes after a step, and totals."""

from __future__ import annotations

from dataclasses import dataclass, fields

from llmproxy.lab.simulator.engine.kv_cache import Changes


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step, or of several steps of `Engine.advance`. Requests are given by their ids.

    - `duration_s`: Seconds from the start of the step until its tokens exist.
    - `emitted`: Requests that got one token each, in order of admission.
    - `finished`: Requests that got their last token.
    - `admitted`: Requests that left the queue, each with its number of cached prompt tokens.
    - `wrong`: Admitted requests that found KV blocks of another prompt.
    - `fetches`: Requests whose KV blocks must be fetched from now on, each with its number of missing tokens.
    - `kv_events`: At most one batch per step. Its time is the end of that step, in seconds from the start of the first
      step. Empty until `Engine.publish_kv_events` is called.
    """

    duration_s: float
    emitted: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()
    admitted: tuple[tuple[str, int], ...] = ()
    preempted: tuple[str, ...] = ()
    fetches: tuple[tuple[str, int], ...] = ()
    wrong: tuple[str, ...] = ()
    prefill_tokens: int = 0
    decode_tokens: int = 0
    kv_events: tuple[tuple[float, Changes], ...] = ()


@dataclass(frozen=True, slots=True)
class Gauges:
    """The gauges that vLLM publishes after a step.

    `waiting` includes `deferred`: requests that wait for an adapter slot or for KV blocks of another engine. A request
    that needs such blocks is counted in `to_fetch` before its transfer, in `fetching` during it, and in `fetched` after
    it, until it is admitted. `generated` is the total number of tokens since the start.
    """

    running: int = 0
    waiting: int = 0
    deferred: int = 0
    kv_used: float = 0.0
    running_adapters: tuple[str, ...] = ()
    to_fetch: int = 0
    fetching: int = 0
    fetched: int = 0
    generated: int = 0


@dataclass(slots=True)
class Counters:
    """Totals since the start. Queries, hits, prompt and generation are in tokens.

    As in vLLM, queries and hits count only the first admission of a request, hits only in the local cache, and a prompt
    counts with its first output token. `external` counts tokens from other engines and from a store. `adapter_requests`
    counts requests with an adapter, and `adapter_loads` the part of them whose adapter was in no slot.
    """

    prefix_queries: int = 0
    prefix_hits: int = 0
    external: int = 0
    preemptions: int = 0
    prompt: int = 0
    generation: int = 0
    steps: int = 0
    adapter_requests: int = 0
    adapter_loads: int = 0

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))
