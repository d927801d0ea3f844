"""The configuration is read again while the proxy runs, and applied as a whole or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from llmproxy.config import Config, ConfigError, WatchedFile
from llmproxy.config.changes import Change, changes_between, read_at_start, with_reloadable
from llmproxy.config.entries import Entries, Told, with_entries
from llmproxy.config.in_force import origins_in_force

LOOK_S = 0.25
"""Time between two looks at the file. A change is applied at the second look that finds it."""

CLUSTER = "cluster"
"""The cause of what objects of a cluster change."""

T = TypeVar("T")
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What a new configuration changed, and which changes have no effect before a restart."""

    changes: tuple[Change, ...]
    needs_restart: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Reread:
    """Where the configuration comes from. `read` reads and checks it as at the start, with the same flags and
    variables. It raises ConfigError, and is called on another thread. `file` was taken before it was read first."""

    file: WatchedFile
    read: Callable[[], Config]


class Combined:
    """What is read from the configuration, with the entries that a cluster keeps beside it. `apply` gets both as one.

    An entry that is left out is logged once.
    """

    def __init__(self, config: Config, apply: Callable[[Config], None]) -> None:
        self._given = self._config = config
        self._entries = Entries()
        self._apply = apply
        self._told: frozenset[Told] = frozenset()

    def take(self, config: Config) -> None:
        """Apply another configuration, with the same entries. Raises ConfigError, and then nothing has changed."""
        self._combine(config)
        self._given = config

    def take_entries(self, entries: Entries) -> None:
        """Apply the same configuration with other entries. What changes is logged, as is why it cannot be applied."""
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
        for origin, why in sorted(problems - self._told):
            _log.warning("object_refused", object=origin, why=why)
        self._told = problems


class Reloader:
    """Reads the configuration again, applies it, and logs what has changed or what is wrong. One at a time.

    `apply` applies a configuration; if it raises ConfigError, it has changed nothing. `on_end` is called with whether
    the new configuration was applied.
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
        """Apply the configuration as it is now. Raises ConfigError, and then nothing has changed.

        It goes on to its end when the caller is cancelled: when a client leaves, a change must not be seen and then not
        applied.
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
                new = await asyncio.to_thread(self._read)
                found = changes_between(self._config, new)
                config = with_reloadable(self._config, new).with_origins(origins_in_force(self._config, new))
                self._apply(config)
            except ConfigError as error:
                for problem in error.problems:
                    _log.error("reload_failed", cause=cause, problem=problem)
                self._on_end(False)
                raise
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

    async def watch(self) -> None:
        """Reload whenever the file has changed, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            if await asyncio.to_thread(self._watched.has_changed):
                await self.try_reload("file")

    def reload_on_signal(self) -> None:
        """SIGHUP came: reload after the reloads that are under way."""
        self._spawn(self.try_reload("signal"))

    async def try_reload(self, cause: str) -> None:
        """Reload without a caller that gets the result: errors are logged."""
        try:
            await self.reload(cause)
        except ConfigError:
            pass
        except Exception as bug:  # noqa: BLE001 - the old configuration holds, and the next change is read again
            _log.error("reload_failed", cause=cause, exc_info=bug)
            self._on_end(False)
