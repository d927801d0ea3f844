"""Listening sockets, opened here or inherited.

A process inherits sockets from systemd by socket activation (`LISTEN_FDS` descriptors from 3 on belong to process
`LISTEN_PID`, sd_listen_fds(3)), or from its predecessor, the process that it replaces. Both keep the sockets open
during the change, so the kernel queues new connections.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from llmproxy.config import ConfigError

PREDECESSOR = "LLMPROXY_PREDECESSOR"  # The environment variable with the descriptors that a successor inherits.
LISTEN_FDS_START = 3
SYSTEMD = "systemd"  # The key of all sockets from systemd, whose configuration determines their addresses.


class ListenError(OSError):
    """No socket could be opened on an address. The text is the message of the operating system."""

    def __init__(self, host: str, port: int, cause: OSError) -> None:
        super().__init__(cause.errno, str(cause))
        self.host = host
        self.port = port

    def __str__(self) -> str:
        return str(self.strerror)

    @property
    def hint(self) -> str:
        """Advice in one line, for people."""
        match self.errno:
            case errno.EADDRINUSE:
                return "a program or a connection has that port: end it, or choose another port (--port, --admin-port)"
            case errno.EACCES | errno.EPERM:
                return "ports below 1024 may be for privileged programs: choose another port (--port, --admin-port)"
            case _:
                return "this machine has no such address: choose another host (--host, --admin-host; 0.0.0.0 is all)"


@dataclass(slots=True)
class Sockets:
    """The listening sockets of this process. Each mapping has an address `host:port`, or SYSTEMD, as its key."""

    ready_fd: int | None = None  # The pipe on which a predecessor waits for a byte; None without a predecessor.
    _inherited: dict[str, list[socket.socket]] = field(default_factory=dict)  # Inherited sockets that are not used yet.
    _open: dict[str, list[socket.socket]] = field(default_factory=dict)  # Sockets in use.

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str], pid: int) -> Sockets:
        """Returns the sockets that process `pid` inherited, and removes their variables from `environment`.

        Raises ConfigError for a descriptor that is no listening TCP socket.
        """
        inherits = environment.pop(PREDECESSOR, None)
        meant_for, count = environment.pop("LISTEN_PID", None), environment.pop("LISTEN_FDS", None)
        environment.pop("LISTEN_FDNAMES", None)
        if inherits is not None:
            handed = json.loads(inherits)
            inherited = {address: [_adopted(fd) for fd in fds] for address, fds in handed["sockets"].items()}
            os.set_inheritable(handed["ready_fd"], False)
            return cls(handed["ready_fd"], inherited)
        if count is not None and meant_for == str(pid):
            fds = range(LISTEN_FDS_START, LISTEN_FDS_START + int(count))
            return cls(None, {SYSTEMD: [_adopted(fd) for fd in fds]})
        return cls()

    def listening(self, host: str, port: int, acceptors: int = 1) -> tuple[list[socket.socket], bool]:
        """Returns the sockets for an address, and whether the service manager keeps them open too.

        Unless sockets were inherited, opens `acceptors` sockets that share the port, so that the kernel spreads
        connections over them. The number of inherited sockets may differ. Raises ListenError.
        """
        address = f"{host}:{port}"
        key = SYSTEMD if SYSTEMD in self._inherited else address
        try:
            sockets = self._inherited.pop(key, None) or open_sockets(host, port, acceptors)
        except OSError as error:
            raise ListenError(host, port, error) from error
        self._open[key] = sockets
        return sockets, key == SYSTEMD

    def addresses(self, host: str, port: int) -> list[str]:
        """Returns the distinct addresses of systemd's sockets, or else of the sockets for `host` and `port`."""
        sockets = self._open.get(SYSTEMD) or self._open[f"{host}:{port}"]
        return list(dict.fromkeys(address for one in sockets for address in _served(one)))

    def serving(self) -> None:
        """Closes unused inherited sockets, and tells the predecessor to shut down. Call it when all sockets listen."""
        for sockets in self._inherited.values():
            for one in sockets:
                one.close()
        self._inherited.clear()
        if self.ready_fd is not None:
            with suppress(BrokenPipeError):
                os.write(self.ready_fd, b"1")
            os.close(self.ready_fd)
            self.ready_fd = None

    def for_successor(self, ready_fd: int) -> tuple[Mapping[str, str], list[int]]:
        """Returns the environment variable for a successor, and the descriptors that the successor inherits.

        `ready_fd` is the pipe to which the successor writes a byte when it serves.
        """
        fds = {address: [one.fileno() for one in sockets] for address, sockets in self._open.items()}
        handed = json.dumps({"ready_fd": ready_fd, "sockets": fds})
        return {PREDECESSOR: handed}, [ready_fd, *(fd for some in fds.values() for fd in some)]


def _adopted(fd: int) -> socket.socket:
    try:
        found = socket.socket(fileno=fd)
    except OSError as error:
        raise ConfigError([f"inherited descriptor {fd}: is no socket: {error.strerror}"]) from None
    listens = found.type == socket.SOCK_STREAM and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if not listens or found.family not in (socket.AF_INET, socket.AF_INET6):
        found.detach()
        raise ConfigError([f"inherited descriptor {fd}: should be a TCP socket that listens"])
    found.set_inheritable(False)
    return found


def _served(one: socket.socket) -> list[str]:
    host, port = one.getsockname()[:2]
    if one.family != socket.AF_INET6:
        return [f"{host}:{port}"]
    both = host == "::" and not one.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
    return [f"[{host}]:{port}"] + [f"0.0.0.0:{port}"] * both


def open_sockets(host: str, port: int, acceptors: int = 1) -> list[socket.socket]:
    """Opens `acceptors` sockets for each address of a host. Raises OSError.

    `::` covers both address families if the system has both.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            for one in _created(family, address[:2], acceptors):
                sockets.append(one)  # noqa: PERF402 - those before an error are closed
    except OSError:
        for one in sockets:
            one.close()
        raise
    return sockets


def _created(family: int, address: tuple[Any, ...], acceptors: int) -> Iterator[socket.socket]:
    """Yields `acceptors` listening sockets for one address; several share the port (SO_REUSEPORT). Raises OSError."""
    create = partial(
        socket.create_server, family=family, dualstack_ipv6=address[0] == "::" and socket.has_dualstack_ipv6()
    )
    if acceptors > 1:
        # First check that no program of the same user has this port, which SO_REUSEPORT would share.
        create(address).close()
    for _ in range(acceptors):
        yield (one := create(address, reuse_port=acceptors > 1))
        address = address[0], one.getsockname()[1]
