"""The choice of a backend. `policy` is what all placements share, `simple` decides by views alone, `session` keeps
sessions together, `epp` decides like the endpoint picker of llm-d, `cost` prices in seconds.
"""

from llmproxy.core.placement import cost, epp, session, simple
from llmproxy.core.placement.policy import (
    NO_CAPACITY,
    NO_MATCH,
    NO_MATCH_FOR_MODEL,
    Ledger,
    Placement,
    context_tokens,
    highest,
    make,
    presets,
    with_context,
)

__all__ = [
    "NO_CAPACITY",
    "NO_MATCH",
    "NO_MATCH_FOR_MODEL",
    "Ledger",
    "Placement",
    "context_tokens",
    "cost",
    "epp",
    "highest",
    "make",
    "presets",
    "session",
    "simple",
    "with_context",
]
