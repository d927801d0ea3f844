"""Discovers backends while the proxy runs: in a watched file, in DNS, or in Kubernetes.

Each query of a source returns all its backends, and the registry applies the differences. After a failed query, the
last backends stay.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from urllib.parse import urlsplit

import structlog

from llmproxy.backends.kubernetes.api import KubernetesApi
from llmproxy.backends.kubernetes.extension_objects import ExtensionObjects
from llmproxy.backends.kubernetes.source import KubernetesSource
from llmproxy.backends.registry import BackendRegistry
from llmproxy.backends.source import BACKENDS_MAX, BackendSource, RefusedLog, SourceFailedError, host_port
from llmproxy.config import (
    DNS,
    SRV,
    BackendConfig,
    Config,
    ConfigError,
    DiscoveryConfig,
    Entries,
    WatchedFile,
    load_backends,
)
from llmproxy.config.pods_url import KUBERNETES
from llmproxy.lifecycle.background import supervised
from llmproxy.upstream.resolver import Resolver

FILE_CHECK_S = 1.0  # The seconds between two checks whether the file has changed.
LOOK_UP_TIMEOUT_S = 5.0  # The longest DNS look-up, in seconds; a longer one counts as failed.
EMPTY_TIMES = 4
"""Factor on `misses_before_removal` while the answers are empty.

