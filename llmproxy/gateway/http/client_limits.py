"""Limits for one client address: connections, and requests per second.

Requests count for the address of the client, and connections for the address of the peer. The connections of a trusted
proxy have no limit of their own. All addresses in an IPv6 network of 64 bits count as one, because a client usually
owns the whole network.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from ipaddress import IPv6Address, ip_address

from llmproxy.config import ClientsConfig
from llmproxy.core.domain import Outcome
from llmproxy.core.token_bucket import TokenBucket
from llmproxy.gateway.http.client_address import InNetworks
from llmproxy.gateway.http.errors import Failure

ADDRESSES_MAX = 10_000
"""The number of addresses whose rate is remembered.

The address whose last accepted request is the oldest is forgotten first.
"""
RETRY_S = 1.0  # The Retry-After of a refused connection.


class ClientLimits:
    """Counts the connections and requests of each address. `now` is seconds on a monotonic clock."""

    def __init__(self, limits: ClientsConfig) -> None:
        self._limits = limits
        self._proxied = InNetworks(limits.trusted_proxies)
        self._open = 0
        self._open_by: Counter[str] = Counter()
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def opened(self, address: str) -> Failure | None:
        """Counts a connection of `address` until `closed`. Returns a Failure, and counts nothing, if it is refused."""
        limits, key = self._limits, limit_key(address)
        if self._open >= limits.connections_max:
            message = "Too many connections are open here (clients.connections_max, or the limit of open files)."
            return Failure(Outcome.REJECTED_CAPACITY, message, status=503, retry_after_s=RETRY_S)
        most = None if self._proxied[address] else limits.address_connections_max
        if most is not None and self._open_by[key] >= most:
            message = "Too many connections of this address are open (clients.address_connections_max)."
            return Failure(Outcome.RATE_LIMITED, message, retry_after_s=RETRY_S)
        self._open += 1
        self._open_by[key] += 1
        return None

    def closed(self, address: str) -> None:
        """Ends the count of a connection for which `opened` returned None."""
        key = limit_key(address)
        self._open -= 1
        self._open_by[key] -= 1
        if not self._open_by[key]:
            del self._open_by[key]

    def count_request(self, address: str, now: float) -> None:
        """Counts a request against `clients.address_requests_per_s`. Raises Failure (429) if the rate is exceeded.

        An address may send the requests of one second at once, and always at least one.
        """
        rate = self._limits.address_requests_per_s
        if rate is None:
            return
        key = limit_key(address)
        bucket = self._buckets.get(key) or TokenBucket(max(1.0, rate), rate)
        if (wait_s := bucket.wait_s(1.0, now)) > 0.0:
            message = f"This address may send {rate:g} requests a second (clients.address_requests_per_s). Try again."
            raise Failure(Outcome.RATE_LIMITED, message, retry_after_s=wait_s)
        bucket.take(1.0, now)
        self._buckets[key] = bucket
        self._buckets.move_to_end(key)
        if len(self._buckets) > ADDRESSES_MAX:
            self._buckets.popitem(last=False)

    @property
    def open(self) -> int:
        """The number of connections that are open now, of all addresses."""
        return self._open


def limit_key(address: str) -> str:
    """Returns the key under which an address is counted: the IPv4 address, or the first 64 bits of the IPv6 address."""
    if ":" not in address:
        return address
    parsed = ip_address(address.partition("%")[0])
    assert isinstance(parsed, IPv6Address)
    return str(parsed.ipv4_mapped) if parsed.ipv4_mapped is not None else parsed.packed[:8].hex()
