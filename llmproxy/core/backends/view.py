"""The frozen view of a backend that policies decide on."""

from __future__ import annotations

from msgspec import Struct

from llmproxy.core.backends.batch_limit import slots_under
from llmproxy.core.domain import Reading, Role


class View(Struct, frozen=True):
    """One backend at one instant, as policies see it.

    `load` counts sequences in flight, ours and other clients'. `limit` is how many may run at once. `waiting` are the
    sequences in the engine's own queue at the last reading. `kv_used` (0..1) includes prompts booked since that
    reading; `kv_tokens` is the size of the KV-cache. `prompt_range` are the prompt lengths that the backend is meant
    for, in tokens; None means any. `reading` is the last one, while it is fresh. `warmth` (0..1] is the share of its
    limit that the backend should have during slow start. `highest_ceiling` is the ceiling of the highest band. `sure`
    is the number of sequences that were seen to run at once, here or on another engine of the pool; 0 where unknown.
    `prompt_window_s` is how long the prompts given to it may take; None for any time. `role` is what the backend is
    meant to compute. `probed`: the backend is ejected, its pause is over, and one request is to test it; with
    `stream_probe` that request must be a stream.
    """

    backend: str
    available: bool
    served: frozenset[str]
    resident: frozenset[str]
    max_adapters: int | None
    max_model_len: int | None
    prompt_range: tuple[int, int] | None
    limit: int
    load: int
    waiting: int
    kv_used: float
    kv_tokens: int | None
    look_ahead: int
    kv_full: float
    reading: Reading | None
    warmth: float = 1.0
    highest_ceiling: float = 1.0
    sure: int = 0
    prompt_window_s: float | None = None
    probed: bool = False
    stream_probe: bool = False
    role: Role = Role.BOTH

    def has_room(self, ceiling: float) -> bool:
        """Whether one more request may be sent under `ceiling`; an idle backend takes anything."""
        if not self.available:
            return False
        load, limit, look_ahead = self.load, self.limit, self.look_ahead
        if load == 0:
            return True
        # No ceiling allows more. Checked first because it answers for every backend of a saturated fleet.
        if load >= limit + look_ahead:
            return False
        slots = slots_under(limit, ceiling, look_ahead, self.highest_ceiling)
        return load < slots and self.kv_used < self.kv_full * ceiling

    @property
    def doubtful(self) -> bool:
        """One more sequence might wait inside the engine: no more than the current load was ever seen to run."""
        return 0 < self.sure <= self.load

    def slots(self, ceiling: float) -> int:
        """How many sequences may be in flight under `ceiling`, the look-ahead included."""
        return slots_under(self.limit, ceiling, self.look_ahead, self.highest_ceiling)

    @property
    def saturation(self) -> float:
        """Load over capacity; 1 = full."""
        return self.load / self.limit
