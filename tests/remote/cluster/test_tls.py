"""TLS between members: both sides show a certificate of the cluster's authority with the members' DNS name."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme
from structlog.testing import capture_logs

from llmproxy.config import ClusterConfig, ClusterTlsConfig, ConfigError
from llmproxy.gateway.http import tls as http_tls
from llmproxy.remote.cluster.network import TcpNetwork
from tests import ROOT
from tests.docs.pages import blocks
from tests.e2e.proxies import until

NAME = "llmproxy"


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


class Certificate:
    """A certificate for `name`, its key and the authority that its holder trusts, as files."""

    def __init__(self, folder: Path, ca: trustme.CA, name: str = NAME, trusted: trustme.CA | None = None) -> None:
        folder.mkdir(exist_ok=True)
        self.cert, self.key, self.ca = folder / "cert.pem", folder / "key.pem", folder / "ca.pem"
        (trusted or ca).cert_pem.write_to_path(str(self.ca))
        self._stamp_ns = 10**18
        self.renew(ca, name)

    def renew(self, ca: trustme.CA, name: str = NAME) -> None:
        made = ca.issue_cert(name)
        self.cert.write_bytes(b"".join(pem.bytes() for pem in made.cert_chain_pems))
        made.private_key_pem.write_to_path(str(self.key))
        self.stamp(self.cert, self.key)

    def stamp(self, *paths: Path) -> None:
        """These files were written a second after those before."""
        self._stamp_ns += 10**9
        for path in paths:
            os.utime(path, ns=(self._stamp_ns, self._stamp_ns))

    @property
    def serial(self) -> str:
        return str(ssl._ssl._test_decode_cert(str(self.cert))["serialNumber"])  # type: ignore[attr-defined]

    def network(self) -> TcpNetwork:
        tls = ClusterTlsConfig(cert=self.cert, key=self.key, ca=self.ca, name=NAME)
        return TcpNetwork(ClusterConfig(listen="127.0.0.1:0", tls=tls))


def _trusts(files: Certificate, *authorities: trustme.CA) -> None:
    """Write the authorities that a member trusts anew."""
    files.ca.write_bytes(b"".join(one.cert_pem.bytes() for one in authorities))
    files.stamp(files.ca)


class End(asyncio.Protocol):
    """An end of a connection. A refusal may come after the handshake: TLS 1.3 checks the client last."""

    def __init__(self, at: TcpNetwork) -> None:
        self._at = at
        self.transport: asyncio.BaseTransport | None = None
        self.trusted: bool | None = None
        self.heard = b""
        self.ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.trusted = self._at.trusts(transport)
        transport.write(b"hello")  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.heard += data

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self.ended = True

    @property
    def peer_serial(self) -> str:
        assert self.transport is not None
        return str(self.transport.get_extra_info("ssl_object").getpeercert()["serialNumber"])


@asynccontextmanager
async def listening(network: TcpNetwork) -> AsyncIterator[tuple[str, list[End]]]:
    accepted: list[End] = []

    def accept() -> End:
        accepted.append(End(network))
        return accepted[-1]

    address = await network.listen(accept)
    try:
        yield address, accepted
    finally:
        for end in accepted:
            if end.transport is not None:
                end.transport.abort()  # type: ignore[attr-defined]
        network.close()
        await asyncio.sleep(0.01)


async def connected(network: TcpNetwork, address: str) -> End:
    end = End(network)
    await network.connect(address, lambda: end)
    return end


async def refused(network: TcpNetwork, address: str, accepted: list[End]) -> None:
    """Neither is heard of the other."""
    try:
        end = await connected(network, address)
    except OSError:
        pass
    else:
        await until(lambda: end.ended)
        assert end.heard == b""
    assert not any(end.heard for end in accepted)


@pytest.mark.slow
async def test_the_page_makes_a_certificate_of_members(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    [commands] = [block.text for block in blocks(ROOT / "docs/how-to/cluster.md") if "openssl" in block.text]
    made = await asyncio.create_subprocess_exec("sh", "-ec", commands, cwd=tmp_path)
    assert await made.wait() == 0
    tls = ClusterTlsConfig(cert=tmp_path / "tls.crt", key=tmp_path / "tls.key", ca=tmp_path / "ca.crt")
    ours = TcpNetwork(ClusterConfig(listen="127.0.0.1:0", tls=tls))
    async with listening(ours) as (address, accepted):
        end = await connected(ours, address)
        await until(lambda: end.heard and accepted and accepted[0].heard)
        assert end.trusted
        assert accepted[0].trusted
        end.transport.abort()  # type: ignore[union-attr]


async def test_members_trust_each_other(tmp_path: Path, ca: trustme.CA) -> None:
    ours, theirs = Certificate(tmp_path / "a", ca), Certificate(tmp_path / "b", ca)
    async with listening(ours.network()) as (address, accepted):
        end = await connected(theirs.network(), address)
        await until(lambda: end.heard and accepted and accepted[0].heard)
        assert end.trusted
        assert accepted[0].trusted
        assert (end.peer_serial, accepted[0].peer_serial) == (ours.serial, theirs.serial)
        end.transport.abort()  # type: ignore[union-attr]


@pytest.mark.parametrize("stranger", ["listens", "connects"])
async def test_a_certificate_of_another_authority_is_refused(tmp_path: Path, ca: trustme.CA, stranger: str) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    ours = Certificate(tmp_path / "a", ca)
    theirs = Certificate(tmp_path / "b", trustme.CA(), trusted=ca)
    listener, client = (theirs, ours) if stranger == "listens" else (ours, theirs)
    async with listening(listener.network()) as (address, accepted):
        await refused(client.network(), address, accepted)


async def test_a_listener_with_another_name_is_refused(tmp_path: Path, ca: trustme.CA) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    ours, theirs = Certificate(tmp_path / "a", ca), Certificate(tmp_path / "b", ca, "vllm")
    async with listening(theirs.network()) as (address, accepted):
        await refused(ours.network(), address, accepted)


async def test_a_client_with_another_name_is_not_trusted(tmp_path: Path, ca: trustme.CA) -> None:
    """The handshake cannot tell; its first message is refused (see the tests of sessions)."""
    ours, theirs = Certificate(tmp_path / "a", ca), Certificate(tmp_path / "b", ca, "vllm")
    async with listening(ours.network()) as (address, accepted):
        end = await connected(theirs.network(), address)
        await until(lambda: accepted and accepted[0].transport is not None)
        assert accepted[0].trusted is False
        end.transport.abort()  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["plaintext", "no certificate"])
async def test_a_client_without_a_certificate_is_refused(tmp_path: Path, ca: trustme.CA, how: str) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    ours = Certificate(tmp_path / "a", ca)
    async with listening(ours.network()) as (address, accepted):
        if how == "plaintext":
            await refused(TcpNetwork(ClusterConfig(listen="127.0.0.1:0")), address, accepted)
            return
        host, _, port = address.rpartition(":")
        context = ssl.create_default_context(cafile=ours.ca)
        end = End(TcpNetwork(ClusterConfig(listen="127.0.0.1:0")))
        try:
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: end, host, int(port), ssl=context, server_hostname=NAME)
        except OSError:
            pass
        else:
            await until(lambda: end.ended)
            assert end.heard == b""
        assert not any(one.heard for one in accepted)


async def test_a_renewed_certificate_is_used_on_both_sides(
    tmp_path: Path, ca: trustme.CA, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_tls, "CHECK_S", 0.01)
    ours, theirs = Certificate(tmp_path / "a", ca), Certificate(tmp_path / "b", ca)
    network, other = ours.network(), theirs.network()
    async with listening(network) as (address, accepted):
        with capture_logs() as logs:
            ours.renew(ca)
            theirs.renew(ca)
            await until(lambda: any(line["event"] == "certificate_reloaded" for line in logs))
        end = await connected(other, address)
        await until(lambda: end.heard and accepted and accepted[0].heard)
        assert (end.peer_serial, accepted[0].peer_serial) == (ours.serial, theirs.serial)
        end.transport.abort()  # type: ignore[union-attr]


async def test_the_authority_is_replaced_while_members_run(
    tmp_path: Path, ca: trustme.CA, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are trusted first, then all certificates are renewed, and at last the old authority is trusted no more."""
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    monkeypatch.setattr(http_tls, "CHECK_S", 0.01)
    new = trustme.CA()
    ours, old, renewed = (Certificate(tmp_path / name, one) for name, one in (("a", ca), ("b", ca), ("c", new)))
    async with listening(ours.network()) as (address, accepted):

        async def accepts(other: Certificate) -> None:
            end = await connected(other.network(), address)
            await until(lambda: bool(end.heard and accepted[-1].heard))
            end.transport.abort()  # type: ignore[union-attr]
            accepted.clear()

        async def take_over(*trusted: trustme.CA) -> None:
            with capture_logs() as logs:
                _trusts(ours, *trusted)
                await until(lambda: any(line["event"] == "certificate_reloaded" for line in logs))
            accepted.clear()

        _trusts(renewed, ca, new)
        await accepts(old)
        await refused(renewed.network(), address, accepted)
        await take_over(ca, new)
        await accepts(old)
        await accepts(renewed)
        await take_over(new)
        await accepts(renewed)
        await refused(old.network(), address, accepted)


