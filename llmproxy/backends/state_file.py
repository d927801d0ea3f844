"""The state file: batch limits and capacities that a process learned, kept for the next process."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Lock
from typing import NamedTuple, TypeVar

import msgspec
import structlog

from llmproxy.backends.engine_config import SEQUENCES_MAX
from llmproxy.core.domain import KnownCapacity, KnownLimit

AUTO, NONE = "auto", "none"
FORMAT = "llmproxy-state/1"
OLD_NAME = "state.json"  # The file that all proxies of a user shared in earlier versions.
AGE_MAX_S = 7 * 86_400.0
"""A backend or pool that was not seen for this time is dropped from the file.

Engines may be restarted with other options meanwhile, so the values would be outdated.
"""
ENTRIES_MAX = 4_096  # The maximum number of backends in the file. The backends that were seen last stay.
FILE_BYTES_MAX = 4 << 20
CHECK_S = 5.0  # The seconds between two comparisons of the current values with the written values.
REFRESH_S = 3_600.0  # The seconds after which unchanged entries are written again, so that they do not expire.
POOLS_MAX = 256
POOLS_EVERY_S = 60.0
"""The minimum seconds between two writes if only capacities have changed. Every answer changes a capacity."""

_log = structlog.get_logger()
_Seen = TypeVar("_Seen", bound="_Entry | _Pool")


class _Entry(msgspec.Struct):
    """The stored batch limit of a backend. `seen_s` is the Unix time when the backend was seen last."""

    limit: int
    settled: bool
    models: tuple[str, ...]
    max_model_len: int | None
    seen_s: float


class _Pool(msgspec.Struct):
    """The stored capacity of a pool, which autoscaling learned. `seen_s` is the Unix time when it was seen last."""

    sums: tuple[float, ...]
    sizes: tuple[tuple[int, int, float, float], ...]
    seen_s: float
    squares: tuple[float, ...] = ()


class _Content(msgspec.Struct):
    format: str
    limits: dict[str, _Entry]
    pools: dict[str, _Pool] = {}


class State(NamedTuple):
    """The content of the file: batch limits keyed by backend URL, and capacities keyed by pool."""

    limits: Mapping[str, KnownLimit] = {}
    capacities: Mapping[str, KnownCapacity] = {}


class _Unusable(Exception):  # noqa: N818 - it is found in a file, and logged
    pass


def state_path(setting: str, environ: Mapping[str, str], host: str, port: int) -> Path | None:
    """Returns the path of the state file for the setting `state_file`; None if no file is used.

    By default, the file is in systemd's StateDirectory, otherwise in the XDG base directories. Its name contains the
    listening address, so that each proxy has its own file. A proxy on a port that the system chooses (0) has no file.
    """
    if setting == NONE:
        return None
    if setting != AUTO:
        return Path(setting)
    if port == 0:
        return None
    name = "state-" + re.sub(r"[^0-9A-Za-z.-]+", "_", f"{host}-{port}") + ".json"
    if directory := environ.get("STATE_DIRECTORY"):
        return Path(directory.split(":")[0]) / name
    for base in (Path(environ.get("XDG_STATE_HOME", "")), Path(environ.get("HOME", "")) / ".local" / "state"):
        # The XDG specification ignores relative paths.
        if base.is_absolute():
            return base / "llmproxy" / name
    return None


def folder_of(setting: str, state: Path | None) -> Path | None:
    """Returns the folder for the setting `usage.dir`; None without a folder.

    By default, the folder is beside the state file `state`.
    """
    if setting == AUTO:
        return None if state is None else state.with_name("usage-" + state.stem.removeprefix("state-"))
    return None if setting == NONE else Path(setting)


def log_old_file(path: Path | None) -> None:
    """Logs that a state file of an earlier version, in the folder of `path`, is not read."""
    if path is not None and path.name != OLD_NAME and (old := path.with_name(OLD_NAME)).exists():
        _log.info("old_state_ignored", path=str(old), hint="proxies shared it: delete it, or name it as state_file")


class StateFile:
    """Reads and writes a `State` on disk.

    Each write replaces the whole file, but keeps the entries of unknown backends and pools, because several proxies may
    share the file. A file of another format is logged once, and neither read nor overwritten. No method raises: a proxy
    without its file learns everything again.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:  # noqa: TID251 - for other processes
        self.path = path
        self._clock = clock
        self._logged: str | None = None
        self._written = State()
        self._written_s = 0.0
        # The last write may begin while a thread still writes.
        self._writing = Lock()

    def read(self) -> State:
        """Returns the unexpired content of the file; an empty `State` if the file is unusable."""
        try:
            content = self._content()
        except (OSError, _Unusable) as error:
            self._warn("read", error)
            return State()
        return State(
            {
                url: KnownLimit(entry.limit, entry.settled, entry.models, entry.max_model_len)
                for url, entry in content.limits.items()
            },
            {name: KnownCapacity(pool.sums, pool.sizes, pool.squares) for name, pool in content.pools.items()},
        )

    def write(self, known: State, *, last: bool = False) -> None:
        """Writes `known` if it is due and not empty, unless another proxy writes now.

        Changed limits are due at once, changed capacities POOLS_EVERY_S after the last write or if this is the `last`
        write of the process, and unchanged values after REFRESH_S.
        """
        now = self._clock()
        if not self._is_due(known, now, last):
            return
        try:
            with self._writing, self._locked():
                content = self._content()
                limits = content.limits | {
                    url: _Entry(one.limit, one.settled, one.models, one.max_model_len, now)
                    for url, one in known.limits.items()
                }
                pools = content.pools | {
                    name: _Pool(one.sums, one.sizes, now, one.squares) for name, one in known.capacities.items()
                }
                kept = _Content(FORMAT, _last_seen(limits, ENTRIES_MAX), _last_seen(pools, POOLS_MAX))
                self._replace(msgspec.json.format(msgspec.json.encode(kept)))
        except BlockingIOError:
            # Another proxy writes now. Waiting might never end, because that proxy may be stopped.
            return
        except (OSError, _Unusable) as error:
            self._warn("written", error)
            return
        self._written, self._written_s, self._logged = State(dict(known.limits), dict(known.capacities)), now, None

    def _is_due(self, known: State, now: float, last: bool) -> bool:
        if not known.limits and not known.capacities:
            return False
        if known.limits != self._written.limits or now >= self._written_s + REFRESH_S:
            return True
        return known.capacities != self._written.capacities and (last or now >= self._written_s + POOLS_EVERY_S)

    async def follow(self, known: Callable[[], State]) -> None:
        """Calls `write` with the result of `known` every CHECK_S, and once more when the task is cancelled."""
        try:
            while True:
                await asyncio.sleep(CHECK_S)
                await asyncio.to_thread(self.write, known())
        finally:
            self.write(known(), last=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Locks the folder of the file against writes of other proxies during the block.

        Raises BlockingIOError if another proxy has the lock, and OSError if the folder cannot be made or read.
        """
        parent = Path(os.path.realpath(self.path)).parent
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            os.close(folder)

    def _content(self) -> _Content:
        """Returns the content of the file without expired and impossible entries. Raises OSError and _Unusable."""
        if not self.path.exists():
            return _Content(FORMAT, {})
        if not self.path.is_file():
            # Reading a pipe may take for ever, and a device such as /dev/null would be replaced by a file.
            raise _Unusable("it is no regular file")
        with self.path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
        if not content:
            return _Content(FORMAT, {})
        try:
            if len(content) > FILE_BYTES_MAX:
                raise _Unusable(f"it is larger than {FILE_BYTES_MAX} bytes")
            read = msgspec.json.decode(content, type=_Content)
        except (msgspec.DecodeError, RecursionError) as error:
            raise _Unusable(str(error)) from None
        if read.format != FORMAT:
            raise _Unusable(f"its format is {read.format[:64]!r}, not {FORMAT!r}")
        # Entries more than AGE_MAX_S in the future, after a clock was set back, are dropped like expired entries.
        now = self._clock()
        read.limits = {
            url: entry
            for url, entry in read.limits.items()
            if 0 < entry.limit <= SEQUENCES_MAX and abs(now - entry.seen_s) < AGE_MAX_S
        }
        read.pools = {name: pool for name, pool in read.pools.items() if abs(now - pool.seen_s) < AGE_MAX_S}
        return read

    def _replace(self, content: bytes) -> None:
        # A symbolic link stays: its target may be on a volume that survives when the folder of the link does not.
        path = Path(os.path.realpath(self.path))
        with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                file.write(content + b"\n")
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).replace(path)
            except BaseException:
                with suppress(OSError):
                    Path(file.name).unlink()
                raise

    def _warn(self, what: str, error: Exception) -> None:
        why = f"{type(error).__name__}: {error}" if isinstance(error, OSError) else f"not a state file: {error}"
        if why != self._logged:
            self._logged = why
            hint = "everything is learned again at each start: set state_file to another path, or to none"
            _log.warning(f"state_not_{what}", path=str(self.path), why=why, hint=hint)


def _last_seen(entries: Mapping[str, _Seen], most: int) -> dict[str, _Seen]:
    """Returns the `most` entries with the newest `seen_s`, sorted by key."""
    return dict(sorted(sorted(entries.items(), key=lambda item: item[1].seen_s)[-most:]))
