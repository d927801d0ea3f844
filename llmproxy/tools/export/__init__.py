"""Files for Prometheus and Grafana that fit this version: dashboards, rules and a scrape configuration.

They are made by code, so that a test can compare each query with the metrics that the process has.
"""

from llmproxy.tools.export.files import KINDS, files_of

__all__ = ["KINDS", "files_of"]
