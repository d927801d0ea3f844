"""Runs inside vLLM, given as `--logits-processors benchmarks.validation.slow_steps:SlowSteps`: makes every step last.

A tiny model on a CPU computes tokens faster than its own HTTP server hands them out, and that server then neither shows
its gauges nor obeys a pause until the engine has run dry. Sleeping changes no rule, only how much of them can be seen.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.sample.logits_processor import LogitsProcessor  # type: ignore[import-not-found]

STEP_S = 0.01


class SlowSteps(LogitsProcessor):  # type: ignore[misc]
    """Leaves the logits as they are, after a while."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        """Needs nothing of what vLLM reports to it."""

    def apply(self, logits: Any) -> Any:
        """Called once in every step that samples a token."""
        time.sleep(STEP_S)
        return logits

    def is_argmax_invariant(self) -> bool:
        """What says yes is skipped for greedy requests."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Keeps no state."""
