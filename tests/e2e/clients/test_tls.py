"""TLS to clients and to backends: trusted certificates and their renewal."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from structlog.testing import capture_logs

from llmproxy.app import running
from llmproxy.config import Config, ConfigError, TlsConfig
from llmproxy.gateway.http.tls import ClientTls
from tests.e2e.proxies import FAST, STREAM, ProxyUnderTest, all_up, serving, until
from tests.e2e.scripted import Scripted, answering, scripted, whole

HOST = "127.0.0.1"


class Files:
    """A certificate and its key as files, which `renew` writes anew: another certificate, by `ca` where it is given."""

    def __init__(self, folder: Path, ca: trustme.CA) -> None:
        self.ca = ca
        self.cert, self.key, self.client_ca = folder / "cert.pem", folder / "key.pem", folder / "ca.pem"
        ca.cert_pem.write_to_path(str(self.client_ca))
        self.renew()

    def renew(self) -> None:
        made = self.ca.issue_cert(HOST)
        self.cert.write_bytes(b"".join(pem.bytes() for pem in made.cert_chain_pems))
        made.private_key_pem.write_to_path(str(self.key))
        self._touch()

    def spoil(self) -> None:
        """A new certificate with the key of another one: a renewal that is seen halfway."""
        self.renew()
        self.ca.issue_cert(HOST).private_key_pem.write_to_path(str(self.key))
        self._touch()

    def lock(self) -> None:
        """The key under a passphrase, which nobody is there to type."""
        key = load_pem_private_key(self.key.read_bytes(), None)
        kept = BestAvailableEncryption(b"secret")
        self.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, kept))
        self._touch()

    def _touch(self) -> None:
        # Two versions within one tick of the file system's clock would look the same.
        stamp_ns = getattr(self, "_stamp_ns", 10**18) + 10**9
        self._stamp_ns = stamp_ns
        for path in (self.cert, self.key):
            os.utime(path, ns=(stamp_ns, stamp_ns))

    @property
    def config(self) -> dict[str, str]:
        return {"cert": str(self.cert), "key": str(self.key)}


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(tmp_path: Path, ca: trustme.CA) -> Files:
    return Files(tmp_path, ca)


@pytest.fixture
def trusting(ca: trustme.CA) -> ssl.SSLContext:
    """A client that believes the authority of the test."""
    context = ssl.create_default_context()
    ca.configure_trust(context)
    return context


# --- clients ----------------------------------------------------------------------------------------------------------


async def test_clients_come_by_https(files: Files, trusting: ssl.SSLContext) -> None:
    async with serving(FAST, tls=files.config) as proxy:
        assert proxy.url.startswith("https://")
        assert (await proxy.chat(ssl=trusting)).status == 200
        assert (await proxy.chat(STREAM, ssl=trusting)).events[-1] == b"data: [DONE]"
        plain = await proxy.get(proxy.url.replace("https:", "http:") + "/version")
        assert (plain.status, "begin with https://" in plain.json["error"]["message"]) == (400, True)
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await proxy.get("/version", ssl=ssl.create_default_context())


async def test_only_supported_protocols_are_agreed_on(files: Files, trusting: ssl.SSLContext) -> None:
    trusting.set_alpn_protocols(["h2", "http/1.1"])
    async with serving(FAST, tls=files.config) as proxy:
        agreed = await met(proxy, trusting)
        assert agreed.selected_alpn_protocol() == "http/1.1"
        assert agreed.version() in ("TLSv1.2", "TLSv1.3")
    tls = ClientTls.from_config(TlsConfig(cert=files.cert, key=files.key))
    assert tls is not None
    assert tls.context.now.minimum_version == ssl.TLSVersion.TLSv1_2


async def met(proxy: ProxyUnderTest, trusting: ssl.SSLContext) -> ssl.SSLObject:
    """Returns the TLS session of a new connection to the proxy."""
    port = int(proxy.url.rpartition(":")[2])
    _, writer = await asyncio.open_connection(HOST, port, ssl=trusting, server_hostname=HOST)
    agreed: ssl.SSLObject = writer.get_extra_info("ssl_object")
    writer.transport.abort()
    return agreed


async def shown(proxy: ProxyUnderTest, trusting: ssl.SSLContext) -> bytes | None:
    """The certificate that the proxy shows to a new connection."""
    return (await met(proxy, trusting)).getpeercert(binary_form=True)


async def test_a_renewed_certificate_is_shown_to_new_connections(
    files: Files, trusting: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmproxy.gateway.http.tls.CHECK_S", 0.01)
    async with serving(FAST, tls=files.config) as proxy:
        first = await shown(proxy, trusting)
        assert await shown(proxy, trusting) == first
        async with proxy.http.post(proxy.url + "/v1/chat/completions", json=STREAM, ssl=trusting) as open_since:
            with capture_logs() as logs:
                files.renew()
                await until(lambda: any(line["event"] == "certificate_reloaded" for line in logs))
            second = await shown(proxy, trusting)
            assert second != first
            assert (await open_since.read()).endswith(b"data: [DONE]\n\n")
        with capture_logs() as logs:
            files.spoil()
            await until(lambda: any(line["event"] == "certificate_reload_failed" for line in logs))
        assert await shown(proxy, trusting) == second


def test_an_invalid_file_changes_nothing_and_is_logged_once(files: Files) -> None:
    tls = ClientTls(files.cert, files.key, None)
    assert not tls.renew(), "nothing has changed"
    for spoil, why in (
        (files.lock, "without a passphrase"),
        (files.spoil, "key values mismatch"),
        (files.key.unlink, "No such file or directory"),
        (lambda: files.cert.write_text("no certificate"), "it cannot be read as PEM"),
    ):
        spoil()
        with capture_logs() as logs:
            assert [tls.renew() for _ in range(3)] == [False] * 3
        assert [line["event"] for line in logs] == ["certificate_reload_failed"]
        assert why in logs[0]["why"]
    files.renew()
    assert [tls.renew() for _ in range(3)] == [False, True, False], "a change counts once it is over"


def test_authorities_of_no_use_change_nothing_either(files: Files) -> None:
    tls = ClientTls(files.cert, files.key, files.client_ca)
    before = tls.context.now
    files.client_ca.write_text("half a ")
    with capture_logs() as logs:
        assert [tls.renew() for _ in range(3)] == [False] * 3
    assert [line["why"] for line in logs] == [f"{files.client_ca} holds no certificate: no certificate or crl found"]
    assert tls.context.now is before


async def test_clients_without_a_certificate_of_the_authority_stay_outside(
    files: Files, ca: trustme.CA, trusting: ssl.SSLContext
) -> None:
    async with serving(FAST, tls=files.config | {"client_ca": str(files.client_ca)}) as proxy:
        with pytest.raises(aiohttp.ClientError):
            await proxy.get("/version", ssl=trusting)
        stranger = ssl.create_default_context()
        ca.configure_trust(stranger)
        trustme.CA().issue_cert("client.example").configure_cert(stranger)
        with pytest.raises(aiohttp.ClientError):
            await proxy.get("/version", ssl=stranger)
        ca.issue_cert("client.example").configure_cert(trusting)
        assert (await proxy.get("/version", ssl=trusting)).status == 200


@pytest.mark.parametrize("begun", [b"", b"\x16\x03\x01\x02\x00\x01"])
async def test_a_handshake_that_does_not_end(begun: bytes, files: Files) -> None:
    async with (
        serving(FAST, tls=files.config, clients={"head_timeout_s": 0.05}) as proxy,
        proxy.wire(begun) as (reader, _),
    ):
        assert await reader.read() == b""
        await until(lambda: not proxy.app.clients.open)


@pytest.mark.slow
async def test_connections_count_before_their_handshake_is_over(files: Files, trusting: ssl.SSLContext) -> None:
    async with serving(FAST, tls=files.config, clients={"address_connections_max": 2}) as proxy:
        async with proxy.wire(b""), proxy.wire(b""):
            await until(lambda: proxy.app.clients.open == 2)
            with pytest.raises(aiohttp.ClientError):
                await proxy.chat(ssl=trusting)
            assert proxy.outcomes() == {"rate_limited": 1}
        await until(lambda: not proxy.app.clients.open)
        assert (await proxy.chat(ssl=trusting)).status == 200
        assert proxy.app.clients.open == 1, "the connection that is kept, and only once"


@pytest.mark.parametrize(
    ("tls", "problem"),
    [
        (
            {"cert": "absent.pem"},
            "tls.cert: absent.pem with its key in the same file, as tls.key names none, cannot be used: No such file",
        ),
        ({"cert": __file__}, "cannot be used: "),
        ({"key": "key.pem"}, "tls.cert: is missing"),
        ({"client_ca": "ca.pem"}, "tls.cert: is missing"),
    ],
)
async def test_a_certificate_of_no_use_keeps_the_proxy_from_starting(tls: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        async with running(Config.model_validate({"port": 0, "host": HOST, "tls": tls})):
            pass


async def test_authorities_of_no_use_keep_it_from_starting_too(files: Files) -> None:
    with pytest.raises(ConfigError, match=r"tls.client_ca: absent.pem holds no certificate: No such file"):
        ClientTls(files.cert, files.key, Path("absent.pem"))
    backends = [{"url": "https://a", "tls": {"ca": "absent.pem"}}]
    with pytest.raises(ConfigError, match=r"backends\[0\].tls.ca: absent.pem holds no certificate: No such file"):
        async with running(Config.model_validate({"port": 0, "host": HOST, "backends": backends})):
            pass


# --- backends ---------------------------------------------------------------------------------------------------------

Gpu = Callable[[], AbstractAsyncContextManager[Scripted]]
OPEN: dict[str, Any] = {"queue": {"no_backend_wait_s": 5.0}, "retry": {"extra_attempts": 0}}


@pytest.fixture
def gpu(ca: trustme.CA) -> Gpu:
    """Opens a backend that shows a certificate of `gpu.internal`, and of no address."""

    def opened() -> AbstractAsyncContextManager[Scripted]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        ca.issue_cert("gpu.internal").configure_cert(context)
        names.append([])
        context.sni_callback = lambda _, name, __: names[-1].append(name)
        return scripted(answering(whole(b'{"object":"chat.completion","choices":[]}')), context)

    names: list[list[str | None]] = []
    opened.names = names  # type: ignore[attr-defined]
    return opened


@pytest.mark.parametrize("trust", [{"server_name": "gpu.internal"}, {"insecure_skip_verify": True}])
async def test_a_backend_that_is_believed(files: Files, gpu: Gpu, trust: dict[str, object]) -> None:
    if "server_name" in trust:
        trust = trust | {"ca": str(files.client_ca)}
    async with gpu() as backend, serving(backends=[{"url": backend.url, "name": "b0", "tls": trust}], **OPEN) as proxy:
        assert (await proxy.chat()).status == 200
        assert len(backend.requests) == 1
        asked = set(gpu.names[-1])  # type: ignore[attr-defined]
        assert asked == {trust.get("server_name")}, "polls and requests ask for the same name"


@pytest.mark.parametrize("trust", ["nobody", "the authority, under the wrong name"])
async def test_a_backend_that_is_not_believed(files: Files, gpu: Gpu, trust: str) -> None:
    tls = {} if trust == "nobody" else {"ca": str(files.client_ca), "server_name": "other.internal"}
    with capture_logs() as logs:
        async with (
            gpu() as backend,
            serving(backends=[{"url": backend.url, "name": "b0", "tls": tls}], wait=False) as proxy,
        ):
            await until(lambda: any(line["event"] == "backend_down" for line in logs))
            assert (await proxy.chat()).status == 503
            assert not backend.requests
    why = next(line["why"] for line in logs if line["event"] == "backend_down")
    assert "/health: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed" in why


async def test_new_authorities_are_believed_and_old_ones_no_more(
    tmp_path: Path,
    ca: trustme.CA,
    gpu: Gpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("llmproxy.upstream.endpoints.CHECK_S", 0.01)
    file, other = tmp_path / "authorities.pem", trustme.CA()
    file.write_bytes(other.cert_pem.bytes())
    tls = {"ca": str(file), "server_name": "gpu.internal"}

    def replace(text: bytes) -> None:
        new = tmp_path / "new.pem"
        new.write_bytes(text)
        new.replace(file)

    def logged(event: str) -> list[Any]:
        return [line for line in logs if line["event"] == event]

    with capture_logs() as logs:
        async with (
            gpu() as backend,
            serving(backends=[{"url": backend.url, "name": "b0", "tls": tls}], wait=False) as proxy,
        ):
            await until(lambda: logged("backend_down"))
            replace(ca.cert_pem.bytes())
            await until(lambda: all_up(proxy))
            assert (await proxy.chat()).status == 200
            replace(b"nobody")
            await until(lambda: logged("backend_ca_reload_failed"))
            assert (await proxy.chat()).status == 200
            replace(other.cert_pem.bytes())
            await until(lambda: len(logged("backend_down")) == 2)
            assert (await proxy.chat()).status == 503
    assert [line["backend"] for line in logged("backend_ca_reloaded")] == ["b0", "b0"]
    [kept] = logged("backend_ca_reload_failed")
    assert kept["why"].startswith(f"{file} holds no certificate: ")
