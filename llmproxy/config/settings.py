"""From the configuration to what the core may be told."""

from __future__ import annotations

from llmproxy.config.schema import Config
from llmproxy.core.settings import CapacitySettings, HealthSettings, QueueSettings, Settings


def settings_of(config: Config) -> Settings:
    """What the core needs to know of a configuration."""
    chosen, health, queue = config.scheduling, config.health, config.queue
    return Settings(
        fairness=chosen.fairness,
        placement=chosen.placement,
        ceilings=config.ceilings(),
        weights=chosen.weights,
        input_weight=chosen.input_weight,
        output_weight=chosen.output_weight,
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
        ),
        queue=QueueSettings(
            requests_max=queue.requests_max,
            bytes_max=queue.bytes_max,
            band_requests_max=queue.band_requests_max,
            band_bytes_max=queue.band_bytes_max,
        ),
    )
