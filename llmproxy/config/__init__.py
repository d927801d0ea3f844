"""The configuration: one YAML file, and what flags and the environment put over it, become one frozen `Config`."""

from llmproxy.config.config import Config
from llmproxy.config.kinds import Network, hash_of, is_api_key
from llmproxy.config.load import ConfigError, Override, keys, load, warnings_of
from llmproxy.config.schema import (
    BackendConfig,
    HealthConfig,
    KeyConfig,
    LimitsConfig,
    ModelConfig,
    ObjectiveConfig,
    PollConfig,
    QueueConfig,
    RetryConfig,
    SchedulingConfig,
    TenantConfig,
    TimeoutsConfig,
)
from llmproxy.config.settings import model_limit, settings_of, tenant_limit
from llmproxy.core.placement import presets

PLACEMENT_PRESETS = presets.names()
"""The presets that need no plugin."""

__all__ = [
    "PLACEMENT_PRESETS",
    "BackendConfig",
    "Config",
    "ConfigError",
    "HealthConfig",
    "KeyConfig",
    "LimitsConfig",
    "ModelConfig",
    "Network",
    "ObjectiveConfig",
    "Override",
    "PollConfig",
    "QueueConfig",
    "RetryConfig",
    "SchedulingConfig",
    "TenantConfig",
    "TimeoutsConfig",
    "hash_of",
    "is_api_key",
    "keys",
    "load",
    "model_limit",
    "settings_of",
    "tenant_limit",
    "warnings_of",
]
