"""Sections about the process: its clients, its ports, and the other proxies of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from llmproxy.config import idle
from llmproxy.config.checks import Problem, report
from llmproxy.config.schema.section import Section
from llmproxy.config.value_types import (
    Count,
    Integer,
    LockName,
    Name,
    Networks,
    Number,
    Origins,
    PathOrNone,
    Seconds,
    host_and_port,
    is_loopback,
    lock_of,
    time_zone_of,
)


class ClientsConfig(Section):
    trusted_proxies: Networks = Field(default=(), examples=["loopback", "10.1.2.3"])
    """Reverse proxies whose X-Forwarded-For counts: loopback, all, none, or addresses and networks."""
    connections_max: Count = 65_536
    """Most client connections; further ones are closed with 503. The limit of open files can lower this number."""
    address_connections_max: Count | None = None
    """Most connections from one address to each worker; further ones are closed with 429. Trusted proxies have no such
    limit. null: no limit."""
    address_requests_per_s: Annotated[Number, Field(gt=0)] | None = None
    """Most requests per second from one address to each worker; further ones get 429. null: no limit."""
    idle_timeout_s: Seconds = 75.0
    """A connection is closed if for this time no request comes, or the client reads nothing of a response."""
    head_timeout_s: Seconds = 30.0
    """Longest time for the head of a request, or for a TLS handshake. Then the connection is closed."""
    head_bytes_max: Count = 128 << 10
    """Largest head of a request in bytes: request line and header fields; larger ones get 431."""
    head_fields_max: Count = 128
    """Most header fields of a request; more get 431."""
    body_idle_timeout_s: Seconds = 30.0
    """Longest pause in the arrival of a request body; then 408."""
    body_timeout_s: Seconds = 600.0
    """Longest time for the arrival of a request body; then 408."""
    allowed_origins: Origins = Field(default=(), examples=[["https://app.example"]])
    """Web origins that may call the proxy from a browser (CORS). * allows all."""


_WITH_CERT = idle.Rule(
    lambda config, _: None if config.tls.cert else "has no effect without tls.cert: llmproxy serve does not start"
)


class TlsConfig(Section):
    cert: Path | None = None
    """Certificate chain (PEM), read again when it changes. null: plain http."""
    key: Annotated[Path | None, _WITH_CERT] = None
    """Private key of `cert` (PEM), without a passphrase. null: the file `cert` has the key too."""
    client_ca: Annotated[Path | None, _WITH_CERT] = None
    """CA certificates (PEM) that must have signed each client's certificate. null: no client certificates."""


class AdminConfig(Section):
    host: Annotated[str, Field(min_length=1), idle.unless_given("admin.port")] = "127.0.0.1"
    """Address on which the admin port listens."""
    port: Annotated[Integer, Field(ge=0, le=65535)] | None = None
    """Port for /metrics, /debug, /admin, /scale, /ui and adapters. null: the client port."""
    public_metrics: Annotated[
        bool,
        idle.unless(lambda config: config.admin.port is None, "everybody who reaches admin.port sees /metrics there"),
    ] = False
    """Serve /metrics on the client port without a key, despite tenants or an admin key."""


class UsageConfig(Section):
    dir: PathOrNone = Field(default="auto", examples=["/var/lib/llmproxy/usage"])
    """Folder for the daily use of tenants: auto (beside the state file), none (the use is lost at the end of the
    process), or a path. Members of a cluster need a common folder."""
    time_zone: Annotated[str, AfterValidator(time_zone_of)] = Field(default="UTC", examples=["Europe/Berlin"])
    """Time zone in which a day of `usage` and of daily limits begins and ends."""


class ClusterTlsConfig(Section):
    cert: Path | None = None
    """Certificate chain (PEM). null: no TLS."""
    key: Path | None = None
    """Private key of `cert` (PEM), without a passphrase. null: the file `cert` has the key too."""
    ca: Path | None = None
    """CA certificates (PEM) that must have signed all members' certificates. null: no TLS."""
    name: Name = "llmproxy"
    """DNS name that the certificate of every member contains."""


_IN_CLUSTER = idle.unless_given("cluster.listen")


class ClusterConfig(Section):
    listen: Annotated[str, AfterValidator(host_and_port)] | None = Field(default=None, examples=["0.0.0.0:8090"])
    """HOST:PORT to listen on for other members. null: no cluster."""
    advertise: Annotated[Annotated[str, AfterValidator(host_and_port)] | None, _IN_CLUSTER] = Field(
        default=None, examples=["10.0.0.7:8090"]
    )
    """HOST:PORT at which other members reach this one. null: `listen`, with the address of this host's name in place
    of 0.0.0.0 or ::."""
    lock: Annotated[str, AfterValidator(lock_of), _IN_CLUSTER] = Field(
        default="kubernetes", examples=["valkey://valkey:6379"], repr=False
    )
    """Lock that elects the leader: kubernetes (a Lease), or valkey://HOST:PORT (Redis too)."""
    lock_s: Annotated[Number, Field(ge=1), _IN_CLUSTER] = 4.0
    """Lifetime of the lock. When a leader dies, no request is sent to a backend for this time and up to 1 s more."""
    name: Annotated[LockName, _IN_CLUSTER] = "llmproxy"
    """Name of the cluster and its lock, the same for all members."""
    member: Annotated[Name | None, _IN_CLUSTER] = None
    """Name of this member, different from all others. null: the host name."""
    plaintext: Annotated[bool, _IN_CLUSTER] = False
    """Allow members on other machines without TLS. Anyone who can connect is trusted."""
    tls: Annotated[ClusterTlsConfig, _IN_CLUSTER] = ClusterTlsConfig()
    """Certificates for mutual TLS between members."""

    @model_validator(mode="after")
    def _is_guarded(self) -> ClusterConfig:
        """Raises ValueError if certificates are missing, or the port trusts any client without `plaintext`."""
        tls, listen = self.tls, self.listen
        if listen is None:
            return self
        problems: list[Problem] = []
        if tls.cert is not None and tls.ca is None:
            problems = [(("tls", "ca"), "is missing: this authority must sign the certificate of each member")]
        elif tls.cert is None and (tls.ca is not None or tls.key is not None):
            problems = [(("tls", "cert"), "is missing")]
        elif tls.cert is None and not self.plaintext and not is_loopback(listen.rpartition(":")[0]):
            reason = "members need tls.cert and tls.ca, or plaintext: true where no one else can connect"
            problems = [(("listen",), reason)]
        report(problems)
        return self
