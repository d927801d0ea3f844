"""`llmproxy top`, `explain`, `scale` and `whatif`: a running proxy, drawn in a terminal."""

from llmproxy.tools.top.ask import AskError, Target
from llmproxy.tools.top.commands import explain, scale, top, whatif

__all__ = ["AskError", "Target", "explain", "scale", "top", "whatif"]
