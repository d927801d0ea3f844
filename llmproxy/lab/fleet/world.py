"""The state that all proxies of a run share: the replicas and the live requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from llmproxy.core.domain import Stage
from llmproxy.lab.baselines.policy import KnownPrompt
from llmproxy.lab.fleet.server import SimulatedServer
from llmproxy.lab.simulator.engine.sequence import EngineRequest
from llmproxy.lab.traces.arrival import Arrival


class Blocks:
    """Converts the blocks of a trace to engine blocks and to the facts that a proxy can know."""

    def __init__(self, block_tokens: int, engine_block: int) -> None:
        assert block_tokens % engine_block == 0, "a block of the trace is no whole number of engine blocks"
        self.block_tokens = block_tokens
        self._parts = block_tokens // engine_block
        self.engine_block = engine_block

    def known(self, arrival: Arrival) -> KnownPrompt:
        count = -(-arrival.prompt_tokens // self.block_tokens)
        return KnownPrompt(arrival.prompt_tokens, arrival.own_blocks()[:count], arrival.session)

    def cached(self, arrival: Arrival) -> tuple[int, ...]:
        """Returns the full blocks of prompt and answer that the trace has."""
        return arrival.own_blocks()[: (arrival.prompt_tokens + arrival.output_tokens) // self.block_tokens]

    def hashes(self, arrival: Arrival) -> tuple[int, ...]:
        """Returns a hash for each full engine block of prompt and answer that the trace has."""
        parts = self._parts
        known_tokens = min(arrival.prompt_tokens + arrival.output_tokens, len(arrival.blocks) * self.block_tokens)
        hashes = [block * parts + i for block in arrival.own_blocks() for i in range(parts)]
        return tuple(hashes[: known_tokens // self.engine_block])


@dataclass(slots=True)
class World:
    """The replicas and the live requests. All dicts of requests are keyed by request id."""

    replicas: dict[str, SimulatedServer]
    adapters: tuple[str, ...]
    blocks: Blocks
    # Whether replicas have roles (prefill, decode).
    split_up: bool = False
    # The facts about the live requests that a proxy can know.
    prompts: dict[str, KnownPrompt] = field(default_factory=dict)
    # The arrivals of the live requests, which only the oracle may read.
    arrivals: dict[str, Arrival] = field(default_factory=dict)
    serial: Iterator[int] = field(default_factory=lambda: count(1))
    _last_sequence: tuple[str, EngineRequest] | None = None

    def enter(self, arrival: Arrival) -> str:
        request_id = str(next(self.serial))
        self.prompts[request_id] = self.blocks.known(arrival)
        self.arrivals[request_id] = arrival
        return request_id

    def sequence(self, request_id: str, name: str, stage: Stage = Stage.WHOLE) -> EngineRequest:
        """Returns the engine request with the id `name` for a stage of a live request."""
        arrival = self.arrivals[request_id]
        return EngineRequest(
            name,
            arrival.prompt_tokens,
            1 if stage is Stage.PREFILL else arrival.output_tokens,
            self.blocks.hashes(arrival),
            arrival.adapter,
            pins=stage is Stage.PREFILL,
            remote=stage is Stage.DECODE,
        )

    def sequence_of(self, request_id: str) -> EngineRequest:
        """Returns the engine request for a live request."""
        # Cached because it is needed for every replica, and again while the request waits; the hashes are many.
        if self._last_sequence is None or self._last_sequence[0] != request_id:
            self._last_sequence = request_id, self.sequence(request_id, request_id)
        return self._last_sequence[1]

    def leave(self, request_id: str) -> None:
        del self.prompts[request_id]
        del self.arrivals[request_id]
