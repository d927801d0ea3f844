"""Proxies over replicas with roles."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from llmproxy.lab.simulator.replica import ReplicaOptions
from llmproxy.scheduling.attempt import Split
from tests.e2e.proxies import FAST, ProxyUnderTest, serving

NIXL = replace(FAST, kv_transfer="nixl", kv_latency_s=0.0, kv_handshake_s=0.0)


@asynccontextmanager
async def split(
    *options: ReplicaOptions,
    roles: str = "prefill decode",
    how: str | int = "always",
    scheduling: dict[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[ProxyUnderTest]:
    """A proxy over these replicas, which have these roles in their order; two that transfer KV without any."""
    named = {f"b{number}": role for number, role in enumerate(roles.split())}
    wanted = {"disaggregation": how, **(scheduling or {})}
    async with serving(*(options or (NIXL, NIXL)), roles=named, scheduling=wanted, **config) as proxy:
        yield proxy


def hows(proxy: ProxyUnderTest) -> dict[str, float]:
    """How requests were served, and how often."""
    found = {how.value: proxy.metric("llmproxy_disaggregation_total", mode=how.value) for how in Split}
    return {name: count for name, count in found.items() if count}
