"""Pending connections at the port of a member: limits on their number and duration."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import cast

import pytest
import trustme
from structlog.testing import capture_logs

from llmproxy.config import ClusterConfig
from llmproxy.lab.run.virtual_time import run
from llmproxy.remote.cluster import network as network_module
from llmproxy.remote.cluster.network import ADDRESS_MAX, HELLO_S, LOG_S, PendingConnections, TcpNetwork
from llmproxy.remote.link import FRAME_BYTES_MAX, HELLO_BYTES_MAX, frame
from llmproxy.remote.messages import Ping
from tests.e2e.proxies import until
from tests.remote.cluster.test_tls import Certificate, connected, listening


class Pipe(asyncio.Transport):
    """A connection of a host, which notes whether it is open."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__({"peername": (host, port)})
        self.open = True

    def is_closing(self) -> bool:
        return not self.open

    def abort(self) -> None:
        self.open = False


def pipes(host: str, count: int) -> list[Pipe]:
    return [Pipe(host, port) for port in range(count)]


def test_connection_without_hello_in_time_is_cut() -> None:
    async def main() -> None:
        found = PendingConnections(100)
        member, stranger = Pipe("a", 1), Pipe("a", 2)
        found.accepted(member)
        found.accepted(stranger)
        await asyncio.sleep(HELLO_S / 2)
        found.identified(member)
        await asyncio.sleep(HELLO_S)
        assert (member.open, stranger.open) == (True, False)
        await asyncio.sleep(1_000)
        assert member.open

    run(main())


def test_member_whose_hello_is_read_before_its_connection_is_counted_stays() -> None:
    async def main() -> None:
        found = PendingConnections(100)
        member = Pipe("a", 1)
        found.identified(member)
        found.accepted(member)
        await asyncio.sleep(2 * HELLO_S)
        assert member.open
        member.abort()
        stranger = Pipe("a", 1)
        found.accepted(stranger)
        await asyncio.sleep(2 * HELLO_S)
        assert not stranger.open, "another connection from the same port is unknown"

    run(main())


def test_the_oldest_of_an_address_makes_room_for_the_newest_and_no_other_one() -> None:
    async def main() -> None:
        found = PendingConnections(1_000)
        other, member = Pipe("b", 1), Pipe("a", -1)
        found.accepted(other)
        found.accepted(member)
        found.identified(member)
        ones = pipes("a", 3 * ADDRESS_MAX)
        for one in ones:
            found.accepted(one)
        assert [one.open for one in ones] == [False] * 2 * ADDRESS_MAX + [True] * ADDRESS_MAX
        assert other.open
        assert member.open

    run(main())


def test_members_keep_their_connections_where_too_many_are_open() -> None:
    async def main() -> None:
        found = PendingConnections(4)
        members = pipes("m", 2)
        for one in members:
            found.accepted(one)
            found.identified(one)
        ones = [Pipe(host, 1) for host in "abcdef"]
        for one in ones:
            found.accepted(one)
        assert [one.open for one in ones] == [False] * 4 + [True] * 2
        for one in ones[4:]:
            found.identified(one)
        late = Pipe("z", 1)
        found.accepted(late)
        assert not late.open, "all that are open are members"
        members[0].abort()
        again = Pipe("z", 2)
        found.accepted(again)
        assert again.open
        assert all(one.open for one in [members[1], *ones[4:]])

    run(main())


def test_cuts_are_logged_once_a_minute_with_their_number() -> None:
    async def main() -> None:
        found = PendingConnections(1_000)
        for one in pipes("a", ADDRESS_MAX + 5):
            found.accepted(one)
        await asyncio.sleep(LOG_S)
        found.accepted(Pipe("b", 1))
        await asyncio.sleep(HELLO_S)

    with capture_logs() as lines:
        run(main())
    assert [(line["event"], line["peer"], line["connections"]) for line in lines] == [
        ("cluster_connections_cut", "a", 1),
        ("cluster_connections_cut", "b", ADDRESS_MAX + 5),
    ]


# --- on real sockets --------------------------------------------------------------------------------------------------


def _open(address: str, count: int, first: bytes = b"") -> list[socket.socket]:
    host, _, port = address.rpartition(":")
    ones = [socket.create_connection((host, int(port)), 5) for _ in range(count)]
    for one in ones:
        one.sendall(first)
        one.settimeout(10)
    return ones


async def _ended(one: socket.socket) -> bool:
    """Whether the other side ends the connection."""

    def read() -> bool:
        try:
            while one.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    return await asyncio.to_thread(read)


@pytest.fixture
def plain_network(monkeypatch: pytest.MonkeyPatch) -> TcpNetwork:
    monkeypatch.setattr(network_module, "HELLO_S", 0.2)
    return TcpNetwork(ClusterConfig(listen="127.0.0.1:0"))


@pytest.mark.parametrize("first", [b"", b"\x16", b"\x16\x03\x01\x02\x00", b"GET / HTTP/1.1\r\n\r\n"], ids=repr)
async def test_connections_that_never_finish_tls_are_cut_and_members_come_in(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: bytes,
) -> None:
    monkeypatch.setattr(network_module, "HELLO_S", 0.2)
    monkeypatch.setattr(network_module, "member_connections_max", lambda: 32)
    member = Certificate(tmp_path / "member", trustme.CA())
    mine = member.network()
    async with listening(mine) as (address, accepted):
        ones = _open(address, 60, first)
        end = await connected(member.network(), address)
        await until(lambda: end.trusted and end.heard)
        await until(lambda: any(each.transport is not None for each in accepted))
        inside = next(each for each in accepted if each.transport is not None)
        mine.identified(cast(asyncio.BaseTransport, inside.transport))
        assert all(await asyncio.gather(*map(_ended, ones)))
        for one in ones:
            one.close()
        assert not end.ended
        assert not inside.ended


async def test_connection_that_only_pings_is_cut_and_a_member_stays(plain_network: TcpNetwork) -> None:
    async with listening(plain_network) as (address, accepted):
        [one] = _open(address, 1)
        end = await connected(plain_network, address)
        await until(lambda: len(accepted) == 2 and end.heard)
        plain_network.identified(cast(asyncio.BaseTransport, accepted[1].transport))

        async def ping() -> None:
            while True:
                one.sendall(frame([Ping()]))
                await asyncio.sleep(0.02)

        async with asyncio.timeout(10):
            with pytest.raises(OSError, match=r"reset|Broken pipe"):
                await ping()
        one.close()
        assert not end.ended


async def test_member_that_says_hello_with_its_connection_stays(plain_network: TcpNetwork) -> None:
    """A busy leader reads the first bytes of a connection before it counts the connection."""

    class Identified(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            del data
            plain_network.identified(self.transport)

    address = await plain_network.listen(Identified)
    try:
        ones = _open(address, ADDRESS_MAX // 2, frame([Ping()]))
        for one in ones:
            one.settimeout(0.4)
        assert not any(await asyncio.gather(*map(_ended, ones)))
        for one in ones:
            one.close()
    finally:
        plain_network.close()


def test_hello_is_far_smaller_than_other_frames() -> None:
    assert 100 * HELLO_BYTES_MAX < FRAME_BYTES_MAX
