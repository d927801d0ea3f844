"""Limits for one address: open connections, and requests per second."""

from __future__ import annotations

import pytest

from llmproxy.config import ClientsConfig
from llmproxy.core.domain import Outcome
from llmproxy.gateway.http import client_limits as clients_module
from llmproxy.gateway.http.client_limits import ClientLimits, limit_key
from llmproxy.gateway.http.errors import Failure


def allowed(clients: ClientLimits, address: str, now: float) -> bool:
    try:
        clients.count_request(address, now)
    except Failure:
        return False
    return True


def test_clients_without_limits_are_never_refused() -> None:
    clients = ClientLimits(ClientsConfig())
    assert all(allowed(clients, "10.0.0.1", 0.0) for _ in range(1000))
    assert all(clients.opened("10.0.0.1") is None for _ in range(1000))


def test_a_burst_of_one_second_is_allowed_then_the_rate() -> None:
    clients = ClientLimits(ClientsConfig(address_requests_per_s=4))
    assert [allowed(clients, "a", 10.0) for _ in range(6)] == [True] * 4 + [False] * 2
    assert [allowed(clients, "a", 10.25) for _ in range(2)] == [True, False]
    assert [allowed(clients, "a", 10.75) for _ in range(3)] == [True, True, False]
    assert [allowed(clients, "a", 99.0) for _ in range(5)] == [True] * 4 + [False], "never more than a second's worth"
    assert allowed(clients, "b", 10.0), "each address has its own"


def test_a_rate_below_one_a_second() -> None:
    clients = ClientLimits(ClientsConfig(address_requests_per_s=0.1))
    assert allowed(clients, "a", 0.0)
    with pytest.raises(Failure) as refused:
        clients.count_request("a", 1.0)
    assert (refused.value.outcome, refused.value.status) == (Outcome.RATE_LIMITED, 429)
    assert refused.value.headers["Retry-After"] == "9"
    assert allowed(clients, "a", 10.0), "a client that waits as long as asked is served"


def test_the_least_recently_seen_address_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients_module, "ADDRESSES_MAX", 2)
    clients = ClientLimits(ClientsConfig(address_requests_per_s=1))
    for address, now in (("a", 0.0), ("b", 0.0), ("a", 1.0), ("c", 1.0)):
        assert allowed(clients, address, now)
    assert [allowed(clients, address, 1.0) for address in ("a", "c", "b")] == [False, False, True]


def test_connections_are_counted_until_they_are_closed() -> None:
    clients = ClientLimits(ClientsConfig(connections_max=3, address_connections_max=2))
    assert clients.opened("a") is None
    assert clients.opened("a") is None
    refused = clients.opened("a")
    assert refused is not None
    assert (refused.status, refused.outcome) == (429, Outcome.RATE_LIMITED)
    assert clients.opened("b") is None
    refused = clients.opened("c")
    assert refused is not None
    assert (refused.status, refused.outcome) == (503, Outcome.REJECTED_CAPACITY)
    clients.closed("a")
    assert clients.opened("a") is None, "its own connection was returned"
    clients.closed("a")
    assert clients.opened("c") is None
    for address in ("a", "b", "c"):
        clients.closed(address)
    assert clients.open == 0


@pytest.mark.parametrize(
    ("address", "same", "other"),
    [
        ("10.0.0.1", "::ffff:10.0.0.1", "10.0.0.2"),
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2", "2001:db8:0:2::1"),
        ("fe80::1%eth0", "fe80::2%eth1", "fe81::1"),
        ("", "", "10.0.0.1"),
    ],
)
def test_addresses_count_alone_or_by_ipv6_network(address: str, same: str, other: str) -> None:
    assert limit_key(address) == limit_key(same) != limit_key(other)
