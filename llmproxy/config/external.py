"""The keys of external backends, which are in files or in environment variables."""

from __future__ import annotations

import os

from llmproxy.config.config import Config
from llmproxy.config.document import ConfigError
from llmproxy.config.schema.backends import BackendConfig
from llmproxy.config.value_types import is_api_key


def external_keys(config: Config) -> dict[str, str | None]:
    """Maps external backends to their keys; None without a key. Raises ConfigError, whose text has no key."""
    return {backend.name: _key_of(backend) for backend in config.backends if backend.is_external}


def _key_of(backend: BackendConfig) -> str | None:
    external = backend.external
    if external.api_key_file is not None:
        place = f"the file {external.api_key_file}"
        try:
            key = external.api_key_file.read_text().strip()
        except (OSError, ValueError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or "it is no text"
            raise ConfigError([f"backend {backend.name}: {place} with its key cannot be read: {why}"]) from None
    elif external.api_key_env is not None:
        place = f"the variable {external.api_key_env}"
        key = os.environ.get(external.api_key_env, "").strip()
    else:
        return backend.api_key
    if not is_api_key(key):
        raise ConfigError([f"backend {backend.name}: {place} should hold its key, printable and without spaces"])
    return key
