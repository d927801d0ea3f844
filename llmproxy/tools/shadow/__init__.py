"""`llmproxy shadow`: passes requests on to another router unchanged, and records them for a prediction."""

from llmproxy.tools.shadow.command import Options, ShadowError, run

__all__ = ["Options", "ShadowError", "run"]
