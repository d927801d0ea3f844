"""Arrivals, which are the requests of a replay, and traces, which are sequences of arrivals."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count

BASE_MODEL = "base"  # The name of the base model in every replay. A request for it has no adapter.


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace: when it arrives, how long prompt and answer are, and who sends it."""

    # Seconds from the start of the trace.
    at_s: float
    prompt_tokens: int
    # The length of the answer. No policy may read it.
    output_tokens: int
    # Ids of the prompt's blocks of `Trace.block_tokens` tokens; the last block may be partial. Equal ids mean equal
    # prompts from the first token to the end of that block. Further ids are blocks of the answer, as far as known.
    # A prompt without ids shares nothing.
    blocks: tuple[int, ...] = ()
    tenant: str = "default"
    # Name of the requested adapter; None for the base model.
    adapter: str | None = None
    # The name of a band or an integer, as in the configuration.
    band: str | int = "default"
    session: str | None = None
    # The client's limit of the wait in the queue; None for the limit in the configuration.
    max_wait_s: float | None = None
    # The client's objectives; None for the objectives of the fleet.
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    # The next turn of a closed loop. It arrives `think_s` after this answer ends, whatever its `at_s`, and never if
    # this request fails.
    think_s: float = 0.0
    then: Arrival | None = None
    # Whether `output_tokens` is an assumption, because the real request got no answer.
    guessed: bool = False
    # Whether the answer comes as a whole, and not as a stream.
    whole: bool = False

    def own_blocks(self) -> tuple[int, ...]:
        """Returns `blocks` with distinct ids for each adapter: requests of different adapters share no KV cache."""
        if self.adapter is None:
            return self.blocks
        salt = zlib.crc32(self.adapter.encode()) << 64
        return tuple(salt + block for block in self.blocks)


@dataclass(frozen=True, slots=True)
class Trace:
    """Arrivals in the order of their times. Each call of `arrivals()` yields the same arrivals.

    Reports show `name`. `block_tokens` is the size of a block in `Arrival.blocks`.
    """

    name: str
    arrivals: Callable[[], Iterator[Arrival]]
    block_tokens: int = 512


class TraceError(Exception):
    """A trace that cannot be replayed. The message is for people: file, line, reason."""


def turns_of(arrival: Arrival | None) -> Iterator[Arrival]:
    """Yields an arrival and all later requests of its closed loop."""
    while arrival is not None:
        yield arrival
        arrival = arrival.then


def chained(turns: Sequence[Arrival]) -> Arrival:
    """Returns the turns of a closed loop as one arrival."""
    result = turns[-1]
    for turn in reversed(turns[:-1]):
        result = replace(turn, then=result)
    return result


def in_time_order(batches: Iterable[tuple[float, Iterable[Arrival]]]) -> Iterator[Arrival]:
    """Yields the arrivals of all batches in the order of their times; arrivals with equal times keep their order.

    No arrival of a batch, or of a later batch, is earlier than the batch's time. So only arrivals after that time stay
    in memory.
    """
    due: list[tuple[float, int, Arrival]] = []
    serial = count()
    for since_s, batch in batches:
        while due and due[0][0] < since_s:
            yield heappop(due)[2]
        for arrival in batch:
            heappush(due, (arrival.at_s, next(serial), arrival))
    while due:
        yield heappop(due)[2]
