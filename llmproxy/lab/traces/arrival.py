"""The requests of a replay: arrivals, and the trace that they make."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count

BASE_MODEL = "base"
"""What the base model of every replay is called; a request for it has no adapter."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace, with the length that its answer will have, which no policy may look at.

    `at_s` counts from the start of the trace. `blocks` names the prompt's blocks of `Trace.block_tokens` tokens each,
    the last perhaps partial: equal ids mean equal prompts from the first token to the end of that block. Ids beyond
    the prompt are those of the answer, as far as it is known; without any id nothing is shared. `adapter` is None for
    the base model. `band` is a name or an integer as in the configuration. `max_wait_s` is the longest wait in the
    queue that the client asks for; `ttft_slo_s` and `tpot_slo_s` are its own objectives, None for the fleet's. `then`
    is the next turn of a closed loop: it arrives `think_s` seconds after this answer ended, whatever its `at_s` says,
    and never when this request failed. A client whose request failed or was refused sends it again `retry_after_s`
    later, at most `retries` times: each is a request of its own. `guessed` says that the real one got none, and its
    length is an assumption. `whole`: the answer comes in one piece.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    tenant: str = "default"
    adapter: str | None = None
    band: str | int = "default"
    session: str | None = None
    max_wait_s: float | None = None
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    think_s: float = 0.0
    then: Arrival | None = None
    retries: int = 0
    retry_after_s: float = 0.0
    guessed: bool = False
    whole: bool = False

    def own_blocks(self) -> tuple[int, ...]:
        """`blocks`, distinct for each adapter: it changes all keys and values, so only its own requests share them."""
        if self.adapter is None:
            return self.blocks
        salt = zlib.crc32(self.adapter.encode()) << 64
        return tuple(salt + block for block in self.blocks)


@dataclass(frozen=True, slots=True)
class Trace:
    """Arrivals in the order of their times, read anew by every run: `arrivals()` answers the same ones each time.

    `name` is what reports call it. `block_tokens` is the size of a block in `Arrival.blocks`.
    """

    name: str
    arrivals: Callable[[], Iterator[Arrival]]
    block_tokens: int = 512


class TraceError(Exception):
    """A trace that cannot be replayed. The message is for people: file, line, reason."""


def turns_of(arrival: Arrival | None) -> Iterator[Arrival]:
    """An arrival and all turns that are chained to it."""
    while arrival is not None:
        yield arrival
        arrival = arrival.then


def chained(turns: Sequence[Arrival]) -> Arrival:
    """The turns of a closed loop as one arrival."""
    result = turns[-1]
    for turn in reversed(turns[:-1]):
        result = replace(turn, then=result)
    return result


def in_time_order(batches: Iterable[tuple[float, Iterable[Arrival]]]) -> Iterator[Arrival]:
    """The arrivals of all batches by their times; of one time, those given first come first.

    Each batch comes with a time before which neither it nor a later batch has any arrival: what is earlier is yielded,
    so that only what may still change places is held.
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
