"""From the configuration to what the core may be told."""

from __future__ import annotations

from math import inf

from llmproxy.config.config import Config
from llmproxy.config.schema import LimitsConfig
from llmproxy.core.settings import CapacitySettings, HealthSettings, QueueSettings, Settings, UsageLimit


def settings_of(config: Config) -> Settings:
    """What the core needs to know of a configuration."""
    chosen, health, queue = config.scheduling, config.health, config.queue
    return Settings(
        fairness=chosen.fairness,
        ordering=chosen.ordering,
        placement=chosen.placement,
        charged=chosen.charged,
        ceilings=config.ceilings(),
        headroom_s=chosen.headroom_s,
        min_shares=config.by_band(chosen.min_shares),
        input_weight=chosen.input_weight,
        output_weight=chosen.output_weight,
        quantum_tokens=chosen.quantum_tokens,
        slo_window_s=chosen.slo_window_s,
        ageing_s=chosen.ageing_s,
        preemption=chosen.preemption,
        refuse_late=chosen.refuse_late,
        limits=_limits(config),
        prompt_ranges={one.name: one.prompt_tokens for one in config.backends if one.prompt_tokens is not None},
        capacity=CapacitySettings(
            start_limit=chosen.start_limit,
            look_ahead=chosen.look_ahead,
            kv_full=chosen.kv_full,
            stale_after_s=config.poll.stale_after_s,
        ),
        health=HealthSettings(
            failures=health.failures,
            backoff_s=health.backoff_s,
            backoff_max_s=health.backoff_max_s,
            unreachable_after=health.unreachable_after,
            ejected_max=health.ejected_max,
            slow_start_s=health.slow_start_s,
            hung_s=inf if health.hung_s is None else health.hung_s,
            slow_factor=inf if health.slow_factor is None else health.slow_factor,
        ),
        queue=QueueSettings(
            requests_max=queue.requests_max,
            bytes_max=queue.bytes_max,
            tokens_max=queue.tokens_max,
            band_requests_max=queue.band_requests_max,
            band_bytes_max=queue.band_bytes_max,
            band_tokens_max=queue.band_tokens_max,
            flow_requests_max=queue.flow_requests_max,
            flow_bytes_max=queue.flow_bytes_max,
            flow_tokens_max=queue.flow_tokens_max,
            hold_s=queue.hold_s,
            first_hold_s=queue.first_hold_s,
        ),
    )


def tenant_limit(name: str) -> str:
    """What the usage limit of a tenant is called in `Settings.limits` and `Request.limits`."""
    return f"tenant:{name}"


def model_limit(name: str) -> str:
    """What the usage limit of a name that clients ask for is called there."""
    return f"model:{name}"


def _limits(config: Config) -> dict[str, UsageLimit]:
    """The limits of those tenants and models that have any."""
    entries = [(tenant_limit(tenant.name), tenant.limits) for tenant in config.tenants]
    entries += [(model_limit(model.name), model.limits) for model in config.models]
    return {
        name: UsageLimit(limits.in_flight, limits.requests_per_min, limits.tokens_per_min)
        for name, limits in entries
        if limits != LimitsConfig()
    }
