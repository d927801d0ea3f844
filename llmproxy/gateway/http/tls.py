"""TLS to clients: a certificate that may be renewed under a running proxy."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import structlog

from llmproxy.config import ConfigError, TlsConfig, WatchedFile

LOOK_S = 1.0
"""How often the files are looked at: a stat of each. A change is taken in by the second look that finds it."""

_log = structlog.get_logger()


class ClientTls:
    """The TLS context of the listening socket; `context` stays the same object while its certificate is renewed.

    Raises ConfigError where the files are of no use.
    """

    def __init__(self, cert: Path, key: Path | None, client_ca: Path | None) -> None:
        self._cert, self._key = cert, key
        self._files = [WatchedFile(path, missing_counts=True) for path in (cert, key) if path is not None]
        for file in self._files:
            file.take()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        try:
            self._load(self.context)
        except OSError as error:
            raise ConfigError([f"tls.cert: {self._unfit(error)}"]) from None
        if client_ca is not None:
            try:
                self.context.load_verify_locations(client_ca)
            except OSError as error:
                raise ConfigError([f"tls.client_ca: {client_ca} holds no certificate: {_why(error)}"]) from None
            self.context.verify_mode = ssl.CERT_REQUIRED

    @classmethod
    def of(cls, config: TlsConfig) -> ClientTls | None:
        """None where clients are to come by http. Raises ConfigError where half of it is missing."""
        if config.cert is not None:
            return cls(config.cert, config.key, config.client_ca)
        if config.key is not None or config.client_ca is not None:
            raise ConfigError(["tls.cert: is missing; without it clients would come by plain http"])
        return None

    def renew(self) -> bool:
        """Use the files from the next handshake on, if they changed; True when they are in use.

        What is of no use is logged once, and changes nothing.
        """
        changed = [file.has_changed() for file in self._files]
        if True not in changed:
            return False
        try:
            # A pair that does not match would be loaded halfway: whether it does is found out on another context.
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._load(self.context)
        except OSError as error:
            _log.warning("certificate_kept", why=self._unfit(error))
            return False
        _log.info("certificate_renewed", cert=str(self._cert))
        return True

    async def watch(self) -> None:
        """Look at the files until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.renew()

    def _load(self, context: ssl.SSLContext) -> None:
        # Without any, OpenSSL would ask the terminal for the passphrase of a key that has one.
        context.load_cert_chain(self._cert, self._key, password="")

    def _unfit(self, error: OSError) -> str:
        key = "its key in the same file, as tls.key names none," if self._key is None else f"the key {self._key}"
        return f"{self._cert} with {key} is of no use: {_why(error)}"


def _why(error: OSError) -> str:
    if not isinstance(error, ssl.SSLError):
        return error.strerror or str(error)
    # OpenSSL has a name for most of what can be wrong, such as KEY_VALUES_MISMATCH.
    return error.reason.lower().replace("_", " ") if error.reason else "it cannot be read as PEM without a passphrase"
