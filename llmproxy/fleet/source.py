"""What a source of backends is: it returns its whole set of them at each look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llmproxy.config import BackendConfig

BACKENDS_MAX = 1_024
"""The most backends of one source."""


class SourceFailedError(Exception):
    """A source did not answer, or its answer makes no sense."""


class BackendSource(Protocol):
    """A source of backends."""

    @property
    def interval_s(self) -> float:
        """Time between two looks."""

    async def look(self) -> Sequence[BackendConfig] | None:
        """All backends of the source, None where nothing has changed since the last look. Raises SourceFailedError."""

    async def close(self) -> None:
        """Stop what goes on between looks."""
