"""How many files this process may have open (descriptors, `ulimit -n`), and how many connections that allows.

A request takes two: the connection of its client, and one to a backend. A process that accepted as many clients as it
has descriptors could not connect to backends, and the failures would look like failures of the backends.
"""

from __future__ import annotations

import errno
import math
import resource
from contextlib import suppress

from llmproxy.config import ClientsConfig, Config

OPEN_FILES_MAX = 1 << 20
"""The limit is not raised beyond this: the most that Linux allows a process by default (fs.nr_open)."""
OWN_SHARE, OWN_MIN, OWN_MAX = 8, 32, 2048
"""One of so many descriptors is for all that is no request of a client: polls, pages, logs, look-ups."""

EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors of opening a connection whose cause is this process or its machine, not the other end."""
LIMITS = {
    errno.EMFILE: "the limit is LimitNOFILE= of the unit, or ulimit -n",
    errno.EADDRNOTAVAIL: "the local ports are net.ipv4.ip_local_port_range",
}


def raise_limit() -> None:
    """Allow this process, and those that it starts, as many open files as it may allow itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # A sandbox may forbid it. The limit is logged at the start in any case.
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_files_max() -> int:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_FILES_MAX if soft == resource.RLIM_INFINITY else soft


def connections_max() -> int:
    """How many connections of clients this process can have, and at the same time as many to backends."""
    return max(1, (open_files_max() - _own()) // 2)


def clients_of_process(config: Config) -> ClientsConfig:
    """The limits of clients for one of the processes that accept clients. The limit of connections is divided among
    them, and is no more than the descriptors allow; limits of one address hold in each process."""
    share = math.ceil(config.clients.connections_max / config.workers)
    return config.clients.model_copy(update={"connections_max": min(share, connections_max())})


def clients_of_admin_port(config: Config) -> ClientsConfig:
    """The same for the admin port, whose connections take descriptors that are kept for the process itself."""
    return config.clients.model_copy(update={"connections_max": min(config.clients.connections_max, _own() // 2)})


def member_connections_max() -> int:
    """How many connections other members of a cluster may have here. These too are kept for the process itself."""
    return _own() // 4


def _own() -> int:
    return min(OWN_MAX, max(OWN_MIN, open_files_max() // OWN_SHARE))


def errno_reason(error: OSError) -> str | None:
    """What this machine lacks for a connection, for people; None where the cause is the other end."""
    if error.errno not in EXHAUSTED:
        return None
    hint = LIMITS.get(error.errno)
    return f"{error.strerror or error}" + (f" ({hint})" if hint else "")
