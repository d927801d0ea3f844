"""The choice of a backend.

`policy` has the base class. The placements: `simple` reads the views alone, `session` keeps sessions on one backend,
and `cost` compares prices in seconds.
"""

from llmproxy.core.placement import cost, session, simple  # noqa: F401 - they register their presets
