"""Makes files for Prometheus, Grafana and autoscalers that fit this version.

They are dashboards, rules, a scrape configuration and manifests. The files are generated, so that a test can compare
each query with the metrics of the process.
"""

from llmproxy.tools.export.files import KINDS, files_of

__all__ = ["KINDS", "files_of"]
