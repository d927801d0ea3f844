"""A Valkey, or a Redis from version 6 on, in which scripts run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmproxy.config import ConfigError


class StoreError(Exception):
    """The store cannot be asked, or refuses. The text is for people."""


class ValkeyServer:
    """The server at `url`, which the configuration key `key` names. A call takes up to `answer_s`.

    Raises ConfigError where the library is missing, or cannot use the URL.
    """

    def __init__(self, url: str, key: str, answer_s: float) -> None:
        try:
            from valkey.asyncio import Valkey
            from valkey.exceptions import ValkeyError
        except ImportError:
            need = f"{key}: valkey:// needs the library valkey: pip install 'llmproxy-lb[valkey]'"
            raise ConfigError([need]) from None
        self._failed: type[Exception] = ValkeyError
        # A call that is tried again by the library would hide how old it is.
        try:
            self.client: Any = Valkey.from_url(
                url, socket_timeout=answer_s, socket_connect_timeout=answer_s, retry_on_timeout=False
            )
        except ValueError as error:
            raise ConfigError([f"{key}: {error}"]) from None
        self._shown = url.partition("?")[0].rpartition("@")[2]

    async def run(self, script: str, keys: Sequence[str | bytes], *given: str | bytes | float) -> Any:
        """What a script returns. Raises StoreError."""
        try:
            return await self.client.eval(script, len(keys), *keys, *given)
        except (self._failed, OSError) as error:
            raise StoreError(f"{self._shown} cannot be asked: {error}") from None

    async def close(self) -> None:
        await self.client.aclose()
