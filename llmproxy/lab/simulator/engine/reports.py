"""What an engine reports: the result of a step, the gauges that vLLM publishes after it, and its totals."""

from __future__ import annotations

from dataclasses import dataclass, fields

from llmproxy.lab.simulator.engine.kv_cache import Changes


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did; its tokens exist `duration_s` after its start. Everything in it is named by request id.

    `emitted` got one token each, in the order of admission; `finished` are those of them that got their last one;
    `admitted` left the queue, each with the prompt tokens it found cached; those of them in `wrong` found KV that is
    not that of their prompt. `fetches` are requests whose KV is to be fetched from now on, each with the tokens it has
    not. `kv_events` are batches, at most one for
    each step, each with the seconds from the start of the first step to the end of its own. There are none
    before `publish_kv_events`.
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
    """What vLLM publishes after a step.

    `waiting` counts the `deferred` ones too, which wait for an adapter slot or for KV of another engine. Of those for
    KV, `to_fetch` have not begun to get it, `fetching` are getting it, and `fetched` have it and wait for a place.
    `generated` tokens is the total since the start.
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
    """Totals since the start; queries, hits, prompt and generation are tokens.

    As in vLLM, queries and hits count the first admission of a request alone, hits those of the local cache alone, and
    a prompt counts once its first token is out. `external` are tokens from other engines and from a store. Of the
    `adapter_requests` admitted, `adapter_loads` found their adapter in no slot.
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
