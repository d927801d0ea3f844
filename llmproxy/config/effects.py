"""Settings that are sound and yet do nothing beside the others: told by `llmproxy check`, and no error."""

from __future__ import annotations

from llmproxy.config.config import Config
from llmproxy.config.findings import Finding
from llmproxy.config.schema import ModelConfig, ObjectiveConfig, TenantConfig

WEIGHTLESS = frozenset({"fcfs", "round_robin"})
"""Fairness policies that look at no weights; those of plugins may."""


def without_effect(config: Config) -> list[Finding]:
    """Every such setting, by its place in the configuration, and why nothing comes of it."""
    return _weights(config) + _objectives(config) + _tls(config)


def _tls(config: Config) -> list[Finding]:
    given = () if config.tls.cert is not None else ("key", "client_ca")
    reason = "has no effect without tls.cert: llmproxy serve does not start"
    return [(("tls", key), reason) for key in given if getattr(config.tls, key) is not None]


def _weights(config: Config) -> list[Finding]:
    chosen = config.scheduling
    places: list[tuple[str | int, ...]] = [
        ("tenants", i, "weight") for i, tenant in enumerate(config.tenants) if tenant.weight != 1.0
    ]
    if chosen.fairness in WEIGHTLESS:
        if chosen.weights:
            places.append(("scheduling", "weights"))
        return [(place, f"has no effect: fairness {chosen.fairness} looks at no weights") for place in places]
    if chosen.flow != "model":
        return []
    reason = "does not set tenants apart: a flow is a model (scheduling.flow), and holds the requests of all tenants"
    return [(place, reason) for place in places]


def _objectives(config: Config) -> list[Finding]:
    entries: list[ModelConfig | ObjectiveConfig | TenantConfig] = [*config.models, *config.objectives, *config.tenants]
    if any(entry.ttft_s or entry.tpot_s for entry in entries):
        return []
    chosen = config.scheduling
    nobody = "no model, tenant or objective has ttft_s or tpot_s; only trusted headers could bring objectives"
    findings: list[Finding] = []
    if chosen.fairness == "slo":
        findings.append((("scheduling", "fairness"), f"slo has nothing to go by: {nobody}"))
    if chosen.ordering == "least_slack":
        findings.append((("scheduling", "ordering"), f"least_slack has nothing to go by: {nobody}"))
    if chosen.refuse_late:
        findings.append((("scheduling", "refuse_late"), f"has no effect: {nobody}"))
    return findings
