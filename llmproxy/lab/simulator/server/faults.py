"""Faults that a replica can inject, each as a real vLLM was seen to fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    """Kinds of faults. `hang` and `refuse` close the port, and only a restart ends them; the others can be cleared."""

    BUSY_503 = "busy_503"  # Generation is refused with 503 and the words of a full queue.
    DRAINING_500 = "draining_500"
    """New generation gets 500, running requests go on, `/health` is 200: vLLM with a shutdown timeout."""
    HANG = "hang"  # The port refuses, open requests get no byte and no end: vLLM after a default SIGTERM.
    STREAM_ERROR = "stream_error"
    """A stream is accepted with 200, and its first event is an error; other requests get 500."""
    ENGINE_DEAD = "engine_dead"  # Open streams end with an error event, everything else gets 500.
    ABORT = "abort"
    """All requests end at once with the finish reason `abort`, and then the fault ends: vLLM 0.32 before it stops."""
    FROZEN = "frozen"  # Nothing moves, gauges included, while `/health` says 200: a stopped worker process.
    RESET = "reset"  # The connection is reset after `after_bytes` bytes of the body; 0 is right behind the head.
    SILENT = "silent"
    """Generation is accepted and never answered, while all other pages look like the pages of an idle engine."""
    SLOW = "slow"  # Every step takes `factor` times as long: a GPU that is throttled.
    LIES = "lies"  # The gauges of load on `/metrics` say that the engine is idle, whatever runs.
    REFUSE = "refuse"  # The port refuses and every connection is cut: the process is gone.
    UNAUTHORIZED = "unauthorized"
    """Generation gets 401, whatever its key, while `/health`, `/metrics` and `/v1/models` answer."""
    RATE_LIMITED = "rate_limited"  # Generation is refused with 429.
    ERROR_RATE = "error_rate"  # A `share` of the generation requests, evenly spread, gets 500.
    DIES_OF = "dies_of"  # A request whose body contains `word` ends the engine, and the process with it.


DYING_S = 0.05  # Time after which vLLM's API server notices that its engine is dead, and ends.
PORT_CLOSING = frozenset({FaultKind.HANG, FaultKind.REFUSE})
IN_STREAMS = frozenset({FaultKind.RESET, FaultKind.SILENT, FaultKind.STREAM_ERROR})
"""Faults that `after_tokens` postpones: they hit streams only, after so many tokens."""


@dataclass(frozen=True, slots=True)
class LaterFault:
    """A fault that hits a stream after `after_tokens` tokens of a choice. See `FaultSwitch.set`."""

    kind: FaultKind
    after_tokens: int
    after_bytes: int


class FaultSwitch:
    """The present fault of a replica, if any. `changed` is called with each new fault, and with None at its end."""

    def __init__(self, changed: Callable[[FaultKind | None], None]) -> None:
        self.kind: FaultKind | None = None
        self.after_bytes = 0
        self.after_tokens = 0
        self.factor = 1.0
        self._share = self._owed = 0.0
        self._word = b""
        self._times: int | None = None
        self._dying: asyncio.TimerHandle | None = None
        self._changed = changed

    def set(
        self,
        kind: FaultKind | str,
        *,
        after_bytes: int = 0,
        after_tokens: int = 0,
        factor: float = 10.0,
        share: float = 1.0,
        word: str = "POISON",
        times: int | None = None,
    ) -> None:
        """Starts a fault. With `times`, the fault hits only so many generation requests, and then ends.

        Faults that hit all requests at once ignore `times`. With `after_tokens`, the faults of `IN_STREAMS` hit a
        stream after the events of so many tokens, and then `after_bytes` counts from there. Raises ValueError for an
        unknown kind, a factor that is not above 0, a share that is not within 0..1, or an empty word.
        """
        if self.kind in PORT_CLOSING:
            raise RuntimeError(f"the fault {self.kind} has closed the port; restart the replica first")
        if not factor > 0:
            raise ValueError(f"factor must be above 0, got {factor}")
        if not 0 < share <= 1 or not word:
            raise ValueError(f"share must be within 0..1 and word not empty, got {share} and {word!r}")
        self.kind = FaultKind(kind)
        self.after_bytes = after_bytes
        self.after_tokens = after_tokens
        self.factor = factor
        self._share, self._owed, self._word = share, 0.0, word.encode()
        self._times = times
        self._changed(self.kind)
        if self.kind is FaultKind.ABORT:
            self.clear()

    def clear(self) -> None:
        """Ends the fault. Raises RuntimeError if only a restart helps."""
        if self.kind in PORT_CLOSING:
            raise RuntimeError(f"the fault {self.kind} has closed the port; restart the replica instead")
        self.kind = None
        self._changed(None)

    def hits(self, kind: FaultKind) -> bool:
        """Returns whether the fault `kind` hits this request. A hit counts against the fault's `times`."""
        if self.kind is not kind or (self.after_tokens and kind in IN_STREAMS):
            return False
        if kind is FaultKind.ERROR_RATE:
            self._owed += self._share
            if self._owed < 1.0:
                return False
            self._owed -= 1.0
        self._count()
        return True

    def hit_later(self) -> LaterFault | None:
        """Returns the fault that will hit this stream, if any. It counts against the fault's `times` at once."""
        if self.kind is None or self.kind not in IN_STREAMS or not self.after_tokens:
            return None
        later = LaterFault(self.kind, self.after_tokens, self.after_bytes)
        self._count()
        return later

    def hit_by(self, body: bytes) -> bool:
        """Returns whether the engine dies of a request with this body."""
        return self.kind is FaultKind.DIES_OF and self._word in body

    def die(self) -> None:
        """Marks the engine as dead, and ends the process soon."""
        if self.kind is not FaultKind.ENGINE_DEAD and self.kind not in PORT_CLOSING:
            self.set(FaultKind.ENGINE_DEAD)
            self._dying = asyncio.get_running_loop().call_later(DYING_S, self.set, FaultKind.REFUSE)

    def _count(self) -> None:
        if self._times is not None:
            self._times -= 1
            if self._times <= 0:
                self.clear()

    def close(self) -> None:
        """Ignores later changes of the fault, because the replica has ended."""
        if self._dying is not None:
            self._dying.cancel()
