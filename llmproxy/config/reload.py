"""Reloads the configuration while the proxy runs: applies the new configuration as a whole, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from llmproxy.config import Config, ConfigError, WatchedFile
from llmproxy.config.changes import Change, changes_between, origins_in_force, read_at_start, with_reloadable
from llmproxy.config.entries import Entries, EntryProblem, with_entries

LOOK_S = 0.25  # Time between two checks of the file. A change is applied when two checks in a row see the same.

CLUSTER = "cluster"  # The cause, in log lines, of changes by Kubernetes objects.

T = TypeVar("T")
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Reloaded:
    """The applied changes of a new configuration, and the changes that have no effect before a restart."""

    changes: tuple[Change, ...]
    needs_restart: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Reread:
    """The file to watch, and the function that reads the configuration again."""

    # Watches the file. `take` was called before the first read, so a later change is noticed.
    file: WatchedFile
    # Reads and checks the configuration with the flags and variables of the start, on another thread. Raises
    # ConfigError.
    read: Callable[[], Config]


class Combined:
    """Adds the entries from Kubernetes objects to the configuration, and passes the result to `apply`.

    A left-out entry is logged once.
    """

    def __init__(self, config: Config, apply: Callable[[Config], None]) -> None:
        self._given = self._config = config
        self._entries = Entries()
        self._apply = apply
        self._logged: frozenset[EntryProblem] = frozenset()

    def take(self, config: Config) -> None:
        """Applies a new configuration with the same Kubernetes entries. Raises ConfigError and then changes nothing."""
        self._combine(config)
        self._given = config

    def take_entries(self, entries: Entries) -> None:
        """Applies new Kubernetes entries to the same configuration. Logs the changes, or why they are not applied."""
        before, self._entries = self._config, entries
        try:
            self._combine(self._given)
        except ConfigError as error:
            for problem in error.problems:
                _log.error("reload_failed", cause=CLUSTER, problem=problem)
            return
        changes = changes_between(before, self._config)
        for change in changes:
            _log.info("config_changed", change=str(change))
        if changes:
            _log.info("reloaded", cause=CLUSTER, changes=len(changes), needs_restart=0)

    def _combine(self, given: Config) -> None:
        config, problems = with_entries(given, self._entries)
        self._apply(config)
        self._config = config
        for origin, why in sorted(problems - self._logged):
            _log.warning("object_refused", object=origin, why=why)
        self._logged = problems


class Reloader:
    """Reloads the configuration, and logs the changes or the problems. Never runs two reloads at a time.

    If `apply` raises ConfigError, it has changed nothing. `on_end` gets whether a new configuration was applied.
    """

    def __init__(
        self, config: Config, reread: Reread, apply: Callable[[Config], None], on_end: Callable[[bool], None]
    ) -> None:
        self._config = config
        self.file = reread.file.path
        self._watched = reread.file
        self._read = reread.read
        self._apply = apply
        self._on_end = on_end
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def reload(self, cause: str) -> Reloaded:
        """Reads and applies the configuration. Raises ConfigError, and then changes nothing.

        Cancellation does not stop the reload, because a changed file is detected only once.
        """
        return await asyncio.shield(self._spawn(self._reload(cause)))

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _reload(self, cause: str) -> Reloaded:
        async with self._turn:
            self._watched.take()
            try:
                config, found = await asyncio.to_thread(self._compared)
                self._apply(config)
            except ConfigError as error:
                for problem in error.problems:
                    _log.error("reload_failed", cause=cause, problem=problem)
                self._on_end(False)
                raise
            if self._config.needs_key() and not config.needs_key():
                _log.warning("no_key_needed", hint="the new configuration has neither api_keys nor tenants")
            self._config = config
            self._on_end(True)
            needs_restart = tuple(change for change in found if read_at_start(change.key))
            changes = tuple(change for change in found if not read_at_start(change.key))
            for change in changes:
                _log.info("config_changed", change=str(change))
            for change in needs_restart:
                _log.warning("needs_a_restart", change=str(change))
            _log.info("reloaded", cause=cause, changes=len(changes), needs_restart=len(needs_restart))
            return Reloaded(changes, needs_restart)

    def _compared(self) -> tuple[Config, list[Change]]:
        """Reads the configuration. Returns it with the old values of keys that need a restart, and all its changes.

        Runs on another thread, because this takes long with thousands of tenants.
        """
        new = self._read()
        config = with_reloadable(self._config, new).with_origins(origins_in_force(self._config, new))
        return config, changes_between(self._config, new)

    async def watch(self) -> None:
        """Reloads whenever the file has changed, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            if await asyncio.to_thread(self._watched.has_changed):
                await self.try_reload("file")

    def reload_on_signal(self) -> None:
        """Starts a reload for SIGHUP, which waits for the end of a running reload."""
        self._spawn(self.try_reload("signal"))

    async def try_reload(self, cause: str) -> None:
        """Reloads, and logs errors instead of raising them."""
        try:
            await self.reload(cause)
        except ConfigError:
            pass
        except Exception as bug:  # noqa: BLE001 - the old configuration holds, and the next change is read again
            _log.error("reload_failed", cause=cause, exc_info=bug)
            self._on_end(False)
