"""The client of a request: the peer, or the client that a trusted proxy names."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from llmproxy.config.value_types import networks_of
from llmproxy.gateway.http import client_address
from llmproxy.gateway.http.client_address import HOPS_MAX, NAMES_CHARS_MAX, Client, Clients, InNetworks

FORWARDING = [
    "Forwarded",
    "Via",
    "CDN-Loop",
    "X-Forwarded-For",
    "X-Forwarded-Host",
    "X-Forwarded-Proto",
    "X-Forwarded-Port",
    "X-Forwarded-Server",
    "X-Forwarded-Prefix",
    "X-Forwarded-Ssl",
    "X-Forwarded-User",
    "X-Forwarded-Client-Cert",
    "X-Forwarded-Tls-Client-Cert",
    "X-Real-IP",
    "X-Client-IP",
    "Client-IP",
    "X-Cluster-Client-IP",
    "X-Original-Forwarded-For",
    "X-Original-Host",
    "X-ProxyUser-Ip",
    "X-Remote-Addr",
    "CF-Connecting-IP",
    "CF-Connecting-IPv6",
    "CF-Ray",
    "CF-Visitor",
    "True-Client-IP",
    "Fastly-Client-IP",
    "Fly-Client-IP",
    "X-Azure-ClientIP",
    "X-Azure-SocketIP",
    "X-Appengine-User-IP",
    "DO-Connecting-IP",
    "X-Envoy-External-Address",
    "X-Envoy-Expected-Rq-Timeout-Ms",
    "X-Arr-Log-Id",
    "l5d-client-id",
]
"""Fields that nginx, HAProxy, Envoy, Traefik, Caddy, Apache, Linkerd and content delivery networks add."""
ORDINARY = [
    "Host",
    "Accept",
    "Accept-Encoding",
    "Connection",
    "User-Agent",
    "Content-Type",
    "Content-Length",
    "Authorization",
    "X-Api-Key",
    "X-Request-Id",
    "X-Stainless-Os",
    "X-Stainless-Retry-Count",
    "Anthropic-Version",
    "X-Session-Id",
    "Traceparent",
    "X-Llm-D-Inference-Objective",
]


def request(peer: str | None = "127.0.0.1", *forwarded: str, **headers: str) -> web.BaseRequest:
    fields = [(name.replace("_", "-"), value) for name, value in headers.items()]
    made = make_mocked_request("POST", "/", headers=[*fields, *(("X-Forwarded-For", one) for one in forwarded)])
    return made if peer is None else made.clone(remote=peer)


def of(trusted: str, peer: str | None, *forwarded: str, **headers: str) -> Client:
    """The client of a request from `peer` with these X-Forwarded-For fields."""
    return Clients(networks_of(trusted)).identify(request(peer, *forwarded, **headers))


def test_the_peer_is_the_client_where_nothing_says_otherwise() -> None:
    assert of("none", "10.0.0.7", **dict.fromkeys(ORDINARY, "x")) == Client("10.0.0.7", certain=True)
    assert of("none", "127.0.0.1") == Client("127.0.0.1", certain=True)
    assert of("none", None).address == "", "a peer that has disconnected"
    assert of("all", None) == Client("", certain=True)


@pytest.mark.parametrize("name", [*FORWARDING, *(name.upper() for name in FORWARDING)])
def test_a_forwarded_request_is_not_certainly_its_peers(name: str) -> None:
    assert of("none", "127.0.0.1", **{name: "127.0.0.1"}) == Client("127.0.0.1", certain=False)


def test_a_forwarding_field_is_found_among_very_many() -> None:
    many = {f"x-{'a' * 100}-{i}": "x" for i in range(NAMES_CHARS_MAX // 100)}
    assert of("none", "127.0.0.1", **many).certain
    assert not of("none", "127.0.0.1", **many, via="1.1 a").certain


def test_a_page_of_another_server_is_not_certainly_the_peers() -> None:
    own = {"host": "localhost:8080"}
    assert of("none", "127.0.0.1", **own, origin="http://localhost:8080").certain
    for origin in ("http://evil.example", "null", "http://localhost:3000"):
        assert not of("none", "127.0.0.1", **own, origin=origin).certain
        assert not of("loopback", "127.0.0.1", "10.0.0.7", **own, origin=origin).certain


@pytest.mark.parametrize(
    ("trusted", "forwarded", "client"),
    [
        ("loopback", ["8.8.8.8"], Client("8.8.8.8", True, True)),
        ("loopback", ["127.0.0.5"], Client("127.0.0.5", False, True)),
        ("127.0.0.1", ["127.0.0.5"], Client("127.0.0.5", True, True)),
        ("loopback, 10.0.0.0/8", ["8.8.8.8, 10.0.0.2"], Client("8.8.8.8", True, True)),
        ("loopback, 10.0.0.0/8", ["8.8.8.8", "10.0.0.2"], Client("8.8.8.8", True, True)),
        ("loopback", [" [2001:db8::1]:4711 "], Client("2001:db8::1", True, True)),
        ("loopback", ["2001:db8::1"], Client("2001:db8::1", True, True)),
        ("loopback", ["8.8.8.8:4711"], Client("8.8.8.8", True, True)),
        ("loopback", ["::ffff:8.8.8.8"], Client("8.8.8.8", True, True)),
    ],
)
def test_trusted_proxies_name_the_client(trusted: str, forwarded: list[str], client: Client) -> None:
    assert of(trusted, "127.0.0.1", *forwarded) == client


@pytest.mark.parametrize("forged", ["127.0.0.1", "10.0.0.7", "unknown", "", "x" * 99, "10.0.0.7, 10.0.0.7"])
def test_a_client_that_writes_the_field_itself_gains_nothing(forged: str) -> None:
    assert of("loopback", "127.0.0.1", f"{forged}, 8.8.8.8") == Client("8.8.8.8", False, True)
    assert of("loopback", "127.0.0.1", forged, "8.8.8.8") == Client("8.8.8.8", False, True)
    assert of("loopback", "8.8.8.8", forged) == Client("8.8.8.8", False, False), "not by a trusted proxy"


@pytest.mark.parametrize("forwarded", [[], [""], ["unknown"], ["_hidden"], ["8.8.8.8, "], ["127.0.0.1"], ["1.2.3"]])
def test_a_trusted_proxy_that_names_nobody_has_no_rights_of_its_own(forwarded: list[str]) -> None:
    assert of("loopback", "127.0.0.1", *forwarded) == Client("127.0.0.1", False, True)
    assert of("loopback", "127.0.0.1", x_real_ip="10.0.0.7") == Client("127.0.0.1", False, True)


def test_the_zone_of_an_address_is_no_part_of_a_client() -> None:
    forged = ["fe80::1%\x1b[31m" + "x" * 4_000]
    assert of("loopback", "127.0.0.1", *forged) == Client("fe80::1", True, True)


def test_only_so_many_hops_are_read() -> None:
    assert of("loopback", "127.0.0.1", ", ".join(["8.8.8.8", *["127.0.0.1"] * HOPS_MAX])).address == "127.0.0.1"
    assert of("loopback", "127.0.0.1", ", ".join(["8.8.8.8", *["127.0.0.1"] * (HOPS_MAX - 1)])).address == "8.8.8.8"


def test_remembered_addresses_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_address, "ADDRESSES_MAX", 3)
    known = InNetworks(networks_of("10.0.0.0/8, fe80::/10"))
    addresses = ["10.0.0.1", "8.8.8.8", "::ffff:10.0.0.1", "fe80::1%eth0", "10.0.0.2", "9.9.9.9"]
    assert [known[one] for one in [*addresses, *addresses]] == [True, False, True, True, True, False] * 2
    assert len(known) <= 3
