"""Reads an engine's batch limit (sequences that run at once) from its published configuration."""

from __future__ import annotations

import msgspec

SERVER_INFO_PATH = "/server_info?config_format=json"
"""vLLM has this path only in development mode (VLLM_SERVER_DEV_MODE=1). SGLang always has it and ignores the query."""
SEQUENCES_MAX = 1 << 20  # A larger batch limit is not believed.


class _VllmScheduler(msgspec.Struct):
    max_num_seqs: int
    max_num_active_seqs: int | None = None


class _VllmParallel(msgspec.Struct):
    data_parallel_size: int = 1
    data_parallel_size_local: int = 1
    data_parallel_external_lb: bool = False
    data_parallel_hybrid_lb: bool = False

    @property
    def engines(self) -> int:
        """The number of engines behind this server."""
        if self.data_parallel_external_lb:
            return 1
        return self.data_parallel_size_local if self.data_parallel_hybrid_lb else self.data_parallel_size


class _VllmConfig(msgspec.Struct):
    scheduler_config: _VllmScheduler
    parallel_config: _VllmParallel = msgspec.field(default_factory=_VllmParallel)


class _Vllm(msgspec.Struct):
    vllm_config: _VllmConfig


class _SglangRank(msgspec.Struct):
    effective_max_running_requests_per_dp: int


class _Sglang(msgspec.Struct):
    internal_states: list[_SglangRank]


def parse_sequences(body: bytes) -> int | None:
    """Returns the batch limit of a server, summed over its engines.

    `body` is the answer to SERVER_INFO_PATH. Returns None if it has no limit or an impossible one.
    """
    try:
        config = msgspec.json.decode(body, type=_Vllm).vllm_config
        scheduler = config.scheduler_config
        sequences = (scheduler.max_num_active_seqs or scheduler.max_num_seqs) * config.parallel_config.engines
    except (msgspec.DecodeError, RecursionError):
        try:
            ranks = msgspec.json.decode(body, type=_Sglang).internal_states
        except (msgspec.DecodeError, RecursionError):
            return None
        sequences = sum(rank.effective_max_running_requests_per_dp for rank in ranks)
    return sequences if 0 < sequences <= SEQUENCES_MAX else None
