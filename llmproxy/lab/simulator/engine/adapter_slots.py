"""The LoRA adapters of one engine: in the batch, in GPU slots, in host memory and on disk.

vLLM computes at most `max_loras` adapters in a batch. It has as many GPU slots, and `max_cpu_loras` adapters in host
memory; both evict the least recently used adapter. An adapter is copied from host memory, or first read from disk.
"""

from __future__ import annotations

from collections import OrderedDict

from llmproxy.lab.simulator.engine.profiles import Profile


class AdapterSlots:
    """The adapters of one engine, at most `slots` in a batch. `None` is the base model, which needs no slot."""

    def __init__(self, slots: int, host_slots: int, profile: Profile) -> None:
        if host_slots < slots:
            raise ValueError(f"max_cpu_loras must be at least max_loras, {slots}; got {host_slots}")
        self._limit = slots
        self._host_limit = host_slots
        self._profile = profile
        self._users: dict[str, int] = {}
        self._resident: OrderedDict[str, None] = OrderedDict()
        self._host: OrderedDict[str, None] = OrderedDict()

    @property
    def in_batch(self) -> tuple[str, ...]:
        return tuple(self._users)

    def fits(self, adapter: str | None) -> bool:
        """Returns whether a request of `adapter` may join the batch."""
        return adapter is None or adapter in self._users or len(self._users) < self._limit

    def enter(self, adapter: str | None) -> float:
        """Adds a request that `fits` to the batch. Returns the seconds for loading its adapter."""
        if adapter is None:
            return 0.0
        self._users[adapter] = self._users.get(adapter, 0) + 1
        load_s = 0.0
        if adapter not in self._resident:
            known = adapter in self._host
            load_s = self._profile.adapter_load_s if known else self._profile.adapter_cold_load_s
            if len(self._resident) >= self._limit:
                del self._resident[next(name for name in self._resident if name not in self._users)]
        self._resident[adapter] = None
        self._host[adapter] = None
        self._resident.move_to_end(adapter)
        self._host.move_to_end(adapter)
        if len(self._host) > self._host_limit:
            del self._host[next(name for name in self._host if name not in self._resident)]
        return load_s

    def leave(self, adapter: str | None) -> None:
        """Removes a request from the batch. Its adapter stays in its slot until another adapter needs the slot."""
        if adapter is None:
            return
        self._users[adapter] -= 1
        if not self._users[adapter]:
            del self._users[adapter]
