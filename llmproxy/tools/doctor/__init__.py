"""Looks at replicas before the proxy serves them (`llmproxy doctor`), and writes a configuration (`llmproxy init`)."""

from llmproxy.tools.doctor.look import Problem, Replica, look_at
from llmproxy.tools.doctor.report import fleet_problems, report

__all__ = ["Problem", "Replica", "fleet_problems", "look_at", "report"]
