"""TLS settings of backends by URL, when backends are added, changed and removed."""

from __future__ import annotations

from llmproxy.config import BackendConfig, BackendTlsConfig
from llmproxy.upstream.endpoints import Endpoints


def test_trust_follows_the_urls_and_the_last_of_two_backends_decides() -> None:
    def at(name: str, url: str) -> BackendConfig:
        return BackendConfig(name=name, url=url, tls=BackendTlsConfig(server_name=name))

    def replace(*backends: BackendConfig) -> dict[str, str | None]:
        endpoints.replace(backends)
        return {url: peer.server_name for url, peer in endpoints.tls.items()}

    endpoints = Endpoints()
    one, two, three = (f"https://127.0.0.1:{port}" for port in (1, 2, 3))
    assert replace(at("a", one), at("b", two)) == {one: "a", two: "b"}
    kept = endpoints.tls[two]
    assert replace(at("a", one), at("b", two), at("c", one)) == {one: "c", two: "b"}
    # A change of another backend does not give a URL back to a backend that leaves it.
    assert replace(at("a", one), at("b", two), at("c", one), at("d", three)) == {one: "c", two: "b", three: "d"}
    assert endpoints.tls[two] is kept, "nothing about it has changed"
    assert replace(at("b", one), at("c", two)) == {one: "b", two: "c"}
