"""The cached blocks that a subscriber to the engines' KV events knows: 10 ms late, and wrong after lost events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import takewhile

from llmproxy.lab.fleet.world import World
from llmproxy.lab.simulator.engine.kv_cache import Changes

DELAY_S = 0.010  # Delay between the end of a step and the moment when a subscriber has applied its events.


class KvEvents:
    """A proxy's subscriptions to all replicas, and its index of the cached blocks.

    vLLM publishes one batch of events per step, and does not repeat a lost batch. The index then lacks the blocks
    stored in that step, and keeps the removed blocks, until a later batch corrects this or the replica's process ends.
    """

    def __init__(self, world: World, clock: Callable[[], float]) -> None:
        self._world = world
        self._clock = clock
        self._found_for: tuple[str, float] | None = None
        self._found: dict[str, int] = {}
        self._lines = {name: _Subscription() for name in world.replicas}
        for name, line in self._lines.items():
            world.replicas[name].subscribe(line)

    def cached_tokens(self, request_id: str) -> dict[str, int]:
        """Maps replicas to cached prompt tokens of a live request, without replicas that have none."""
        # `booked` needs the same answer as `place`, and the lookup at every replica is slow.
        key = request_id, self._clock()
        if key != self._found_for:
            self._found_for, self._found = key, self._look_up(*key)
        return self._found

    def _look_up(self, request_id: str, now: float) -> dict[str, int]:
        sequence, block_tokens = self._world.sequence_of(request_id), self._world.blocks.engine_block
        # An engine always computes the last token of a prompt.
        hashes = sequence.hashes[: (sequence.prompt_tokens - 1) // block_tokens]
        found = {}
        for name, line in self._lines.items():
            self._world.replicas[name].catch_up()
            line.apply(now - DELAY_S)
            if blocks := sum(1 for _ in takewhile(line.held.__contains__, hashes)):
                found[name] = blocks * block_tokens
        return found


class _Subscription:
    """The subscription to one replica: event batches in transit, and the known blocks of its cache."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self._coming: deque[tuple[float, Changes]] = deque()

    def published(self, at_s: float, changes: Changes) -> None:
        self._coming.append((at_s, changes))

    def broken(self) -> None:
        self._coming.clear()
        self.held.clear()

    def apply(self, until_s: float) -> None:
        """Applies every batch that was published at `until_s` or before."""
        while self._coming and self._coming[0][0] <= until_s:
            _, changes = self._coming.popleft()
            self.held |= changes.stored
            self.held -= changes.removed
