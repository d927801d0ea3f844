"""The interface of a source of backends."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from ipaddress import IPv6Address
from typing import Protocol

import structlog

from llmproxy.config import BackendConfig

BACKENDS_MAX = 1_024  # Maximum number of backends of one source.
SHOWN_CHARS = 60  # Maximum number of characters of a wrong value that a message repeats.
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([-A-Za-z0-9_.]*[A-Za-z0-9_])?")  # A name or an IPv4 address.
_SCOPED = re.compile(r"[0-9A-Fa-f:.]+(%[-A-Za-z0-9_.]+)?")

_log = structlog.get_logger()


class SourceFailedError(Exception):
    """A source did not answer, or its answer cannot be used."""


class RefusedLog:
    """Logs the invalid objects of one source.

    A reason is logged once. It is logged again if the object was valid, gone or refused for another reason in between.
    """

    def __init__(self) -> None:
        self._logged: Mapping[str, str] = {}

    def log(self, source: str, refused: Mapping[str, str]) -> None:
        """Logs the reasons that are new. `refused` maps the name of every invalid object to the reason."""
        for name, why in refused.items():
            if self._logged.get(name) != why:
                _log.warning("object_refused", object=name, source=source, why=why)
        self._logged = dict(refused)


def host_port(host: str, port: int) -> str:
    """Returns HOST:PORT as in a URL, an IPv6 address in brackets. Raises ValueError for an invalid host or port."""
    if not 0 < port < 1 << 16:
        raise ValueError(f"{port} is no port")
    if _HOST_NAME.fullmatch(host):
        return f"{host}:{port}"
    if not _SCOPED.fullmatch(host):
        raise ValueError(f"{host[:SHOWN_CHARS]!r} is no address")
    IPv6Address(host)
    return f"[{host}]:{port}"


class BackendSource(Protocol):
    """A source of backends, such as a DNS name. The discovery calls `query` again and again."""

    @property
    def interval_s(self) -> float:
        """The seconds between two queries."""

    async def query(self) -> Sequence[BackendConfig] | None:
        """Returns all backends of the source; None if nothing has changed. Raises SourceFailedError."""

    def repeat(self) -> None:
        """Makes a later query return all backends again, because the last ones could not be used."""

    async def close(self) -> None:
        """Ends the background work of the source."""
