"""`llmproxy top`, `explain`, `scale` and `whatif`: show the state of a running proxy in a terminal."""

from llmproxy.tools.top.ask import AskError, ProxyAddress
from llmproxy.tools.top.commands import explain, scale, top, whatif

__all__ = ["AskError", "ProxyAddress", "explain", "scale", "top", "whatif"]
