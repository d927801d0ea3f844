"""`llmproxy top` and `llmproxy explain`: the state of a proxy, and the story of a request, in a terminal."""

from llmproxy.top.ask import AskError, Target
from llmproxy.top.commands import explain, top

__all__ = ["AskError", "Target", "explain", "top"]
