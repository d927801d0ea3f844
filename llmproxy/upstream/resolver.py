"""Resolves the host names of backends in the background, so that requests wait only for the first answer about a name.

Look-ups use the system's resolver (`/etc/hosts`, `resolv.conf`). If a name server does not answer, a look-up may take
half a minute, and cannot be cancelled. Each look-up has its own thread, and each name has at most one look-up at a
time.
"""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import structlog
from aiohappyeyeballs import AddrInfoType
from yarl import URL

from llmproxy.lifecycle.background import supervised

REFRESH_S = 10.0
"""The seconds between look-ups of a resolved name. Envoy looks a name up every 5 s, gRPC at most every 30 s."""
RETRY_S = 1.0  # The seconds between look-ups of a name without a known address.
ANSWER_MAX_S = 5.0  # After this time without an answer, a name counts as unresolved. Its look-up continues.
LOOK_UPS_MAX = 64
"""The maximum number of concurrent look-ups, separate for names whose last look-up failed and for all other names.

So failing names never delay the others. A look-up that takes longer than ANSWER_MAX_S no longer counts.
"""

Address = tuple[socket.AddressFamily, tuple[Any, ...]]  # A family and a socket address, whose port is ignored.
LookUp = Callable[[str], Awaitable[Sequence[Address]]]  # Returns all addresses of a name. Raises OSError.

_log = structlog.get_logger()


class NameFailed(OSError):  # noqa: N818 - a fact about a name, not an error of this code
    """A host name has no known address. The backend may still be healthy."""


@dataclass(slots=True)
class _Name:
    host: str
    addresses: Sequence[Address] = ()  # The last resolved addresses, kept while look-ups fail.
    why: str = ""  # The failure of the last look-up, "" after a success.
    asked: asyncio.Event = field(default_factory=asyncio.Event)  # Set at the first answer, or after `ANSWER_MAX_S`.
    following: asyncio.Task[None] | None = None


class Resolver:
    """Resolves host names. Call `close` at the end.

    Names passed to `follow` are looked up every REFRESH_S, and keep their last addresses while look-ups fail. Other
    names are looked up at each `connectable`.
    """

    def __init__(self, look_up: LookUp | None = None) -> None:
        self._look_up = look_up or ask_system
        # Followed name -> its last resolved IP addresses, kept while look-ups fail.
        self.current: dict[str | None, frozenset[str]] = {}
        self._names: dict[str, _Name] = {}
        self._looking: dict[str, asyncio.Task[Sequence[Address]]] = {}
        self._turns = {failed: asyncio.Semaphore(LOOK_UPS_MAX) for failed in (False, True)}

    def follow(self, urls: Iterable[str]) -> None:
        """Sets the base URLs whose host names are looked up in the background. Other names are no longer followed."""
        hosts = {
            host
            for url in urls
            if (host := URL(url).raw_host) and (host in self._names or _local_addresses(host) is None)
        }
        for host in self._names.keys() - hosts:
            task = self._names.pop(host).following
            self.current.pop(host, None)
            assert task is not None
            task.cancel()
        for host in hosts - self._names.keys():
            name = self._names[host] = _Name(host)
            name.following = supervised(partial(self._follow, name), f"follow {host}")

    async def connectable(self, host: str, port: int) -> list[AddrInfoType]:
        """Returns the addresses for a connection to a host. Raises NameFailed.

        For a followed name, waits only until its first look-up has ended; for any other name, looks it up. An IP
        address and localhost need no look-up.
        """
        return [
            (family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (place[0], port, *place[2:]))
            for family, place in await self._addresses(host)
        ]

    async def look_up(self, host: str) -> Sequence[Address]:
        """Looks a name up now. Concurrent callers share one look-up. Raises OSError."""
        # The look-up goes on for the other callers when one is cancelled.
        return await asyncio.shield(self._ask(host))

    async def close(self) -> None:
        """Cancels all look-ups in the background and waits for the end of their tasks."""
        tasks = [*self._looking.values(), *(name.following for name in self._names.values() if name.following)]
        self.follow(())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _addresses(self, host: str) -> Sequence[Address]:
        name = self._names.get(host)
        if name is None:
            own = _local_addresses(host)
            if own is not None:
                return own
            try:
                return await self.look_up(host)
            except OSError as error:
                raise _failed(host, _reason(error)) from None
        if not name.addresses:
            await name.asked.wait()
        if not name.addresses:
            raise _failed(host, name.why)
        return name.addresses

    # --- one name -----------------------------------------------------------------------------------------------------

    async def _follow(self, name: _Name) -> None:
        while True:
            try:
                self._resolved(name, await self.look_up(name.host))
            except OSError as error:
                self._unresolved(name, _reason(error))
            # Jitter spreads the look-ups of many names and proxies over time.
            await asyncio.sleep((REFRESH_S if name.addresses else RETRY_S) * random.uniform(0.8, 1.0))

    def _resolved(self, name: _Name, found: Sequence[Address]) -> None:
        if name.why or (name.addresses and set(name.addresses) != set(found)):
            _log.info("name_resolved", name=name.host, addresses=_hosts(found), before=_hosts(name.addresses))
        name.addresses, name.why = found, ""
        self.current[name.host] = frozenset(place[0] for _, place in found)
        name.asked.set()

    def _unresolved(self, name: _Name, why: str) -> None:
        if not name.why:
            _log.warning("name_not_resolved", name=name.host, why=why, goes_on_with=_hosts(name.addresses))
        name.why = why
        name.asked.set()

    # --- one look-up --------------------------------------------------------------------------------------------------

    def _ask(self, host: str) -> asyncio.Task[Sequence[Address]]:
        looking = self._looking.get(host)
        if looking is None:
            looking = asyncio.create_task(self._in_turn(host), name=f"look up {host}")
            self._looking[host] = looking
            looking.add_done_callback(lambda ended: self._looked(host, ended))
        return looking

    async def _in_turn(self, host: str) -> Sequence[Address]:
        name = self._names.get(host)
        turns = self._turns[name is not None and bool(name.why)]
        await turns.acquire()
        acquired = True

        def give_back() -> None:
            nonlocal acquired
            if acquired:
                acquired = False
                turns.release()

        def unanswered() -> None:
            give_back()
            if (name := self._names.get(host)) is not None:
                self._unresolved(name, f"no answer within {ANSWER_MAX_S:g} s")

        late = asyncio.get_running_loop().call_later(ANSWER_MAX_S, unanswered)
        try:
            return await self._look_up(host)
        finally:
            late.cancel()
            give_back()

    def _looked(self, host: str, ended: asyncio.Task[Sequence[Address]]) -> None:
        del self._looking[host]
        if not ended.cancelled():
            # All callers may be gone; reading the exception avoids a log line about it.
            ended.exception()


