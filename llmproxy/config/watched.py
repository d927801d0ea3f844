"""When a file has changed, and whether whoever changes it has finished."""

from __future__ import annotations

from pathlib import Path
from stat import S_ISREG

Stamp = tuple[int, int, int, int]


class WatchedFile:
    """A file that is looked at again and again, by what the system says of it and not by what it holds.

    A change counts once two looks in a row have found the same: a file is often empty, or half of itself, while it is
    written, and half a configuration may well be a sound one. Links are followed, so that a volume of Kubernetes,
    which changes by turning a link, is seen to change. A missing file is one that is being replaced; `missing_counts`
    says that it is a change like any other.
    """

    def __init__(self, path: Path, *, missing_counts: bool = False) -> None:
        self.path = path
        self._missing = (0, 0, 0, 0) if missing_counts else None
        self._taken: Stamp | None = None
        self._seen: Stamp | None = None

    def take(self) -> None:
        """What is there now is read next: only what changes after this counts. To be called before reading."""
        self._taken = self._seen = self._stamp()

    def has_changed(self) -> bool:
        """Look at it: True once for each change that is over."""
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
            # A pipe, as of a shell's <(...), holds nothing any more when it is read again.
            return None
        return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
