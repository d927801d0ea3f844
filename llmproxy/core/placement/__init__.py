"""Where a request goes. `policy` is what all share, `simple` looks at views alone, `cost` prices in seconds."""

from llmproxy.core.placement import cost, simple
from llmproxy.core.placement.policy import (
    NO_CAPACITY,
    NO_MATCH,
    NO_MATCH_FOR_MODEL,
    Placement,
    Unobserved,
    context_tokens,
    make,
    presets,
    with_context,
)

__all__ = [
    "NO_CAPACITY",
    "NO_MATCH",
    "NO_MATCH_FOR_MODEL",
    "Placement",
    "Unobserved",
    "context_tokens",
    "cost",
    "make",
    "presets",
    "simple",
    "with_context",
]
