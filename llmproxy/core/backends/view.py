"""The immutable snapshot of a backend that policies see."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from llmproxy.core.backends.batch_limit import slots_under
from llmproxy.core.domain import Reading, Role


class View(Struct, frozen=True):
    """The state of one backend at one moment, which placement policies get. It is replaced, never changed."""

    backend: str
    available: bool  # Whether the backend is up, not drained, not paused, and either not ejected or due for a probe.
    served: frozenset[str]  # The model names in the last `/v1/models` of the backend.
    resident: frozenset[str]  # Adapters that are believed to be loaded.
    max_adapters: int | None
    max_model_len: int | None
    prompt_range: tuple[int, int] | None  # Configured range of prompt lengths in tokens; None means any length.
    limit: int  # Batch limit: sequences that the engine runs at once.
    load: int  # Sequences in flight, including those of other clients, and slots reserved for decode stages.
    waiting: int  # Sequences in the engine's own queue at the last reading, apart from fetches of KV blocks.
    kv_used: float  # KV cache usage (0..1), including prompts booked since the last reading.
    kv_tokens: int | None  # Size of the KV cache in tokens.
    look_ahead: int  # Sequences that may be in flight above `limit`.
    kv_full_ratio: float  # KV cache usage (0..1) from which the cache counts as full.
    reading: Reading | None  # The last reading, or None if it is stale.
    warmth: float = 1.0  # Share (0..1] of `limit` that the backend should get during slow start.
    highest_ceiling: float = 1.0  # Ceiling of the highest band.
    proven_load: int = 0  # Sequences that the engine certainly runs at once (`BatchLimit.proven_with`); 0 if unknown.
    # Most seconds of prefill that unfinished prompts on the backend may need in sum; None: no bound.
    prompt_window_s: float | None = None
    probed: bool = False  # Whether the backend is ejected, the pause is over, and one request is to test it.
    stream_probe: bool = False  # Whether the probe must be a stream.
    role: Role = Role.BOTH

    def has_room(self, ceiling: float) -> bool:
        """Returns whether one more request fits on the backend under `ceiling`, the share (0..1] of the limit."""
        return rooms((self,), ceiling)[0]

    @property
    def doubtful(self) -> bool:
        """Whether one more sequence might wait inside the engine, which is not proven to run so many."""
        return 0 < self.proven_load <= self.load

    def slots(self, ceiling: float) -> int:
        """The number of sequences that may be in flight under `ceiling` (0..1]; see `slots_under`."""
        return slots_under(self.limit, ceiling, self.look_ahead, self.highest_ceiling)

    @property
    def saturation(self) -> float:
        """Load divided by the limit; 1.0 means full."""
        return self.load / self.limit


def rooms(views: Iterable[View], ceiling: float) -> list[bool]:
    """Returns for each view whether one more request fits under `ceiling`. An idle backend takes any request."""
    found = []
    for view in views:
        load, limit, look_ahead = view.load, view.limit, view.look_ahead
        if not view.available:
            found.append(False)
        elif load == 0:
            found.append(True)
        elif load >= limit + look_ahead:
            # No ceiling allows more. Checked first because it answers for every backend of a saturated fleet.
            found.append(False)
        else:
            slots = slots_under(limit, ceiling, look_ahead, view.highest_ceiling)
            found.append(load < slots and view.kv_used < view.kv_full_ratio * ceiling)
    return found
