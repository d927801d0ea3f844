"""The lock in Valkey, or in Redis 6 and later: a key that expires, taken and renewed by a script."""

from __future__ import annotations

import json

from llmproxy.remote.cluster.election import EPOCH_MAX, Leadership
from llmproxy.scheduling.valkey import StoreError, ValkeyServer

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
if held then
  if cjson.decode(held).holder == ARGV[1] then redis.call('DEL', KEYS[1]) end
end
return 1
"""


class ValkeyLock:
    """The lock `name` at `url`. Raises ConfigError; see `ValkeyServer`."""

    def __init__(self, url: str, name: str) -> None:
        self.name = name
        self._server = ValkeyServer(url, "cluster.lock", ANSWER_S)
        # The braces are a hash tag: both keys are in one slot of a Valkey cluster.
        self._keys = f"llmproxy:{{{name}}}:leader", f"llmproxy:{{{name}}}:epoch"

    async def take(self, wanted: Leadership, lock_s: float) -> Leadership:
        given = wanted.holder, wanted.address, wanted.epoch, round(1000 * lock_s)
        return _leadership(await self._server.run(TAKE, self._keys, *given))

    async def holder(self) -> Leadership | None:
        held = await self._server.run("return redis.call('GET', KEYS[1])", self._keys[:1])
        return None if held is None else _leadership(held)

    async def release(self, holder: str) -> None:
        await self._server.run(RELEASE, self._keys[:1], holder)

    async def close(self) -> None:
        await self._server.close()


def _leadership(held: bytes) -> Leadership:
    """Decodes the value of the lock's key. Raises StoreError if another program wrote the value."""
    try:
        found = json.loads(held)
        epoch = int(found["epoch"])
        if not 0 <= epoch <= EPOCH_MAX:
            raise ValueError(epoch)
        return Leadership(str(found["holder"]), str(found["address"]), epoch)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        raise StoreError("the key of the lock holds something else") from None
