"""Makes dashboards for Grafana and rules for Prometheus that fit this version.

The files are generated, so that a test can compare each query with the metrics of the process.
"""

from llmproxy.tools.export.files import KINDS, files_of

__all__ = ["KINDS", "files_of"]
