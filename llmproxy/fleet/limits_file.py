"""The state file: batch limits that were learned, kept for the next process, so that it need not learn them again."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Lock

import msgspec
import structlog

from llmproxy.core.domain import KnownLimit
from llmproxy.fleet.engine_config import SEQUENCES_MAX

AUTO, NONE = "auto", "none"
FORMAT = "llmproxy-state/1"
NAME = "state.json"
AGE_MAX_S = 7 * 86_400.0
"""Who was not seen for so long is forgotten: engines are started anew with other options."""
ENTRIES_MAX = 4_096
"""Those seen last stay."""
FILE_BYTES_MAX = 4 << 20
LOOK_S = 5.0
"""How often it is looked whether there is something new to write."""
REFRESH_S = 3_600.0
"""How often entries are written although nothing is new, so that they do not age."""

_log = structlog.get_logger()


class _Entry(msgspec.Struct):
    """What is kept of one backend; `seen_s` is seconds since the epoch."""

    limit: int
    settled: bool
    models: tuple[str, ...]
    max_model_len: int | None
    seen_s: float


class _Content(msgspec.Struct):
    format: str
    limits: dict[str, _Entry]


class _Unusable(Exception):  # noqa: N818 - found in a file, and told
    pass


def place(setting: str, environ: Mapping[str, str]) -> Path | None:
    """The file that `state_file` means: in systemd's StateDirectory, else by XDG base directories; None for none."""
    if setting == NONE:
        return None
    if setting != AUTO:
        return Path(setting)
    if directory := environ.get("STATE_DIRECTORY"):
        return Path(directory.split(":")[0]) / NAME
    for base in (Path(environ.get("XDG_STATE_HOME", "")), Path(environ.get("HOME", "")) / ".local" / "state"):
        # A relative one is to be ignored.
        if base.is_absolute():
            return base / "llmproxy" / NAME
    return None


class LimitsFile:
    """Batch limits by the URL of the backend.

    Written whole, into a file beside it that takes its place. Several proxies may share it: what others wrote of
    backends that this one does not know stays. A file that is not of this format is told once, left alone, and
    neither read nor written. Nothing here raises: a proxy without its file learns, as it did the first time.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:  # noqa: TID251 - for other processes
        self.path = path
        self._clock = clock
        self._told: str | None = None
        self._written: Mapping[str, KnownLimit] = {}
        self._written_s = 0.0
        # The last write may come while a thread is still at the one before it.
        self._one_of_ours = Lock()

    def read(self) -> dict[str, KnownLimit]:
        """What was known when it was written, by URL, less what is too old."""
        try:
            return {
                url: KnownLimit(entry.limit, entry.settled, entry.models, entry.max_model_len)
                for url, entry in self._entries().items()
            }
        except (OSError, _Unusable) as error:
            self._warn("read", error)
            return {}

    def write(self, known: Mapping[str, KnownLimit]) -> None:
        """Keep what is known now, by URL; nothing is written while that is what was written last."""
        now = self._clock()
        if not known or (known == self._written and now < self._written_s + REFRESH_S):
            return
        try:
            with self._one_of_ours, self._alone():
                entries = self._entries() | {
                    url: _Entry(one.limit, one.settled, one.models, one.max_model_len, now)
                    for url, one in known.items()
                }
                last = sorted(entries.items(), key=lambda item: item[1].seen_s)[-ENTRIES_MAX:]
                self._replace(msgspec.json.format(msgspec.json.encode(_Content(FORMAT, dict(sorted(last))))))
        except BlockingIOError:
            # Another proxy writes just now; nobody waits for one that was stopped meanwhile.
            return
        except (OSError, _Unusable) as error:
            self._warn("written", error)
            return
        self._written, self._written_s, self._told = dict(known), now, None

    async def follow(self, known: Callable[[], Mapping[str, KnownLimit]]) -> None:
        """Write what `known` answers whenever it has changed, until cancelled, and once more then."""
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                await asyncio.to_thread(self.write, known())
        finally:
            self.write(known())

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else writes here meanwhile. Raises BlockingIOError where somebody does."""
        parent = Path(os.path.realpath(self.path)).parent
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            os.close(folder)

    def _entries(self) -> dict[str, _Entry]:
        if not self.path.exists():
            return {}
        if not self.path.is_file():
            # To read a pipe may take for ever, and a device such as /dev/null would have a file in its place.
            raise _Unusable("it is no regular file")
        with self.path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
        if not content:
            return {}
        try:
            if len(content) > FILE_BYTES_MAX:
                raise _Unusable(f"it is larger than {FILE_BYTES_MAX} bytes")
            read = msgspec.json.decode(content, type=_Content)
        except (msgspec.DecodeError, RecursionError) as error:
            raise _Unusable(str(error)) from None
        if read.format != FORMAT:
            raise _Unusable(f"its format is {read.format[:64]!r}, not {FORMAT!r}")
        # A clock that was set back makes nobody immortal.
        now = self._clock()
        return {
            url: entry
            for url, entry in read.limits.items()
            if 0 < entry.limit <= SEQUENCES_MAX and abs(now - entry.seen_s) < AGE_MAX_S
        }

    def _replace(self, content: bytes) -> None:
        # A link stays one: what it leads to may be on a volume that outlasts the place where the link is.
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
        if why != self._told:
            self._told = why
            hint = "limits are learned anew at each start; state_file names another place, none keeps nothing"
            _log.warning(f"state_not_{what}", path=str(self.path), why=why, hint=hint)
