"""Makes every step of a vLLM slower: `--logits-processors benchmarks.lab.validation.slow_steps:SlowSteps`.

A tiny model on a CPU computes tokens faster than the HTTP server of vLLM sends them. The server then neither updates
its gauges nor obeys a pause until the engine has nothing left to do. The sleep changes no rule of the scheduler.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.sample.logits_processor import LogitsProcessor  # type: ignore[import-not-found]

STEP_S = 0.01


class SlowSteps(LogitsProcessor):  # type: ignore[misc]
    """Sleeps, and leaves the logits unchanged."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        """Takes the arguments that vLLM passes, and uses none."""

    def apply(self, logits: Any) -> Any:
        """Sleeps once in every step that samples a token."""
        time.sleep(STEP_S)
        return logits

    def is_argmax_invariant(self) -> bool:
        """Returns False: for greedy requests, vLLM skips a processor that returns True."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Keeps no state."""
