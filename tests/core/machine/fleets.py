"""The fleets and settings of the worlds that tests of the scheduler live in, and what clients may ask for there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmproxy.core.domain import CRITICAL, DEFAULT, SHEDDABLE, Listing, Slo
from llmproxy.core.settings import Settings, UsageLimit
from tests.core.make import DEFAULTS, listing

BANDS = (CRITICAL, 7, DEFAULT, SHEDDABLE)
FLOWS = ("f", "g", "h")
ADAPTERS: Mapping[str, tuple[str | None, ...]] = {"base": (None, "x", "y"), "other": (None,)}
QUEUE_MAX = 40
BAND_MAX = 30
FLOW_MAX = 12
FOR_EVER_S = 1e6
LIMITS: Mapping[str, UsageLimit] = {
    "tenant:t": UsageLimit(in_flight=2, tokens_per_min=1e9),
    "model:m": UsageLimit(in_flight=3),
}
LIMITED_BY: tuple[tuple[str, ...], ...] = ((), ("tenant:t",), ("model:m",), ("tenant:t", "model:m"))
BOUND_TO = (None, None, None, None, None, "a", "b", "c")
"""The only backend that may have a request."""
PREFIXES: tuple[tuple[int, ...], ...] = ((), (1, 2), (1, 2, 3), (7,))
SLOS = (None, Slo(tpot_s=0.1), Slo(ttft_s=0.5), Slo(ttft_s=3.0))
MIN_SHARES: tuple[Mapping[int, float], ...] = ({}, {DEFAULT: 0.2, SHEDDABLE: 0.1})

# No sane configuration: strict priority must not rest on the ceilings being in order.
RISING_CEILINGS: Mapping[int, float] = {CRITICAL: 0.3, DEFAULT: 0.6, SHEDDABLE: 1.0}
CEILINGS: tuple[Mapping[int, float], ...] = (
    {CRITICAL: 1.0, DEFAULT: 0.95, SHEDDABLE: 0.85},
    {DEFAULT: 1.0},
    {CRITICAL: 0.9, DEFAULT: 0.6, SHEDDABLE: 0.3},
    RISING_CEILINGS,
)
FLEETS: tuple[Mapping[str, tuple[int | None, Listing]], ...] = (
    {
        "a": (3, listing("x", max_model_len=1000)),
        "b": (1, listing("x", "y", max_model_len=200)),
        "c": (None, listing(base="other", max_model_len=None)),
    },
    {
        "a": (6, listing(max_model_len=100)),
        "b": (2, listing("x", max_model_len=1000)),
        "c": (None, listing("x", "y", max_model_len=None)),
        "d": (1, listing(base="other")),
    },
    {"a": (5, listing("x", max_model_len=300)), "b": (2, listing("x", "y", max_model_len=100))},
)


def settings(**given: Any) -> Settings:
    no_backend_wait_s, window_s = given.pop("no_backend_wait_s", 2.0), given.pop("prompt_window_s", None)
    facts: dict[str, Any] = {
        "capacity": replace(
            DEFAULTS.capacity, initial_batch_limit=4, look_ahead=1, prompt_window_s=window_s, stale_after_s=5.0
        ),
        "health": replace(
            DEFAULTS.health, failures_before_ejection=2, ejection_s=1.0, ejection_max_s=4.0, misses_before_down=2
        ),
        "queue": replace(
            DEFAULTS.queue,
            requests_max=QUEUE_MAX,
            band_requests_max=BAND_MAX,
            flow_requests_max=FLOW_MAX,
            no_backend_wait_s=no_backend_wait_s,
        ),
        "slo_window_s": 20.0,
    }
    return replace(DEFAULTS, **(facts | given))
