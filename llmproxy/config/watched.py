"""Detects changes of a file, and waits until a change is complete."""

from __future__ import annotations

from pathlib import Path
from stat import S_ISREG

Stamp = tuple[int, int, int, int]


class WatchedFile:
    """Detects changes of a file by its metadata.

    A change counts when two checks in a row find the same new metadata, because a file that is being written may be
    half a configuration. Links are followed: a Kubernetes volume changes by replacing a link. A missing file counts as
    a change only with `missing_counts`, because it is probably being replaced.
    """

    def __init__(self, path: Path, *, missing_counts: bool = False) -> None:
        self.path = path
        self._missing = (0, 0, 0, 0) if missing_counts else None
        self._taken: Stamp | None = None
        self._seen: Stamp | None = None

    def take(self) -> Stamp | None:
        """Marks the present metadata as seen, and returns them. Call it before reading the file, so that only later
        changes count.
        """
        self._taken = self._seen = self._stamp()
        return self._seen

    def has_changed(self) -> bool:
        """Checks the file. Returns True once for each complete change."""
        stamp, before = self._stamp(), self._seen
        self._seen = stamp
        if stamp is None or stamp != before or stamp == self._taken:
            return False
        self._taken = stamp
        return True

    def forget(self) -> None:
        """Makes the present state count as a change once more, because the file could not be used."""
        self._taken = None

    def _stamp(self) -> Stamp | None:
        try:
            found = self.path.stat()
        except OSError:
            return self._missing
        if not S_ISREG(found.st_mode):
            # A pipe, such as <(...) of a shell, can be read only once.
            return None
        return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
