"""The table of routes: served and absent paths, and the completeness of its page in the docs."""

from __future__ import annotations

import re

from llmproxy.backends.adapter_keeper import PATHS
from llmproxy.gateway.http.routes import LOAD_ADAPTER, SCHEDULED, UNLOAD_ADAPTER, Dialect
from tests import ROOT

MANAGEMENT = (
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters", "/sleep", "/wake_up", "/pause", "/resume",
    "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/collective_rpc", "/server_info",
    "/update_weights", "/start_weight_update", "/finish_weight_update", "/init_weight_transfer_engine",
    "/scale_elastic_ep", "/is_scaling_elastic_ep", "/abort_requests", "/inference/v1/abort_requests",
    "/release_kv_cache_memory", "/start_profile", "/stop_profile", "/invocations", "/load",
    "/shutdown_weight_transfer_engine", "/start_draft_weight_update", "/update_weight_version", "/weight_info",
    "/weight_checker", "/get_world_size", "/is_sleeping", "/is_paused", "/kv_event_sources", "/adapters/{adapter_name}",
    "/init_weights_update_group", "/fault_tolerance",
)  # fmt: skip


def test_adapters_are_changed_at_vllms_own_paths() -> None:
    assert set(PATHS.values()) == {LOAD_ADAPTER, UNLOAD_ADAPTER}


def test_the_docs_list_exactly_the_routes_of_the_table() -> None:
    page = (ROOT / "docs" / "reference" / "routes.md").read_text()
    rows = re.findall(r"^\| ([a-z ]+) \| (OpenAI|Anthropic) \| (`/.*`) \|$", page, re.MULTILINE)
    listed = {path: (dialect, work) for work, dialect, paths in rows for path in paths.strip("`").split("`, `")}
    table = {p: ("Anthropic" if r.dialect is Dialect.ANTHROPIC else "OpenAI", r.work) for p, r in SCHEDULED.items()}
    assert listed == table
