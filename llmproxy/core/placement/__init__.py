"""The choice of a backend. `policy` is what all placements share, `simple` decides by views alone, `session` keeps
sessions together, `epp` decides like the endpoint picker of llm-d, `cost` prices in seconds.
"""

from llmproxy.core.placement import cost, epp, session, simple  # noqa: F401 - they register their presets
