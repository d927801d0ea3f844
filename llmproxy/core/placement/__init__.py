"""The choice of a backend.

`policy` has the base class. There are three kinds of placements: `simple` uses only the views, `session` sends a
session to one backend, and `cost` compares prices in seconds.
"""

from llmproxy.core.placement import cost, session, simple  # noqa: F401 - they register their presets
