"""The cost of an engine step for a model and GPU: coefficients and the formula.

The coefficients are least-squares fits to sums of vLLM kernel timings from the aiconfigurator database (Apache-2.0;
vLLM 0.24 for H100 and H200, 0.14 for A100). A constant step overhead is added. It was chosen on one published serving
run (one H100, Llama-3.1-8B, vLLM 0.11), whose time per output token then comes out within 1 %. 70B and A100 profiles
were never compared with a serving run. KV capacity is an estimate: 0.9 of the memory, less the weights, less 3 GB per
GPU.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Profile:
    """Coefficients of a step's cost in milliseconds; `step_s` has the formula."""

    # Linear layers: (constant, per token). A step takes the larger cost: weight reads (`small_ms`) or compute.
    small_ms: tuple[float, float]
    large_ms: tuple[float, float]
    # Attention, in addition: (per step, per token of context), and (per chunk, per squared position).
    decode_ms: tuple[float, float]
    prefill_ms: tuple[float, float]
    kv_tokens: int
    overhead_ms: float = 1.2
    # HTTP and tokenising, before the engine gets a request.
    frontend_s: float = 0.016
    adapter_factor: float = 1.05
    adapter_load_s: float = 0.010
    adapter_cold_load_s: float = 0.300
    # Factor on the compute-bound cost of a prefill token: some published runs suggest 1.9.
    prefill_factor: float = 1.0

    def step_s(
        self, decodes: int, decode_context_tokens: int, chunks: list[tuple[int, int]], adapters: bool = False
    ) -> float:
        """Returns the seconds of a step that decodes one token for each of `decodes` sequences and prefills `chunks`.

        `decode_context_tokens` is the total context of the decoded sequences. A chunk is a (first, end) range of prompt
        positions.
        """
        prefill_tokens = sum(end - first for first, end in chunks)
        if not decodes and not prefill_tokens:
            return self.overhead_ms / 1000.0
        small_ms = self.small_ms[0] + self.small_ms[1] * (decodes + prefill_tokens)
        large_ms = self.large_ms[0] + self.large_ms[1] * (decodes + self.prefill_factor * prefill_tokens)
        step_ms = self.overhead_ms + max(small_ms, large_ms)
        if decodes:
            step_ms += self.decode_ms[0] + self.decode_ms[1] * decode_context_tokens
        for first, end in chunks:
            step_ms += self.prefill_ms[0] + self.prefill_ms[1] * (end * end - first * first)
        return step_ms * (self.adapter_factor if adapters else 1.0) / 1000.0


@dataclass(frozen=True, slots=True)
class Noise:
    """Noise of step times: log-normal with `sigma`, and rare steps that take `slow_factor` times as long."""

    sigma: float = 0.05
    slow_chance: float = 1 / 2000
    slow_factor: float = 3.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.slow_chance < 1.0:
            raise ValueError(f"slow_chance must be at least 0 and below 1, got {self.slow_chance}")

    def factor(self, rng: random.Random) -> float:
        """Returns a random factor by which the next step takes longer or shorter than its profile says."""
        slow = self.slow_factor if rng.random() < self.slow_chance else 1.0
        return slow * rng.lognormvariate(0.0, self.sigma)

    def stretch_factor(self, rng: random.Random, steps: int) -> float:
        """Returns a factor for the total time of the next `steps` steps.

        Its mean is the mean of `factor`; its variance is the variance of an average over `steps` factors.
        """
        sigma = self.sigma / math.sqrt(steps)
        slow_share = self._slow_steps(rng, steps) / steps
        scatter = rng.lognormvariate((self.sigma**2 - sigma**2) / 2, sigma)
        return (1.0 + slow_share * (self.slow_factor - 1.0)) * scatter

    def _slow_steps(self, rng: random.Random, steps: int) -> int:
        """Draws the number of slow steps from a binomial distribution, as geometric gaps between them."""
        if self.slow_chance == 0.0:
            return 0
        slow, at = 0, -1
        while True:
            at += 1 + int(math.log(1.0 - rng.random()) / math.log1p(-self.slow_chance))
            if at >= steps:
                return slow
            slow += 1


PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        "llama-8b-a100": Profile((10.26, 0.00478), (6.33, 0.04915), (0.69, 8.346e-05), (1.58, 1.54e-06), 403_888),
        "llama-8b-h100": Profile((5.69, 0.00615), (0.22, 0.01791), (0.44, 4.465e-05), (0.75, 4.27e-07), 403_888),
        "llama-8b-h200": Profile((4.20, 0.00649), (0.31, 0.01846), (0.45, 3.294e-05), (0.72, 4.35e-07), 822_752),
        "llama-70b-a100-tp4": Profile((25.81, 0.09166), (18.83, 0.16019), (1.69, 5.704e-05), (2.64, 1.99e-06), 411_680),
        "llama-70b-h100-tp4": Profile((13.49, 0.04164), (2.81, 0.06808), (0.96, 2.848e-05), (1.65, 5.05e-07), 411_680),
        "llama-70b-h100-tp8": Profile((8.44, 0.03293), (5.54, 0.04426), (0.96, 1.441e-05), (1.84, 2.41e-07), 1_253_952),
        "llama-70b-h200-tp4": Profile(
            (10.47, 0.04002), (2.45, 0.06781), (1.02, 2.095e-05), (1.64, 5.09e-07), 1_081_840
        ),
        "qwen-32b-h100-tp2": Profile((12.49, 0.02124), (2.97, 0.04985), (0.80, 4.429e-05), (1.40, 8.55e-07), 276_560),
        # Not a real model: steps of about a millisecond, so that tests with real sockets do not wait for the engine.
        "tiny": Profile(
            (0.5, 0.001),
            (0.1, 0.002),
            (0.05, 1e-06),
            (0.1, 1e-08),
            kv_tokens=65_536,
            overhead_ms=0.2,
            frontend_s=0.001,
            adapter_load_s=0.001,
            adapter_cold_load_s=0.005,
        ),
    }
)


def profile_named(name: str) -> Profile:
    """Returns the profile with this name. Raises ValueError, which lists the known names."""
    try:
        return PROFILES[name]
    except KeyError:
        raise ValueError(f"there is no engine profile {name!r}; known: {', '.join(sorted(PROFILES))}") from None
