from __future__ import annotations

import json
from typing import Any

import pytest

from llmproxy.backends.engine_config import parse_sequences


def vllm(scheduler: dict[str, Any], parallel: dict[str, Any] | None = None) -> dict[str, Any]:
    config = {"model_config": {"model": "m"}, "scheduler_config": scheduler}
    return {"vllm_config": config if parallel is None else config | {"parallel_config": parallel}, "vllm_env": {}}


def sglang(*ranks: int) -> dict[str, Any]:
    states = [{"effective_max_running_requests_per_dp": rank, "last_gen_throughput": 1.5} for rank in ranks]
    return {"max_running_requests": None, "internal_states": states, "version": "0.5"}


@pytest.mark.parametrize(
    ("answer", "sequences"),
    [
        (vllm({"max_num_seqs": 8, "max_num_active_seqs": None}), 8),
        (vllm({"max_num_seqs": 256, "max_num_active_seqs": 100}), 100),
        (vllm({"max_num_seqs": 8}, {"data_parallel_size": 4}), 32),
        (vllm({"max_num_seqs": 8}, {"data_parallel_size": 4, "data_parallel_external_lb": True}), 8),
        (
            vllm(
                {"max_num_seqs": 8},
                {"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_hybrid_lb": True},
            ),
            16,
        ),
        (sglang(128), 128),
        (sglang(52, 52), 104),
        (sglang(), None),
        (vllm({"max_num_seqs": 0}), None),
        (vllm({"max_num_seqs": 1 << 40}), None),
        (vllm({"max_num_seqs": "8"}), None),
        ({"vllm_config": "VllmConfig(max_num_seqs=8)"}, None),
        ([], None),
    ],
)
def test_the_batch_limit_of_an_engines_own_configuration(answer: Any, sequences: int | None) -> None:
    assert parse_sequences(json.dumps(answer).encode()) == sequences


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"vllm_config":', b"\xff", b"[" * 100_000])
def test_invalid_answer_gives_no_facts(body: bytes) -> None:
    assert parse_sequences(body) is None