async def test_files_that_are_of_no_use_for_a_moment_change_nothing(tmp_path: Path, ca: trustme.CA) -> None:
    ours, theirs = Certificate(tmp_path / "a", ca), Certificate(tmp_path / "b", ca)
    other = theirs.network()
    serial = theirs.serial
    async with listening(ours.network()) as (address, accepted):
        theirs.key.write_text("half a ")
        end = await connected(other, address)
        await until(lambda: end.heard and accepted and accepted[0].heard)
        assert accepted[0].peer_serial == serial
        end.transport.abort()  # type: ignore[union-attr]


def _lost(files: Certificate) -> None:
    files.cert.unlink()


def _without_key(files: Certificate) -> None:
    files.key.write_text("no key")


def _without_authority(files: Certificate) -> None:
    files.ca.write_text("no certificate")


@pytest.mark.parametrize(
    ("spoil", "key"),
    [(_lost, "cluster.tls.cert"), (_without_key, "cluster.tls.cert"), (_without_authority, "cluster.tls.ca")],
)
def test_files_that_cannot_be_used_name_the_key(
    tmp_path: Path, ca: trustme.CA, spoil: Callable[[Certificate], None], key: str
) -> None:
    files = Certificate(tmp_path / "a", ca)
    spoil(files)
    with pytest.raises(ConfigError) as caught:
        files.network()
    assert str(caught.value).startswith(f"{key}: ")
