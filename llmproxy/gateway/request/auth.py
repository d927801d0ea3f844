"""Authenticates clients: looks up the digests of their keys, and finds their tenant."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from hashlib import sha256
from hmac import digest
from typing import NoReturn

from llmproxy.config import AUTO_SALT, Config, TenantConfig, api_key_name, hash_of
from llmproxy.core.domain import Outcome
from llmproxy.gateway.http.errors import Failure


@dataclass(frozen=True, slots=True)
class Tenant:
    """The tenant of a request, found by the client's key, and the rights of this tenant."""

    name: str = ""
    # The band of requests without a trusted header; None leaves the band to the model.
    band: int | None = None
    # The highest band of any request. None: a header raises the band only if the tenant is trusted.
    band_max: int | None = None
    # The share of the tenant's flow, relative to other flows.
    weight: float = 1.0
    # The model names that the tenant may use; None for all.
    models: frozenset[str] | None = None
    # Whether headers of the tenant's requests may set the band, the flow and the objective.
    trusted: bool = False
    # The objective of requests that name none (seconds to the first token, and between tokens); None: the model's.
    ttft_s: float | None = None
    tpot_s: float | None = None
    # The secret that separates the tenant's prefixes in the caches of engines; None if the prefixes are shared.
    salt: bytes | None = field(default=None, repr=False)
    # The name of the client's key in logs and metrics, never the key itself. None for a client without a key.
    key: str | None = field(default=None, compare=False)
    # When the key expires; None if it never expires.
    expires: datetime | None = field(default=None, compare=False)

    def cache_salt(self, own: str | None) -> str | None:
        """Returns the `cache_salt` that replaces `own`, the client's salt (None: the client sent none).

        Returns None if the tenant has no secret.

        The salt is an HMAC (RFC 2104) with the tenant's secret as its key. The client chooses only the message, so it
        can never match a prefix of another tenant. The salt has 43 characters, the length that vLLM recommends.
        """
        if self.salt is None:
            return None
        message = b"" if own is None else own.encode("utf-8", "surrogatepass")
        return urlsafe_b64encode(digest(self.salt, message, "sha256")).decode().rstrip("=")

    def allows(self, name: str) -> bool:
        """Returns whether the tenant may use the model `name`.

        A forbidden model gets the answer of an unknown model.
        """
        return self.models is None or name in self.models


NO_TENANT = Tenant()  # The tenant of clients with a plain key, and of all clients if no key is configured.


def _utc_now() -> datetime:
    return datetime.now(UTC)


class Keys:
    """The client keys of a configuration. Only digests are stored, so no dump or log of this object shows a key.

    `wall_clock` returns the current time with its time zone. It serves only for the expiry of keys, which is a date.
    """

    def __init__(self, config: Config, wall_clock: Callable[[], datetime] = _utc_now) -> None:
        self._wall_clock = wall_clock
        # Digest of a key -> its tenant. The time of a look-up may tell how a digest begins, but a client can neither
        # choose the digest of its key nor find a key from a digest. So the comparison needs no constant time.
        self._tenants = {key_digest(hash_of(key)): replace(NO_TENANT, key=api_key_name(key)) for key in config.api_keys}
        for entry in config.tenants:
            tenant = _tenant(config, entry)
            for key, name in zip(entry.keys, entry.key_names(), strict=True):
                self._tenants.setdefault(key_digest(key.hash), replace(tenant, key=name, expires=key.expires))

    def check(self, headers: Mapping[str, str]) -> Tenant:
        """Returns the tenant whose key the request has; NO_TENANT if no key is configured.

        Raises Failure (401) if the key is missing, unknown or expired. OpenAI's clients send the key as a bearer token,
        Anthropic's in `x-api-key`.
        """
        if not self._tenants:
            return NO_TENANT
        tenant = self._tenants.get(presented_digest(headers))
        if tenant is None:
            _refuse("Missing or wrong API key: send a key that this proxy accepts as `Authorization: Bearer KEY`.")
        if tenant.expires is not None and self._wall_clock() >= tenant.expires:
            _refuse("This API key has expired.")
        return tenant


def presented_digest(headers: Mapping[str, str]) -> bytes:
    """Returns the SHA-256 digest of the key in a request. A request without a key has the digest of an empty key."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return sha256(given.encode("utf-8", "surrogateescape")).digest()


def key_digest(key_hash: str) -> bytes:
    """Returns the bytes of a key hash of the configuration (`sha256:...` in hexadecimal digits)."""
    return bytes.fromhex(key_hash.removeprefix("sha256:"))


def _refuse(message: str) -> NoReturn:
    raise Failure(Outcome.UNAUTHORIZED, message, headers={"WWW-Authenticate": "Bearer"})


def _tenant(config: Config, entry: TenantConfig) -> Tenant:
    return Tenant(
        name=entry.name,
        band=None if entry.criticality is None else config.band(entry.criticality),
        band_max=None if entry.band_max is None else config.band(entry.band_max),
        weight=entry.weight,
        models=None if entry.models is None else frozenset(entry.models),
        trusted=entry.trusted,
        ttft_s=entry.ttft_s,
        tpot_s=entry.tpot_s,
        salt=_salt(entry),
    )


def _salt(entry: TenantConfig) -> bytes | None:
    """Returns the secret of a tenant; None if its prefixes are shared.

    The secret is equal in every process with this configuration.
    """
    if entry.cache_salt is None:
        return None
    # The owner of the first key can compute the secret, but gains nothing beyond the rights of the key.
    text = f"{entry.name}\0{entry.keys[0].hash}" if entry.cache_salt == AUTO_SALT else entry.cache_salt
    return sha256(f"llmproxy cache salt\0{text}".encode()).digest()
