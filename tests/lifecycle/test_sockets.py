"""Inherited listening sockets: their process, their use, and wrong descriptors."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from llmproxy.config import ConfigError
from llmproxy.lifecycle.sockets import PREDECESSOR, ListenError, Sockets

PID = 4711


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        yield opened


def handed(address: str, *fds: int, ready_fd: int) -> dict[str, str]:
    return {PREDECESSOR: json.dumps({"ready_fd": ready_fd, "sockets": {address: fds}})}


def test_without_variables_sockets_are_opened() -> None:
    environment = {"HOME": "/"}
    sockets = Sockets.from_environment(environment, PID)
    [opened], held = sockets.listening("127.0.0.1", 0)
    with opened:
        assert (held, sockets.ready_fd, environment) == (False, None, {"HOME": "/"})
        assert not opened.get_inheritable()
        with socket.create_connection(opened.getsockname()):
            pass


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="a system without IPv6")
@pytest.mark.parametrize("acceptors", [1, 2])
def test_the_ipv6_wildcard_is_all_addresses_of_both_families(acceptors: int) -> None:
    sockets = Sockets()
    opened, _ = sockets.listening("::", 0, acceptors)
    port = opened[0].getsockname()[1]
    with ExitStack() as stack:
        for one in opened:
            stack.enter_context(one)
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port), 5).close()
        assert len(opened) == acceptors
        assert sockets.addresses("::", 0) == [f"[::]:{port}", f"0.0.0.0:{port}"]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0"])
def test_any_other_address_is_itself(host: str) -> None:
    sockets = Sockets()
    [opened], _ = sockets.listening(host, 0)
    with opened:
        port = opened.getsockname()[1]
        assert sockets.addresses(host, 0) == [f"[{host}]:{port}" if ":" in host else f"{host}:{port}"]
        other = "127.0.0.1" if host == "::1" else "::1"
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((other, port), 5)


def test_descriptors_for_another_process_are_left_alone() -> None:
    environment = {"LISTEN_PID": str(PID + 1), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "llmproxy.socket"}
    [opened], held = Sockets.from_environment(environment, PID).listening("127.0.0.1", 0)
    opened.close()
    assert not held
    assert not environment, "what this process starts does not learn of them either"


def test_a_predecessors_sockets_are_used_for_their_address(listening: socket.socket) -> None:
    reads, writes = os.pipe()
    environment = handed("127.0.0.1:0", os.dup(listening.fileno()), ready_fd=writes)
    sockets = Sockets.from_environment(environment, PID)
    [used], held = sockets.listening("127.0.0.1", 0)
    with used:
        assert (used.getsockname(), held, environment) == (listening.getsockname(), False, {})
        assert not used.get_inheritable()
        assert not os.get_inheritable(writes)
        # It passes on the sockets that it inherited.
        handed_on, fds = sockets.for_successor(99)
        assert json.loads(handed_on[PREDECESSOR]) == {"ready_fd": 99, "sockets": {"127.0.0.1:0": [used.fileno()]}}
        assert fds == [99, used.fileno()]
        sockets.serving()
        assert os.read(reads, 10) == b"1"
        assert os.read(reads, 10) == b"", "and the pipe is closed"
    os.close(reads)


def test_an_unused_inherited_socket_is_closed(listening: socket.socket) -> None:
    reads, writes = os.pipe()
    fd = os.dup(listening.fileno())
    sockets = Sockets.from_environment(handed("127.0.0.1:81", fd, ready_fd=writes), PID)
    [opened], _ = sockets.listening("127.0.0.1", 0)
    with opened:
        assert opened.getsockname() != listening.getsockname()
        os.close(reads)
        sockets.serving()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_a_port_that_is_taken_is_an_os_error(listening: socket.socket) -> None:
    with pytest.raises(OSError, match="in use"):
        Sockets().listening("127.0.0.1", listening.getsockname()[1])


def test_socket_that_does_not_listen_is_refused() -> None:
    reads, writes = os.pipe()
    connected, other = socket.socketpair()
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for fd, reason in (
        (reads, "is no socket"),
        (connected.fileno(), "that listens"),
        (datagrams.fileno(), "TCP socket"),
    ):
        copy = os.dup(fd)
        with pytest.raises(ConfigError, match=reason):
            Sockets.from_environment(handed("a:1", copy, ready_fd=writes), PID)
        os.close(copy)
    for one in (connected, other, datagrams):
        one.close()
    for fd in (reads, writes):
        os.close(fd)


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.EADDRINUSE, "another port"),
        (errno.EACCES, "below 1024"),
        (errno.EADDRNOTAVAIL, "another host"),
        (socket.EAI_NONAME, "another host"),
    ],
)
def test_hint_fits_the_error_of_the_address(number: int, hint: str) -> None:
    refused = ListenError("gpu-0", 80, OSError(number, "no"))
    assert hint in refused.hint
    assert (refused.host, refused.port, str(refused)) == ("gpu-0", 80, f"[Errno {number}] no")
