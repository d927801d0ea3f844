"""The configuration: one YAML file, and what flags and the environment put over it, become one frozen `Config`."""

from llmproxy.config.kinds import Network
from llmproxy.config.load import ConfigError, Override, keys, load
from llmproxy.config.schema import (
    FAIRNESS_POLICIES,
    PLACEMENT_PRESETS,
    BackendConfig,
    Config,
    HealthConfig,
    ModelConfig,
    ObjectiveConfig,
    PollConfig,
    QueueConfig,
    RetryConfig,
    SchedulingConfig,
    TimeoutsConfig,
)
from llmproxy.config.settings import settings_of

__all__ = [
    "FAIRNESS_POLICIES",
    "PLACEMENT_PRESETS",
    "BackendConfig",
    "Config",
    "ConfigError",
    "HealthConfig",
    "ModelConfig",
    "Network",
    "ObjectiveConfig",
    "Override",
    "PollConfig",
    "QueueConfig",
    "RetryConfig",
    "SchedulingConfig",
    "TimeoutsConfig",
    "keys",
    "load",
    "settings_of",
]
