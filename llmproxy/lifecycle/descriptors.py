"""The limit of open files (`ulimit -n`) and the number of connections that it allows.

A request needs two descriptors, for its client and for a backend. If clients took all descriptors, connections to
backends would fail, and the backends would look faulty.
"""

from __future__ import annotations

import errno
import math
import resource
from contextlib import suppress

from llmproxy.config import ClientsConfig, Config

OPEN_FILES_MAX = 1 << 20  # The limit is never raised above this number, Linux's default maximum (fs.nr_open).
OWN_SHARE, OWN_MIN, OWN_MAX = 8, 32, 2048
"""The descriptors reserved for polls, pages, logs and DNS: 1/OWN_SHARE of all, at least OWN_MIN, at most OWN_MAX."""

EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""The errors on opening a connection that this process or machine causes, and not the peer."""
LIMITS = {
    errno.EMFILE: "the limit is LimitNOFILE= of the unit, or ulimit -n",
    errno.EADDRNOTAVAIL: "the local ports are net.ipv4.ip_local_port_range",
}


def raise_limit() -> None:
    """Raises the soft limit of open files to the hard limit, for this process and its children."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # A sandbox may forbid this. The limit in force is logged at the start.
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_files_max() -> int:
    """Returns the number of files that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_FILES_MAX if soft == resource.RLIM_INFINITY else soft


def connections_max() -> int:
    """Returns the maximum number of client connections of this process, if each needs a connection to a backend."""
    return max(1, (open_files_max() - _reserved()) // 2)


def clients_of_process(config: Config) -> ClientsConfig:
    """Returns the client limits of one worker process.

    `connections_max` is divided by the number of workers. The limits per address stay.
    """
    share = math.ceil(config.clients.connections_max / config.workers)
    return config.clients.model_copy(update={"connections_max": min(share, connections_max())})


def clients_of_admin_port(config: Config) -> ClientsConfig:
    """Returns the client limits of the port for operators.

    Its connections use the descriptors that are reserved for the process itself.
    """
    return config.clients.model_copy(update={"connections_max": min(config.clients.connections_max, _reserved() // 2)})


def member_connections_max() -> int:
    """Returns the maximum number of connections from other cluster members, which use reserved descriptors."""
    return _reserved() // 4


def _reserved() -> int:
    return min(OWN_MAX, max(OWN_MIN, open_files_max() // OWN_SHARE))


def errno_reason(error: OSError) -> str | None:
    """Returns a reason for people if this process or machine caused a connection error; None if the peer caused it."""
    if error.errno not in EXHAUSTED:
        return None
    hint = LIMITS.get(error.errno)
    return f"{error.strerror or error}" + (f" ({hint})" if hint else "")
