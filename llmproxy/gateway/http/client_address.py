"""Who sent a request: the peer of its connection, or the client that a trusted proxy names.

Nobody can forge the address of a peer, and anybody can write a header field. `X-Forwarded-For` is therefore read only
from trusted proxies, from its right end, and past trusted proxies alone (`real_ip_recursive` of nginx).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from ipaddress import ip_address
from typing import NamedTuple

from aiohttp import web

from llmproxy.config import Network

FORWARDING = re.compile(
    r"^(?:forwarded|via|cdn-loop|x-forwarded.*|x-original-(?:forwarded.*|host|method|ur[il])|x-envoy-.*|x-arr-.*|cf-.*"
    r"|l5d-.*|.*(?:client|connecting|proxyuser|real|remote|socket|user)-?(?:ip(?:v6)?|addr(?:ess)?))$",
    re.IGNORECASE | re.MULTILINE,
)
"""Names of fields, one a line, by which a proxy says that it sends the request of somebody else."""
NAMES_CHARS_MAX = 2048
"""The names of a request's fields are remembered up to this length. Most clients always send the same ones."""
HOPS_MAX = 32
"""Entries of `X-Forwarded-For` that are read."""
ADDRESSES_MAX = 10_000
"""Addresses of which it is remembered whether they are trusted."""


class Client(NamedTuple):
    """The client of a request.

    `address` is the nearest one that is no trusted proxy; it counts for limits, and is logged. It gives rights only
    where it is `certain`: nothing says that the request is somebody else's. `proxied`: it came from a trusted proxy.
    """

    address: str
    certain: bool = False
    proxied: bool = False


class InNetworks(dict[str, bool]):
    """Address -> whether it is in one of these networks; filled when an address is first asked for."""

    def __init__(self, networks: Sequence[Network]) -> None:
        self._networks = networks

    def __missing__(self, address: str) -> bool:
        if len(self) >= ADDRESSES_MAX:
            self.clear()
        known = self[address] = bool(address and self._networks) and self._is_in_networks(address)
        return known

    def _is_in_networks(self, address: str) -> bool:
        parsed = ip_address(address.partition("%")[0])
        plain = getattr(parsed, "ipv4_mapped", None) or parsed
        return any(plain in network for network in self._networks if network.version == plain.version)


class Clients:
    """Finds the client of a request."""

    def __init__(self, trusted_proxies: Sequence[Network]) -> None:
        self._proxied = InNetworks(trusted_proxies)

    def identify(self, http: web.BaseRequest) -> Client:
        """The client of this request. A peer that has disconnected has the address ""."""
        peer, fields = http.remote or "", http.headers
        if not self._proxied[peer]:
            names = "\n".join(fields)
            client = (_known_client if len(names) <= NAMES_CHARS_MAX else _direct_client)(peer, names)
            return Client(peer) if "origin" in fields and _from_foreign_page(fields) else client
        address, hops = peer, ",".join(fields.getall("x-forwarded-for", ())).rsplit(",", HOPS_MAX - 1)
        while hops and self._proxied[address]:
            named = _address(hops.pop())
            if named is None:
                break
            address = named
        # A trusted proxy that names nobody speaks for somebody unknown: it has no rights of its own. An entry that is
        # left says that the client passes on a request, whether or not that is true.
        certain = not hops and not self._proxied[address] and not _from_foreign_page(fields)
        return Client(address, certain, proxied=True)


def _direct_client(peer: str, names: str) -> Client:
    """The client of a request from `peer`, which is no trusted proxy, with fields of these names, one a line."""
    return Client(peer, FORWARDING.search(names) is None)


_known_client = lru_cache(maxsize=1024)(_direct_client)


def _from_foreign_page(fields: Mapping[str, str]) -> bool:
    """Whether a page of another server sent this, by a browser at the client's address."""
    origin = fields.get("origin")
    return origin is not None and origin.lower().partition("://")[2] != fields.get("host", "").lower()


def _address(entry: str) -> str | None:
    """The address in an entry of `X-Forwarded-For`, without its port; None if it is none."""
    text = entry.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        # The zone says something on the machine of that proxy alone, and may be any text.
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return str(getattr(address, "ipv4_mapped", None) or address)
