"""The limit of open files of this process (`ulimit -n`), and the number of connections that it allows.

A request needs two descriptors: for its client and for a backend. A process with as many clients as descriptors could
not connect to backends, and the failures would look like failures of the backends.
"""

from __future__ import annotations

import errno
import math
import resource
from contextlib import suppress

from llmproxy.config import ClientsConfig, Config

OPEN_FILES_MAX = 1 << 20
"""The limit is not raised beyond this, the most that Linux allows a process by default (fs.nr_open)."""
OWN_SHARE, OWN_MIN, OWN_MAX = 8, 32, 2048
"""1/`OWN_SHARE` of the descriptors, within the other two bounds, are reserved for the process itself: polls, pages,
logs, DNS look-ups."""

EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors on opening a connection that are caused by this process or machine, not by the peer."""
LIMITS = {
    errno.EMFILE: "the limit is LimitNOFILE= of the unit, or ulimit -n",
    errno.EADDRNOTAVAIL: "the local ports are net.ipv4.ip_local_port_range",
}


def raise_limit() -> None:
    """Raise the soft limit of open files to the hard limit, for this process and its children."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # A sandbox may forbid this. The limit in force is logged at the start.
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_files_max() -> int:
    """Returns how many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_FILES_MAX if soft == resource.RLIM_INFINITY else soft


def connections_max() -> int:
    """Returns how many client connections this process can have, with as many connections to backends."""
    return max(1, (open_files_max() - _reserved()) // 2)


def clients_of_process(config: Config) -> ClientsConfig:
    """Returns the client limits of one worker process.

    The limit of connections is divided among the workers, and is at most the number that the descriptors allow. The
    limits for one address are not divided.
    """
    share = math.ceil(config.clients.connections_max / config.workers)
    return config.clients.model_copy(update={"connections_max": min(share, connections_max())})


def clients_of_admin_port(config: Config) -> ClientsConfig:
    """Returns the client limits of the admin port. Its connections use descriptors reserved for the process itself."""
    return config.clients.model_copy(update={"connections_max": min(config.clients.connections_max, _reserved() // 2)})


def member_connections_max() -> int:
    """Returns the maximum number of connections from other cluster members. They use reserved descriptors too."""
    return _reserved() // 4


def _reserved() -> int:
    return min(OWN_MAX, max(OWN_MIN, open_files_max() // OWN_SHARE))


def errno_reason(error: OSError) -> str | None:
    """Returns the reason, for people, if this process or machine caused a connection error; None if the peer did."""
    if error.errno not in EXHAUSTED:
        return None
    hint = LIMITS.get(error.errno)
    return f"{error.strerror or error}" + (f" ({hint})" if hint else "")