async def ask_system(host: str) -> Sequence[Address]:
    """Looks a name up with the system's resolver, in a thread of its own. Raises OSError."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Sequence[Address]] = loop.create_future()

    def resolve(found: Sequence[Address], error: OSError | None) -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(found)
        else:
            answer.set_exception(error)

    def ask() -> None:
        found: Sequence[Address] = ()
        failed: OSError | None = None
        try:
            found = _places(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
        except OSError as error:
            failed = error
        except Exception as error:  # noqa: BLE001 - an exception in a thread would be lost
            failed = OSError(f"it is no name: {error}")
        # The loop may be gone by now.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(resolve, found, failed)

    # Not a thread of the loop's pool: slow look-ups would use up the pool, and delay the end of the process.
    try:
        threading.Thread(target=ask, name=f"look up {host}", daemon=True).start()
    except RuntimeError as error:
        raise OSError(str(error)) from None
    return await answer


def _local_addresses(host: str) -> Sequence[Address] | None:
    """Returns the addresses of an IP address or a localhost name (RFC 6761); None if it needs a look-up."""
    if f".{host.rstrip('.').lower()}".endswith(".localhost"):
        return _loopback()
    try:
        return _places(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST))
    except (OSError, UnicodeError):
        return None


@cache
def _loopback() -> Sequence[Address]:
    both: list[Address] = [(socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_INET6, ("::1", 0, 0, 0))]
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        # Without IPv6, the failure of ::1 would hide a refused connection to 127.0.0.1.
        return both[:1]
    return both


def _places(found: Iterable[tuple[Any, ...]]) -> Sequence[Address]:
    return list(dict.fromkeys((family, place) for family, _, _, _, place in found))


def _failed(host: str, why: str) -> NameFailed:
    return NameFailed(f"the name {host} does not resolve: {why}")


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _hosts(found: Sequence[Address]) -> list[str]:
    return sorted(str(place[0]) for _, place in found)
