"""Derives the settings of the scheduling core from a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from math import inf
from typing import Any

from llmproxy.config.config import Config
from llmproxy.config.schema.backends import ExternalConfig
from llmproxy.config.schema.requests import SchedulingConfig
from llmproxy.config.schema.section import Section
from llmproxy.core.domain import Role
from llmproxy.core.settings import (
    CapacitySettings,
    Disaggregation,
    External,
    HealthSettings,
    QueueSettings,
    ScalingSettings,
    Settings,
    Splitting,
    UsageLimit,
)


def settings_of(config: Config) -> Settings:
    """Returns the settings of the core that a configuration describes."""
    scheduling, health = config.scheduling, config.health
    return Settings(
        **_same_names(Settings, scheduling, but=("ceilings", "min_shares", "disaggregation")),
        disaggregation=_disaggregation(scheduling),
        ceilings=config.ceilings(),
        min_shares=config.by_band(scheduling.min_shares),
        limits=_limits(config),
        unlisted={model.name: model.base for model in config.models if model.base is not None},
        prompt_ranges={one.name: one.prompt_tokens for one in config.backends if one.prompt_tokens is not None},
        externals={one.name: _external(config, one.external) for one in config.backends if one.is_external},
        roles={one.name: Role(one.role) for one in config.backends if one.role != Role.BOTH},
        capacity=CapacitySettings(**_same_names(CapacitySettings, scheduling), stale_after_s=config.poll.stale_after_s),
        health=HealthSettings(
            **_same_names(HealthSettings, health, but=("hung_s", "slow_factor")),
            hung_s=inf if health.hung_s is None else health.hung_s,
            slow_factor=inf if health.slow_factor is None else health.slow_factor,
        ),
        queue=QueueSettings(**_same_names(QueueSettings, config.queue)),
        scaling=ScalingSettings(
            **_same_names(ScalingSettings, config.scaling, but=("from_band",)),
            from_band=config.band(config.scaling.from_band),
        ),
    )


def _external(config: Config, external: ExternalConfig) -> External:
    return External(
        frozenset(external.models),
        external.price_per_million_input or 0.0,
        external.price_per_million_output or 0.0,
        inf if external.only_above_wait_s is None else external.only_above_wait_s,
        external.max_per_day or 0.0,
        config.band(external.from_band),
        external.price_per_million_cached,
    )


def _disaggregation(scheduling: SchedulingConfig) -> Disaggregation:
    chosen = scheduling.disaggregation
    if isinstance(chosen, int):
        return Disaggregation(Splitting.TOKENS, scheduling.kv_lease_s, chosen)
    return Disaggregation(Splitting(chosen), scheduling.kv_lease_s)


def _same_names(settings: type, section: Section, but: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the values of the fields that `section` and the class `settings` both have, except the names in `but`."""
    names = {field.name for field in fields(settings)} & type(section).model_fields.keys()
    return {name: getattr(section, name) for name in names - set(but)}


def tenant_limit(name: str) -> str:
    """Returns the name of a tenant's usage limit in `Settings.limits` and `Request.limits`."""
    return f"tenant:{name}"


def model_limit(name: str) -> str:
    """Returns the name of a model's usage limit in `Settings.limits` and `Request.limits`."""
    return f"model:{name}"


def _limits(config: Config) -> dict[str, UsageLimit]:
    entries = [(tenant_limit(tenant.name), tenant.limits) for tenant in config.tenants]
    entries += [(model_limit(model.name), model.limits) for model in config.models]
    usage = [(name, UsageLimit(**_same_names(UsageLimit, limits))) for name, limits in entries]
    return {name: limit for name, limit in usage if limit != UsageLimit()}
