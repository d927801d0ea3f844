"""Whether a file has changed, and the change is complete."""

from __future__ import annotations

from pathlib import Path
from stat import S_ISREG

Stamp = tuple[int, int, int, int]


class WatchedFile:
    """A file that is looked at again and again, by its metadata and not by its content.

    A change counts when two looks in a row have found the same: while a file is written it is often empty or half
    complete, and half a configuration may be a valid one. Links are followed, because a volume of Kubernetes changes by
    replacing a link. A missing file is taken for one that is being replaced, so it is no change, unless
    `missing_counts`.
    """

    def __init__(self, path: Path, *, missing_counts: bool = False) -> None:
        self.path = path
        self._missing = (0, 0, 0, 0) if missing_counts else None
        self._taken: Stamp | None = None
        self._seen: Stamp | None = None

    def take(self) -> None:
        """Call this before reading: only changes after this count."""
        self._taken = self._seen = self._stamp()

    def has_changed(self) -> bool:
        """Look at it: True once for each complete change."""
        stamp, before = self._stamp(), self._seen
        self._seen = stamp
        if stamp is None or stamp != before or stamp == self._taken:
            return False
        self._taken = stamp
        return True

    def _stamp(self) -> Stamp | None:
        try:
            found = self.path.stat()
        except OSError:
            return self._missing
        if not S_ISREG(found.st_mode):
            # A pipe, such as <(...) of a shell, can be read only once.
            return None
        return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
