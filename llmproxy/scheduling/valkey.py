"""A client of Valkey, or of Redis 6 and later, that runs scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmproxy.config import ConfigError


class StoreError(Exception):
    """The store is unreachable, or returned an error. The text is for people."""


class ValkeyServer:
    """The server at `url`, which the configuration names under `key`. Raises ConfigError."""

    def __init__(self, url: str, key: str, answer_s: float) -> None:
        try:
            from valkey.asyncio import Valkey
            from valkey.exceptions import ValkeyError
        except ImportError:
            need = f"{key}: valkey:// needs the library valkey: pip install 'llmproxy-lb[valkey]'"
            raise ConfigError([need]) from None
        self._failed: type[Exception] = ValkeyError
        # A retry inside the library would hide the age of a call.
        try:
            self.client: Any = Valkey.from_url(
                url, socket_timeout=answer_s, socket_connect_timeout=answer_s, retry_on_timeout=False
            )
        except ValueError as error:
            raise ConfigError([f"{key}: {error}"]) from None
        self._shown = url.partition("?")[0].rpartition("@")[2]

    async def run(self, script: str, keys: Sequence[str | bytes], *given: str | bytes | float) -> Any:
        """Returns the result of a script. Raises StoreError."""
        try:
            return await self.client.eval(script, len(keys), *keys, *given)
        except (self._failed, OSError) as error:
            raise StoreError(f"a request to {self._shown} failed: {error}") from None

    async def close(self) -> None:
        await self.client.aclose()
