"""`llmproxy top`, `llmproxy explain` and `llmproxy scale`: a running proxy, drawn in a terminal."""

from llmproxy.top.ask import AskError, Target
from llmproxy.top.commands import explain, scale, top

__all__ = ["AskError", "Target", "explain", "scale", "top"]
