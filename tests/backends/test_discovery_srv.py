"""SRV records as they come over the wire, from a name server of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import pytest
from dns import asyncresolver, flags, message, rcode, rdatatype, rrset

from llmproxy.backends.discovery import services
from llmproxy.backends.source import SourceFailedError

NAME = "_vllm._tcp.svc.test"


class NameServer(asyncio.DatagramProtocol):
    """Answers every question with `records`, in the form that zone files have, or with an error."""

    def __init__(self) -> None:
        self.records: Sequence[str] = ()
        self.code = rcode.NOERROR
        self.transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str | Any, int]) -> None:
        assert self.transport is not None
        answer = message.make_response(message.from_wire(data))
        answer.flags |= flags.RA
        answer.set_rcode(self.code)
        if self.records:
            answer.answer.append(rrset.from_text_list(f"{NAME}.", 60, "IN", rdatatype.SRV, list(self.records)))
        self.transport.sendto(answer.to_wire(), addr)


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NameServer]:
    loop = asyncio.get_running_loop()
    transport, one = await loop.create_datagram_endpoint(NameServer, local_addr=("127.0.0.1", 0))
    resolver = asyncresolver.Resolver(configure=False)
    resolver.nameservers = ["127.0.0.1"]
    resolver.port = transport.get_extra_info("sockname")[1]
    monkeypatch.setattr(asyncresolver, "default_resolver", resolver)
    # A busy machine may take longer over the answer than a proxy would wait for it.
    monkeypatch.setattr("llmproxy.backends.discovery.LOOK_UP_TIMEOUT_S", 30.0)
    yield one
    transport.close()


async def test_the_most_urgent_priority_alone_counts_with_a_port_for_each(server: NameServer) -> None:
    server.records = ("20 0 8000 spare.test.", "10 5 8443 a.test.", "10 1 9443 b.test.")
    assert sorted(await services(NAME, 0)) == [("a.test", 8443), ("b.test", 9443)]


@pytest.mark.parametrize("code", [rcode.NXDOMAIN, rcode.NOERROR])
async def test_a_name_without_records_has_no_backends(code: rcode.Rcode, server: NameServer) -> None:
    server.code = code
    assert await services(NAME, 0) == []


async def test_a_name_server_that_fails_says_nothing_of_the_backends(server: NameServer) -> None:
    server.code = rcode.SERVFAIL
    with pytest.raises(SourceFailedError, match=f"{NAME} cannot be looked up: "):
        await services(NAME, 0)
