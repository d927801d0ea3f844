"""Usage limits that hold for several proxies together: their rates are kept in a store that all of them ask.

A request is asked for before it comes to the waiting room. What waits to be asked goes in one call, and one call is on
its way at a time, so that a busy proxy asks for many requests at once. Corrections go along, or follow shortly.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

import structlog

from llmproxy.config import Config, settings_of
from llmproxy.core.domain import Outcome, Refused, Request
from llmproxy.core.queueing.rates import (
    MINUTE_S,
    TOKENS,
    Rate,
    RateLimits,
    RateName,
    amount,
    expected,
    limit_rates,
    used_up,
)
from llmproxy.core.settings import UsageLimit
from llmproxy.scheduling import gcra
from llmproxy.scheduling.valkey import StoreError, ValkeyServer

ANSWER_S = 0.5
"""The store is away when it has not answered after this."""
CONNECT_S = 3.0
"""So long it may take to connect to one that is away, or was not asked yet. No request waits for that."""
RETRY_S = 1.0
"""How often a store that is away is asked again."""
LOOK_S = 5.0
"""How often a store that nobody needs is asked."""
CORRECT_S = 0.1
"""Corrections wait so long for a request with which they can go."""
ASKS_MAX = 256
CORRECTIONS_MAX = 1024
"""More in one call would keep the store from others for milliseconds."""
NOT_ASKED = "it was not asked yet"

_log = structlog.get_logger()


class Store(Protocol):
    """Runs a script as a whole; see `ValkeyServer`."""

    async def run(self, script: str, keys: Sequence[str | bytes], *given: str | bytes | float) -> object:
        """Raises StoreError."""

    async def close(self) -> None: ...


class _Rate(NamedTuple):
    """One rate in the store. `unit_s` is how long it takes to get one request or token back."""

    key: bytes
    unit_s: float
    rate: Rate


@dataclass(slots=True)
class _Charge:
    """What was taken in the store for a request that has not ended, by the rates of that time.

    `entered`: the waiting room took the request. `settled`: its tokens were counted.
    """

    rates: tuple[_Rate, ...]
    tokens: float
    entered: bool = False
    settled: bool = False


@dataclass(slots=True, eq=False)
class _Ask:
    """A request about which the store is to be asked. `answered` is whether it could be, or the refusal of the request.

    That is no exception, which nobody would look at where the client has left.
    """

    request_id: str
    charge: _Charge
    answered: asyncio.Future[Refused | bool]


class SharedLimits:
    """`Rates` in a store. After `connect`, `run` asks it for as long as this is used.

    While the store is away, requests with a rate are refused. Where `proxies` is given, this proxy lets them pass
    instead, up to that part of each limit which falls to one of so many.
    """

    @classmethod
    def from_config(cls, config: Config) -> SharedLimits | None:
        """What the configuration says, None where limits are not shared. Raises ConfigError; see `ValkeyServer`."""
        chosen = config.shared_limits
        if chosen.store is None:
            return None
        store = ValkeyServer(chosen.store, "shared_limits.store", CONNECT_S)
        return cls(store, chosen.name, settings_of(config).limits, chosen.proxies)

    def __init__(self, store: Store, name: str, limits: Mapping[str, UsageLimit], proxies: int | None) -> None:
        self._store = store
        self._name = name
        self._proxies = proxies
        self._rates: dict[str, tuple[_Rate, ...]] = {}
        self._alone = None if proxies is None else RateLimits({})
        self._asks: deque[_Ask] = deque()
        self._charges: dict[str, _Charge] = {}
        self._owed: dict[bytes, float] = {}
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self.away: str | None = NOT_ASKED
        """Why the store cannot be asked."""
        self.reconfigure(limits, 0.0)

    # --- for requests -------------------------------------------------------------------------------------------------

    async def reserve(self, request: Request) -> None:
        """Take a new request from its rates in the store, before `admit`.

        Raises Refused: `rate_limited` where a rate is used up, `rejected_limits_away` where nobody can tell.
        """
        rates = tuple(rate for name in request.limits for rate in self._rates.get(name, ()))
        if not rates:
            return
        if self.away is None:
            charge = _Charge(rates, expected(request))
            ask = _Ask(request.id, charge, asyncio.get_running_loop().create_future())
            self._asks.append(ask)
            self._wake.set()
            answer = await ask.answered
            if isinstance(answer, Refused):
                raise answer
            if answer:
                return
        if self._alone is None:
            message = "The limits of this tenant or model cannot be checked at the moment. Try again."
            raise Refused(Outcome.REJECTED_LIMITS_AWAY, message, RETRY_S)

    def admit(self, request: Request, now: float) -> None:
        """See `Rates.admit`, of a request that was reserved, or could not be."""
        charge = self._charges.get(request.id)
        if charge is not None:
            charge.entered = True
        elif self._alone is not None:
            self._alone.admit(request, now)

    def used(self, request: Request, tokens: float, now: float) -> None:
        """See `Rates.used`."""
        charge = self._charges.get(request.id)
        if charge is not None:
            self._correct(charge, 0.0, tokens - (0.0 if charge.settled else charge.tokens))
            charge.settled = True
        elif self._alone is not None:
            self._alone.used(request, tokens, now)

    def ended(self, request: Request, now: float) -> None:
        """See `Rates.ended`. A request that never came to the waiting room has taken nothing."""
        charge = self._charges.pop(request.id, None)
        if charge is not None:
            self._correct(charge, 0.0 if charge.entered else -1.0, 0.0 if charge.settled else -charge.tokens)
        elif self._alone is not None:
            self._alone.ended(request, now)

    def left_per_min(self, name: str, now: float) -> tuple[float | None, float | None]:
        """The store is not asked for what is left."""
        del name, now
        return None, None

    def debts(self, now: float) -> dict[RateName, float]:
        """None: the store has them."""
        del now
        return {}

    def restore(self, debts: Mapping[RateName, float], now: float) -> None:
        """The store has them."""

    def reconfigure(self, limits: Mapping[str, UsageLimit], now: float) -> None:
        """Apply other limits. What was taken stays taken as a part of a minute, however much that now is."""
        self._rates = {name: tuple(map(self._in_store, limit_rates(limits, (name,)))) for name in limits}
        if self._alone is not None and self._proxies is not None:
            self._alone.reconfigure({name: limit.split(self._proxies) for name, limit in limits.items()}, now)

    def _in_store(self, rate: Rate) -> _Rate:
        limit, kind, per_min = rate
        # The braces put all keys into one slot of a cluster of servers. A name is the last part, whatever it holds.
        key = f"llmproxy:{{{self._name}}}:{kind}:{limit}".encode(errors="surrogatepass")
        return _Rate(key, MINUTE_S / per_min, rate)

    def _correct(self, charge: _Charge, requests: float, tokens: float) -> None:
        for key, unit_s, (_, kind, _) in charge.rates:
            count = tokens if kind == TOKENS else requests
            if count:
                if self._timer is None:
                    self._timer = asyncio.get_running_loop().call_later(CORRECT_S, self._wake.set)
                self._owed[key] = self._owed.get(key, 0.0) + count * unit_s

    # --- the store ----------------------------------------------------------------------------------------------------

    async def connect(self) -> None:
        """Find out whether the store is there."""
        while await self._exchange():
            pass

    async def run(self) -> None:
        """Ask the store what requests want to know, and whether it is there, until cancelled."""
        try:
            while True:
                there = self.away is None
                if there:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_S):
                            await self._wake.wait()
                else:
                    await asyncio.sleep(RETRY_S)
                await self.connect()
                if there and self.away is not None:
                    # It may have been the connection alone.
                    await self.connect()
        finally:
            self._unanswered([])

    async def close(self) -> None:
        """Give back what ended requests did not use, if the store is there, and leave it."""
        if self.away is None:
            await self.connect()
        if self._timer is not None:
            self._timer.cancel()
        await self._store.close()

    async def _exchange(self) -> bool:
        """Ask once. Whether more waits to be asked."""
        self._wake.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        asks = [self._asks.popleft() for _ in range(min(len(self._asks), ASKS_MAX))]
        owed = {key: self._owed.pop(key) for key in list(islice(self._owed, CORRECTIONS_MAX))}
        more = bool(self._asks or self._owed)
        keys, given = gcra.question([_taken(ask.charge) for ask in asks], owed)
        clock = asyncio.get_running_loop().time
        asked_s, limit_s = clock(), ANSWER_S if self.away is None else CONNECT_S
        try:
            async with asyncio.timeout(limit_s):
                said = gcra.answers(await self._store.run(gcra.SCRIPT, keys, *given), len(asks))
        except (StoreError, TimeoutError) as error:
            self._failed(str(error) or f"it does not answer within {limit_s:g} s", asks, owed)
            return False
        except asyncio.CancelledError:
            self._unanswered(asks)
            raise
        except Exception as bug:  # noqa: BLE001 - without this loop, every request would wait for an answer
            self._failed(f"{type(bug).__name__}: {bug}", asks, owed)
            return False
        if self.away is not None:
            if clock() - asked_s > ANSWER_S:
                # Connecting took time, or the store is slow: the next answer tells.
                return True
            if self.away is not NOT_ASKED:
                _log.info("limits_store_back")
            self.away = None
        for ask, (wait_s, longest) in zip(asks, said, strict=True):
            self._answer(ask, wait_s, longest)
        return more

    def _answer(self, ask: _Ask, wait_s: float, longest: int) -> None:
        if wait_s > 0.0:
            if not ask.answered.done():
                ask.answered.set_result(used_up(ask.charge.rates[longest].rate, wait_s))
        elif ask.answered.done():
            # The client has left meanwhile.
            self._correct(ask.charge, -1.0, -ask.charge.tokens)
        else:
            self._charges[ask.request_id] = ask.charge
            ask.answered.set_result(True)

    def _failed(self, why: str, asks: list[_Ask], owed: Mapping[bytes, float]) -> None:
        """The store is away. What it may have taken or given back already counts as taken."""
        if self.away in (None, NOT_ASKED):
            _log.warning("limits_store_away", why=why, on_failure="closed" if self._alone is None else "share")
        self.away = why
        for key, seconds in owed.items():
            if seconds > 0.0:
                self._owed[key] = self._owed.get(key, 0.0) + seconds
        self._unanswered(asks)

    def _unanswered(self, asks: list[_Ask]) -> None:
        """Say to these, and to all that wait, that nobody can tell."""
        waiting = [*asks, *self._asks]
        self._asks.clear()
        for ask in waiting:
            if not ask.answered.done():
                ask.answered.set_result(False)


def _taken(charge: _Charge) -> list[tuple[bytes, float]]:
    return [(key, unit_s * amount(kind, charge.tokens)) for key, unit_s, (_, kind, _) in charge.rates]
