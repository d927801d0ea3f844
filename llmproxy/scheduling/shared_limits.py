"""Usage limits that several proxies share: the used rates are in a store that all of these proxies use.

A request is charged in the store before it enters the waiting room. Only one call to the store is in flight at a time,
and it charges all requests that wait, so a busy proxy charges many requests per call. Corrections go with the next
call, or follow shortly.
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
from llmproxy.core.queueing.rate_limits import (
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

ANSWER_S = 0.5  # Timeout of a call, after which the store counts as away (unreachable).
CONNECT_S = 3.0  # Timeout of a call to a store that is away or was never called. No request waits for such a call.
RETRY_S = 1.0  # Interval of calls to a store that cannot be reached, in seconds.
LOOK_S = 5.0  # Interval of calls to an idle store in seconds, to notice that it cannot be reached.
CORRECT_S = 0.1  # The longest time that corrections wait for a request whose call they can join.
ASKS_MAX = 256
CORRECTIONS_MAX = 1024  # Maximum number of corrections in a call. A larger call would block the store for milliseconds.
NOT_ASKED = "it was not asked yet"

_log = structlog.get_logger()


class Store(Protocol):
    """Runs scripts atomically in a store that proxies share, such as Valkey."""

    async def run(self, script: str, keys: Sequence[str | bytes], *given: str | bytes | float) -> object:
        """Runs a script with these keys and arguments, and returns its result. Raises StoreError."""

    async def close(self) -> None: ...


class _Rate(NamedTuple):
    """A shared rate limit, as the store counts it."""

    key: bytes
    unit_s: float  # Seconds in which the rate refills by one request or token.
    rate: Rate


@dataclass(slots=True)
class _Charge:
    """The charge of a request that has not ended."""

    rates: tuple[_Rate, ...]  # The rates at the time of the charge.
    tokens: float  # Expected tokens of the request, charged on arrival.
    entered: bool = False  # Whether the waiting room has admitted the request.
    corrected: bool = False  # Whether real tokens of an attempt have been charged already.


@dataclass(slots=True, eq=False)
class _Ask:
    """A request that waits for its charge in the store."""

    request_id: str
    charge: _Charge
    # True: the request was charged. False: the store cannot be reached. Refused is a result rather than an exception,
    # because asyncio would log the exception as never retrieved if the client has left.
    answered: asyncio.Future[Refused | bool]


class SharedLimits:
    """`Rates` in a store. Call `connect` once, then `run` in a task.

    While the store is away, requests with a rate are refused. With `proxies`, this proxy instead enforces its own share
    of each limit: the limit divided by `proxies`.
    """

    @classmethod
    def from_config(cls, config: Config) -> SharedLimits | None:
        """Returns the limits of a configuration; None if limits are not shared. Raises ConfigError."""
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
        self.away: str | None = NOT_ASKED  # Why the store cannot be reached, None if it can.
        self.reconfigure(limits, 0.0)

    # --- for requests -------------------------------------------------------------------------------------------------

    async def reserve(self, request: Request) -> None:
        """Charges a new request in the store, before `admit`. A cancelled charge is refunded. Raises Refused."""
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
            raise Refused(Outcome.REJECTED_LIMITS_UNAVAILABLE, message, RETRY_S)

    def admit(self, request: Request, now: float) -> None:
        """Records a request that `reserve` has charged. Without the store, applies this proxy's share."""
        charge = self._charges.get(request.id)
        if charge is not None:
            charge.entered = True
        elif self._alone is not None:
            self._alone.admit(request, now)

    def resume(self, request: Request) -> None:
        """Does nothing, because members of a cluster have no store of limits."""

    def used(self, request: Request, tokens: float, now: float) -> None:
        charge = self._charges.get(request.id)
        if charge is not None:
            self._correct(charge, 0.0, tokens - (0.0 if charge.corrected else charge.tokens))
            charge.corrected = True
        elif self._alone is not None:
            self._alone.used(request, tokens, now)

    def ended(self, request: Request, now: float) -> None:
        """Refunds expected tokens that were never used; all of the charge if the request was not admitted."""
        charge = self._charges.pop(request.id, None)
        if charge is not None:
            self._correct(charge, 0.0 if charge.entered else -1.0, 0.0 if charge.corrected else -charge.tokens)
        elif self._alone is not None:
            self._alone.ended(request, now)

    def left_per_min(self, name: str, now: float) -> tuple[float | None, float | None]:
        """Returns (None, None), because reading these numbers would need a call to the store."""
        del name, now
        return None, None

    def debts(self, now: float) -> dict[RateName, float]:
        """Returns an empty dict, because the store has the debts."""
        del now
        return {}

    def restore(self, debts: Mapping[RateName, float], now: float) -> None:
        """Does nothing, because the store has the debts."""

    def reconfigure(self, limits: Mapping[str, UsageLimit], now: float) -> None:
        """Applies other limits. Half of an old rate that is used up makes half of the new rate used up."""
        self._rates = {name: tuple(map(self._in_store, limit_rates(limits, (name,)))) for name in limits}
        if self._alone is not None and self._proxies is not None:
            self._alone.reconfigure({name: limit.split(self._proxies) for name, limit in limits.items()}, now)

    def _in_store(self, rate: Rate) -> _Rate:
        limit, kind, per_min = rate
        # The braces put all keys into one slot of a Valkey cluster. The limit is last, because it may contain colons.
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
        """Calls the store until no charge waits. Sets `away` to None if it answers."""
        while await self._exchange():
            pass

    async def run(self) -> None:
        """Charges waiting requests, and checks whether the store is reachable, until cancelled."""
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
                    # Only the connection may have been broken.
                    await self.connect()
        finally:
            self._unanswered([])

    async def close(self) -> None:
        """Sends the last corrections if the store is reachable, and disconnects."""
        if self.away is None:
            await self.connect()
        if self._timer is not None:
            self._timer.cancel()
        await self._store.close()

    async def _exchange(self) -> bool:
        """Makes one call to the store. Returns whether more charges or corrections wait."""
        self._wake.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        asks = [self._asks.popleft() for _ in range(min(len(self._asks), ASKS_MAX))]
        owed = {key: self._owed.pop(key) for key in list(islice(self._owed, CORRECTIONS_MAX))}
        more = bool(self._asks or self._owed)
        keys, given = gcra.script_arguments([_taken(ask.charge) for ask in asks], owed)
        clock = asyncio.get_running_loop().time
        asked_s, limit_s = clock(), ANSWER_S if self.away is None else CONNECT_S
        try:
            async with asyncio.timeout(limit_s):
                said = gcra.parse_result(await self._store.run(gcra.SCRIPT, keys, *given), len(asks))
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
                # Connecting took time, or the store is slow: the next call shows which.
                return True
            if self.away is not NOT_ASKED:
                _log.info("limits_store_reachable")
            self.away = None
        for ask, (wait_s, longest) in zip(asks, said, strict=True):
            self._answer(ask, wait_s, longest)
        return more

    def _answer(self, ask: _Ask, wait_s: float, longest: int) -> None:
        if wait_s > 0.0:
            if not ask.answered.done():
                ask.answered.set_result(used_up(ask.charge.rates[longest].rate, wait_s))
        elif ask.answered.done():
            # The client left meanwhile, so the charge is refunded.
            self._correct(ask.charge, -1.0, -ask.charge.tokens)
        else:
            self._charges[ask.request_id] = ask.charge
            ask.answered.set_result(True)

    def _failed(self, why: str, asks: list[_Ask], owed: Mapping[bytes, float]) -> None:
        """Handles a failed call. The store may have applied it, so refunds are dropped, and charges are repeated."""
        if self.away in (None, NOT_ASKED):
            _log.warning("limits_store_unreachable", why=why, on_failure="closed" if self._alone is None else "share")
        self.away = why
        for key, seconds in owed.items():
            if seconds > 0.0:
                self._owed[key] = self._owed.get(key, 0.0) + seconds
        self._unanswered(asks)

    def _unanswered(self, asks: list[_Ask]) -> None:
        """Ends the wait of `asks` and of all queued requests with False: the store is unavailable."""
        waiting = [*asks, *self._asks]
        self._asks.clear()
        for ask in waiting:
            if not ask.answered.done():
                ask.answered.set_result(False)


def _taken(charge: _Charge) -> list[tuple[bytes, float]]:
    return [(key, unit_s * amount(kind, charge.tokens)) for key, unit_s, (_, kind, _) in charge.rates]