Whole services sometimes vanish from DNS by mistake.
"""

OBJECTS = "objects of the inference extension"  # Name of the source of `ExtensionObjects`.

Address = tuple[str, int]
LookUp = Callable[[str, int], Awaitable[list[Address]]]
"""Returns (host, port) of every server behind a name; empty if the name does not exist. Raises SourceFailedError."""

_log = structlog.get_logger()


class FileSource:
    """A file with a list of backends. `query` returns None while the file is unchanged."""

    interval_s = FILE_CHECK_S

    def __init__(self, file: WatchedFile) -> None:
        self._file = file
        self._was_read = False

    async def query(self) -> Sequence[BackendConfig] | None:
        return await asyncio.to_thread(self._read)

    def _read(self) -> Sequence[BackendConfig] | None:
        if self._was_read and not self._file.has_changed():
            return None
        try:
            self._file.take()
            backends = load_backends(self._file.path)
        except ConfigError as error:
            self.repeat()
            raise SourceFailedError("; ".join(error.problems)) from None
        self._was_read = True
        return backends

    def repeat(self) -> None:
        self._file.forget()

    async def close(self) -> None:
        pass


class DnsSource:
    """All servers behind one DNS name, each configured like `template`.

    A server is named by its address, port and path, so that the order of DNS answers does not matter. It is removed
    after `misses_before_removal` answers in a row without its address, or EMPTY_TIMES times as many if the answers are
    empty.
    """

    def __init__(self, template: BackendConfig, interval_s: float, misses_before_removal: int, look_up: LookUp) -> None:
        self.interval_s = interval_s
        self._template = template
        self._misses_before_removal = misses_before_removal
        self._look_up = look_up
        self._prefix = DNS if template.url.startswith(DNS) else SRV
        url = urlsplit(template.url.removeprefix(self._prefix))
        self._scheme, self._host, self._path = url.scheme, url.hostname or "", url.path
        self._port = url.port or 80
        self._misses: dict[Address, int] = {}
        self._refused = RefusedLog()

    async def query(self) -> Sequence[BackendConfig]:
        try:
            async with asyncio.timeout(LOOK_UP_TIMEOUT_S):
                found = set(await self._look_up(self._host, self._port))
        except TimeoutError:
            raise SourceFailedError(f"no answer about {self._host} within {LOOK_UP_TIMEOUT_S:g} s") from None
        if len(found) > BACKENDS_MAX:
            raise SourceFailedError(f"{self._host} has {len(found)} addresses, and {BACKENDS_MAX} are the most")
        misses_before_removal = self._misses_before_removal if found else self._misses_before_removal * EMPTY_TIMES
        missed = {address: times + 1 for address, times in self._misses.items() if address not in found}
        kept = {address: times for address, times in missed.items() if times < misses_before_removal}
        self._misses = dict.fromkeys(found, 0) | kept
        backends, refused = [], {}
        for host, port in sorted(self._misses):
            try:
                address = host_port(host, port) + self._path
            except ValueError as error:
                refused[f"{host}:{port}"] = str(error)
            else:
                backends.append(
                    self._template.model_copy(update={"url": f"{self._scheme}://{address}", "name": address})
                )
        self._refused.log(self._template.url, refused)
        return backends

    def repeat(self) -> None:
        """Does nothing, because every query returns all backends."""

    async def close(self) -> None:
        pass


async def addresses(resolver: Resolver, host: str, port: int) -> list[Address]:
    """Returns the addresses in the A and AAAA records of `host`, each with `port`; empty if the name does not exist.

    Raises SourceFailedError if the look-up fails.
    """
    try:
        found = await resolver.look_up(host)
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)):
            return []
        raise SourceFailedError(f"{host} cannot be looked up: {error.strerror}") from None
    except OSError as error:
        raise SourceFailedError(f"{host} cannot be looked up: {error}") from None
    return [(str(place[0]), port) for _, place in found]


async def services(name: str, _: int) -> list[Address]:
    """Returns the servers in the SRV records of the best priority (RFC 2782); their weights are ignored.

    Returns nothing if the name does not exist. Raises SourceFailedError if the look-up fails.
    """
    from dns import asyncresolver, exception, resolver

    try:
        answer = await asyncresolver.resolve(name, "SRV", lifetime=LOOK_UP_TIMEOUT_S)
    except (resolver.NXDOMAIN, resolver.NoAnswer):
        return []
    except (exception.DNSException, OSError) as error:
        raise SourceFailedError(f"{name} cannot be looked up: {error}") from None
    first = min(record.priority for record in answer)
    return [(str(record.target).rstrip("."), record.port) for record in answer if record.priority == first]


def check(config: Config) -> None:
    """Raises ConfigError if a source needs a library that is not installed."""
    if find_spec("dns") is None:
        missing = [b.url for b in config.backends if b.url.startswith(SRV)]
        if missing:
            need = "SRV records need dnspython, which is not installed: pip install 'llmproxy-lb[srv]'"
            raise ConfigError([f"backends: {url}: {need}" for url in missing])


@dataclass(slots=True)
class _Running:
    definition: object
    task: asyncio.Task[None]


class Discovery:
    """Queries each source of backends at its own interval, and updates the registry, from `reconfigure` until `close`.

    `expects` gets the sources that have not answered (the inference extension counts as one), so that requests for
    unlisted models wait for them. `on_query` gets the source of each query and whether it succeeded. The first of
    `look_ups` is for addresses (A and AAAA records), the second for SRV records. `take_entries` gets the configuration
    entries from InferenceObjectives and InferenceModelRewrites.
    """

    def __init__(
        self,
        registry: BackendRegistry,
        expects: Callable[[Collection[str]], None],
        on_query: Callable[[str, bool], None],
        look_ups: tuple[LookUp, LookUp],
        take_entries: Callable[[Entries], None] = lambda _: None,
    ) -> None:
        self._registry = registry
        self._expects = expects
        self._on_query = on_query
        self._look_ups = look_ups
        self._running: dict[str, _Running] = {}
        self._unanswered: set[str] = set()
        self.objects = ExtensionObjects(take_entries, self._report_expected)

    def reconfigure(self, config: Config) -> None:
        """Applies a configuration: starts new sources, restarts changed sources, and stops sources that are gone.

        The backends of a source that is gone are removed.
        """
        chosen = config.discovery
        wanted: dict[str, tuple[object, Callable[[], BackendSource]]] = {}
        if (file := chosen.file) is not None:
            wanted["file"] = file, lambda: FileSource(WatchedFile(file))
        for backend in config.backends:
            if backend.looked_up:
                wanted[backend.url] = (backend, chosen), self._looked_up(backend, chosen)
        for name in [name for name in self._running if name not in wanted]:
            self._running.pop(name).task.cancel()
            self._unanswered.discard(name)
            self._registry.remove_source(name)
        for name, (definition, make) in wanted.items():
            running = self._running.get(name)
            if running is not None and running.definition == definition:
                continue
            if running is not None:
                running.task.cancel()
            else:
                self._unanswered.add(name)
            self._running[name] = _Running(definition, supervised(partial(self._ask, name, make), f"ask {name}"))
        self.objects.reconfigure(config)
        self._report_expected()

    def _report_expected(self) -> None:
        self._expects(self._unanswered | ({OBJECTS} if self.objects.awaited else set()))

    def _looked_up(self, template: BackendConfig, chosen: DiscoveryConfig) -> Callable[[], BackendSource]:
        if template.url.startswith(KUBERNETES):
            return lambda: KubernetesSource(template, KubernetesApi(chosen.kubernetes_api))
        look_up = self._look_ups[0] if template.url.startswith(DNS) else self._look_ups[1]
        return lambda: DnsSource(template, chosen.dns_interval_s, chosen.misses_before_removal, look_up)

    async def _ask(self, name: str, make: Callable[[], BackendSource]) -> None:
        source = make()
        try:
            await self._ask_on(name, source)
        finally:
            await source.close()

    async def _ask_on(self, name: str, source: BackendSource) -> None:
        wrong, found_some = "", True
        while True:
            try:
                backends = await source.query()
                if backends is not None:
                    try:
                        self._registry.update(name, backends)
                    except Exception:
                        source.repeat()
                        raise
                    self._unanswered.discard(name)
                    self._report_expected()
                    self._on_query(name, True)
                    if wrong:
                        _log.info("discovery_recovered", source=name)
                    wrong = ""
                    if found_some and not backends:
                        _log.warning("discovery_found_nothing", source=name)
                    found_some = bool(backends)
            except Exception as error:  # noqa: BLE001 - no answer may end the discovery
                why = str(error) if isinstance(error, SourceFailedError | ConfigError) else repr(error)
                self._on_query(name, False)
                if why != wrong:
                    _log.warning("discovery_failed", source=name, why=why)
                wrong = why
            await asyncio.sleep(source.interval_s)

    async def close(self) -> None:
        """Stops all queries. The backends stay in the registry."""
        tasks = [running.task for running in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.objects.close()
