"""The lock in Valkey, or in Redis 6 and later: a key that ends by itself, taken and renewed by a script."""

from __future__ import annotations

import json
from typing import Any

from llmproxy.cluster.election import Leadership, StoreError
from llmproxy.config import ConfigError

ANSWER_S = 5.0

TAKE = """
local held = redis.call('GET', KEYS[1])
if held then
  local now = cjson.decode(held)
  if now.holder ~= ARGV[1] then return held end
  if now.epoch >= tonumber(ARGV[3]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[4])
    return held
  end
end
local epoch = math.max(tonumber(redis.call('GET', KEYS[2]) or '0'), tonumber(ARGV[3])) + 1
redis.call('SET', KEYS[2], string.format('%.0f', epoch))
local taken = cjson.encode({holder = ARGV[1], address = ARGV[2], epoch = epoch})
redis.call('SET', KEYS[1], taken, 'PX', ARGV[4])
return taken
"""
RELEASE = """
local held = redis.call('GET', KEYS[1])
if held and cjson.decode(held).holder == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
"""


class ValkeyLock:
    """The lock of the cluster `name` at `url`. Raises ConfigError where the library is missing."""

    def __init__(self, url: str, name: str) -> None:
        try:
            from valkey.asyncio import Valkey
            from valkey.exceptions import ValkeyError
        except ImportError:
            need = "cluster.lock: valkey:// needs the library valkey: pip install 'llmproxy-lb[valkey]'"
            raise ConfigError([need]) from None
        self._failed: type[Exception] = ValkeyError
        # A renewal that is tried again by the library would hide how old it is.
        try:
            self._client: Any = Valkey.from_url(
                url, socket_timeout=ANSWER_S, socket_connect_timeout=ANSWER_S, retry_on_timeout=False
            )
        except ValueError as error:
            raise ConfigError([f"cluster.lock: {error}"]) from None
        # The braces put both keys into one slot of a cluster of servers.
        self._keys = f"llmproxy:{{{name}}}:leader", f"llmproxy:{{{name}}}:epoch"
        self._shown = url.partition("?")[0].rpartition("@")[2]

    async def take(self, wanted: Leadership, held_s: float) -> Leadership:
        """See `LockStore.take`."""
        held = await self._run(TAKE, 2, *self._keys, wanted.holder, wanted.address, wanted.epoch, round(1000 * held_s))
        return _leadership(held)

    async def holder(self) -> Leadership | None:
        """See `LockStore.holder`."""
        held = await self._run("return redis.call('GET', KEYS[1])", 1, self._keys[0])
        return None if held is None else _leadership(held)

    async def release(self, holder: str) -> None:
        """See `LockStore.release`."""
        await self._run(RELEASE, 1, self._keys[0], holder)

    async def _run(self, script: str, *given: Any) -> Any:
        try:
            return await self._client.eval(script, *given)
        except (self._failed, OSError) as error:
            raise StoreError(f"{self._shown} cannot be asked: {error}") from None

    async def close(self) -> None:
        await self._client.aclose()


def _leadership(held: bytes) -> Leadership:
    """Raises StoreError for a key that is not ours."""
    try:
        found = json.loads(held)
        return Leadership(str(found["holder"]), str(found["address"]), int(found["epoch"]))
    except (ValueError, TypeError, KeyError):
        raise StoreError("the key of the lock holds something else") from None
