"""One cache as large as those of all replicas together: what no placement of prompts can beat by much."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PooledCache:
    """The blocks used last, of `block_tokens` tokens each, `capacity_tokens` in all, looked up in order of arrival.

    Blocks are prefixes: a hit ends at the first block that is not there, and tails are evicted before heads.
    """

    def __init__(self, capacity_tokens: int, block_tokens: int) -> None:
        self._capacity = capacity_tokens // block_tokens
        self._block_tokens = block_tokens
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def serve(self, blocks: Sequence[int], prompt_tokens: int) -> int:
        """How many of `prompt_tokens` are found, after which all `blocks` of the prompt are there."""
        hits = 0
        for block in blocks:
            if block not in self._blocks:
                break
            hits += 1
        # The head is touched last, so that it is the last to go.
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
        return min(hits * self._block_tokens, prompt_tokens)
