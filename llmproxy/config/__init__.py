"""The configuration: reads a YAML file, the environment and flags into one frozen `Config`, checks it, reloads it."""

from llmproxy.config.changes import changes_between, with_reloadable
from llmproxy.config.config import Config
from llmproxy.config.core_settings import model_limit, settings_of, tenant_limit
from llmproxy.config.document import ConfigError
from llmproxy.config.entries import Entries
from llmproxy.config.keys import keys, keys_of_files
from llmproxy.config.load import Override, load, load_backends, unused_settings, warnings_of
from llmproxy.config.schema.backends import BackendConfig, BackendTlsConfig, DiscoveryConfig, PollConfig
from llmproxy.config.schema.process import ClientsConfig, ClusterConfig, ClusterTlsConfig, TlsConfig
from llmproxy.config.schema.requests import ModelConfig, ObjectiveConfig, SchedulingConfig, TenantConfig, TimeoutsConfig
from llmproxy.config.value_types import (
    AUTO_SALT,
    DNS,
    SRV,
    TRUST_WORDS,
    Network,
    api_key_name,
    hash_of,
    is_api_key,
    nearest,
)
from llmproxy.config.watched import WatchedFile
from llmproxy.core.placement.policy import presets

PLACEMENT_PRESETS = presets.names()  # Placements that need no plugin.

__all__ = [
    "AUTO_SALT",
    "DNS",
    "PLACEMENT_PRESETS",
    "SRV",
    "TRUST_WORDS",
    "BackendConfig",
    "BackendTlsConfig",
    "ClientsConfig",
    "ClusterConfig",
    "ClusterTlsConfig",
    "Config",
    "ConfigError",
    "DiscoveryConfig",
    "Entries",
    "ModelConfig",
    "Network",
    "ObjectiveConfig",
    "Override",
    "PollConfig",
    "SchedulingConfig",
    "TenantConfig",
    "TimeoutsConfig",
    "TlsConfig",
    "WatchedFile",
    "api_key_name",
    "changes_between",
    "hash_of",
    "is_api_key",
    "keys",
    "keys_of_files",
    "load",
    "load_backends",
    "model_limit",
    "nearest",
    "settings_of",
    "tenant_limit",
    "unused_settings",
    "warnings_of",
    "with_reloadable",
]
