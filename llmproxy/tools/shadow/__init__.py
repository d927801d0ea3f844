"""`llmproxy shadow`: passes requests on to another router unchanged, and records them for a prediction."""

from llmproxy.tools.shadow.command import ShadowError, ShadowOptions, run

__all__ = ["ShadowError", "ShadowOptions", "run"]
