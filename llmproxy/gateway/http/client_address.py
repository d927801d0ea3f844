"""Finds the client of a request: the peer of its connection, or the client that a trusted proxy names.

The address of a peer cannot be forged, but any client can write header fields. Therefore `X-Forwarded-For` counts only
from trusted proxies. It is read from right to left, and the first address that is no trusted proxy is the client (as
with `real_ip_recursive` of nginx).
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
"""Finds the name of a field that proxies add to forwarded requests, in a text with one field name per line."""
NAMES_CHARS_MAX = 2048
"""The search for FORWARDING is cached for requests whose field names have at most this many characters in all.

Most clients send the same names in every request.
"""
HOPS_MAX = 32  # Entries of `X-Forwarded-For` that are read.
ADDRESSES_MAX = 10_000  # The number of addresses whose trust is cached.


class Client(NamedTuple):
    # The nearest address outside the trusted proxies, for limits and logs.
    address: str
    # Whether the request seems to come from this address itself. Otherwise the address gives no rights.
    certain: bool = False
    # Whether the request came through a trusted proxy.
    proxied: bool = False


class InNetworks(dict[str, bool]):
    """Maps an address to whether it is in the networks. An entry is added at the first lookup of an address."""

    def __init__(self, networks: Sequence[Network]) -> None:
        self._networks = networks

    def __missing__(self, address: str) -> bool:
        if len(self) >= ADDRESSES_MAX:
            self.clear()
        found = self[address] = bool(address and self._networks) and self._is_in_networks(address)
        return found

    def _is_in_networks(self, address: str) -> bool:
        parsed = ip_address(address.partition("%")[0])
        plain = getattr(parsed, "ipv4_mapped", None) or parsed
        return any(plain in network for network in self._networks if network.version == plain.version)


class Clients:
    """Finds the client of each request. `trusted_proxies` are the networks whose X-Forwarded-For fields count."""

    def __init__(self, trusted_proxies: Sequence[Network]) -> None:
        self._proxied = InNetworks(trusted_proxies)

    def identify(self, http: web.BaseRequest) -> Client:
        """Returns the client of a request. A peer that has already disconnected has the address ""."""
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
        # If a trusted proxy names no client, the client is unknown and has no rights. If `hops` is not empty, this
        # client claims to forward the request of another client, and the claim may be false.
        certain = not hops and not self._proxied[address] and not _from_foreign_page(fields)
        return Client(address, certain, proxied=True)


def _direct_client(peer: str, names: str) -> Client:
    """Returns the client of a request from an untrusted `peer`. `names`: names of the header fields, one per line."""
    return Client(peer, FORWARDING.search(names) is None)


_known_client = lru_cache(maxsize=1024)(_direct_client)


def _from_foreign_page(fields: Mapping[str, str]) -> bool:
    """Returns whether a browser sent the request for a page of another server.

    Then the request has an Origin that differs from its Host.
    """
    origin = fields.get("origin")
    return origin is not None and origin.lower().partition("://")[2] != fields.get("host", "").lower()


def _address(entry: str) -> str | None:
    """Returns the address in an entry of `X-Forwarded-For`, without its port; None if the entry is no address."""
    text = entry.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        # A zone has a meaning only on the machine of that proxy, and may be any text.
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return str(getattr(address, "ipv4_mapped", None) or address)
