"""A store of KV blocks that several engines share, like LMCache or a folder of an offloading connector."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from struct import Struct

_HASH = Struct("<q")


class KvStore:
    """A store in a file, for engines of several processes. Each process appends its blocks and reads all others.

    Blocks are identified by `kv_cache.block_hashes`, and never removed.
    """

    def __init__(self, path: Path) -> None:
        path.touch()
        self._path = path
        self._stored: set[int] = set()
        self._read_bytes = 0

    def found(self, hashes: Sequence[int]) -> int:
        """Returns the length of the longest stored prefix of `hashes`."""
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            data = file.read()
        # The last record may be incomplete yet.
        whole = len(data) - len(data) % _HASH.size
        self._read_bytes += whole
        self._stored.update(one for (one,) in _HASH.iter_unpack(data[:whole]))
        return sum(1 for _ in takewhile(self._stored.__contains__, hashes))

    def save(self, hashes: Sequence[int]) -> None:
        """Adds the blocks with these hashes to the store, except known ones."""
        new = [one for one in hashes if one not in self._stored]
        if new:
            # A single appending write is never interleaved with the writes of other processes.
            with self._path.open("ab", buffering=0) as file:
                file.write(b"".join(map(_HASH.pack, new)))
            self._stored.update(new)
