"""Rate limits shared by proxies. For each limit, the store has the time at which the limit is unused again.

A rate of N per minute refills by 1 every 60/N s. Amounts are therefore counted in seconds on the store's clock: taking
an amount of 5 s moves the stored time by 5 s. The stored time is equivalent to a token bucket of one minute, and its
key expires by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import orjson

from llmproxy.core.queueing.rate_limits import MINUTE_S
from llmproxy.scheduling.valkey import StoreError

DEBT_MAX_S = 86_400  # The longest debt. It bounds the refusals after a proxy crashed before it refunded its charges.

SCRIPT = """
local asked = cjson.decode(ARGV[1])
local minute, kept = tonumber(ARGV[2]), tonumber(ARGV[3])
local time = redis.call('TIME')
-- Seconds since 2026: a smaller number is exact to nanoseconds.
local now = tonumber(time[1]) - 1767225600 + tonumber(time[2]) / 1000000
local back, changed = {}, {}
for i, key in ipairs(KEYS) do
  -- A key of another type, or with another text or number, is none of ours: it counts as nothing, and is replaced.
  local held = redis.pcall('GET', key)
  local at = type(held) == 'string' and tonumber(held) or now
  back[i] = at > now and at <= now + kept and at or now
end
for _, one in ipairs(asked.corrections) do
  local i = one[1]
  back[i], changed[i] = math.max(now, back[i] + one[2]), true
end
local answers = {}
for _, ask in ipairs(asked.asks) do
  local wait, longest = 0, 0
  for j, one in ipairs(ask) do
    -- An ask above the burst is taken from a full rate.
    local lacking = math.min(one[2], minute) - minute + back[one[1]] - now
    if lacking > 0.000001 and lacking > wait then wait, longest = lacking, j end
  end
  if wait == 0 then
    for _, one in ipairs(ask) do
      back[one[1]], changed[one[1]] = back[one[1]] + one[2], true
    end
  end
  answers[#answers + 1] = math.ceil(wait * 1000)
  answers[#answers + 1] = longest
end
for i in pairs(changed) do
  if back[i] > now then
    local left = math.min(back[i] - now, kept)
    redis.call('SET', KEYS[i], string.format('%.17g', now + left), 'PX', string.format('%.0f', math.ceil(left * 1000)))
  else
    redis.call('DEL', KEYS[i])
  end
end
return answers
"""
"""Applies the corrections, then each ask as a whole or not at all. Returns two numbers for each ask: the milliseconds
to wait and the place (from 1) of the rate with this wait; 0 and 0 if the ask was taken."""

Taken = Iterable[tuple[bytes, float]]  # An ask, the charge of one request: (key, seconds to take) for each rate.


def script_arguments(
    asks: Sequence[Taken], corrections: Mapping[bytes, float]
) -> tuple[list[bytes], tuple[bytes, float, int]]:
    """Returns the keys and the arguments of the script. `corrections` (key -> seconds) are applied first."""
    places: dict[bytes, int] = {}

    def place(key: bytes) -> int:
        return places.setdefault(key, len(places) + 1)

    text = orjson.dumps(
        {
            "asks": [[(place(key), seconds) for key, seconds in ask] for ask in asks],
            "corrections": [(place(key), seconds) for key, seconds in corrections.items()],
        }
    )
    return list(places), (text, MINUTE_S, DEBT_MAX_S)


def parse_result(said: object, asks: int) -> list[tuple[float, int]]:
    """Returns for each ask the seconds to wait, and the index of the rate that is used up. Raises StoreError."""
    if not isinstance(said, list) or len(said) != 2 * asks or not all(isinstance(one, int) for one in said):
        raise StoreError(f"the store answers {str(said)[:100]!r}")
    return [(wait_ms / 1000.0, longest - 1) for wait_ms, longest in zip(said[::2], said[1::2], strict=True)]
