"""`llmproxy batch`: sends the requests of a file, and appends each answer to a results file."""

from llmproxy.tools.batch.command import BatchOptions, run
from llmproxy.tools.batch.requests import BatchError

__all__ = ["BatchError", "BatchOptions", "run"]
