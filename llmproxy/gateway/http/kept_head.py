"""Recognises a request head that is equal to an earlier head of the same connection. Most heads are."""

from __future__ import annotations

from aiohttp.http import RawRequestMessage

KEPT_BYTES_MAX = 4096
"""The maximum size of a kept head. A usual head takes 3 KB of memory, a hundred short fields take 35 KB."""
LENGTH_DIGITS_MAX = 20  # The maximum digits of Content-Length, whose value may differ between equal heads.
LENGTH = b"content-length"


class KeptHead:
    """The bytes of a head except the value of its Content-Length, and `facts` that hold for every equal head."""

    __slots__ = ("_after", "_at", "_before", "_line", "facts")

    def __init__(self, message: RawRequestMessage, at: int, facts: object) -> None:
        self._line = message.method, message.path, message.version
        self._at = at
        self._before = message.raw_headers[:at]
        self._after = message.raw_headers[at + 1 :]
        self.facts = facts

    @classmethod
    def of(cls, message: RawRequestMessage, bytes_max: int, facts: object) -> KeptHead | None:
        """Returns the kept form of the head `message`.

        Returns None for a head longer than `bytes_max` or KEPT_BYTES_MAX, and for a head without exactly one
        Content-Length.
        """
        fields = message.raw_headers
        lengths = [at for at, (name, _) in enumerate(fields) if name.lower() == LENGTH]
        size_bytes = len(message.path) + sum([len(name) + len(value) for name, value in fields]) + LENGTH_DIGITS_MAX
        if len(lengths) != 1 or size_bytes > min(bytes_max, KEPT_BYTES_MAX):
            return None
        return cls(message, lengths[0], facts)

    def is_head_of(self, message: RawRequestMessage) -> bool:
        """Returns whether `message` has the same bytes as this head, except for the value of its Content-Length."""
        fields, at = message.raw_headers, self._at
        return (
            len(fields) > at
            and fields[:at] == self._before
            and fields[at + 1 :] == self._after
            and fields[at][0].lower() == LENGTH
            and len(fields[at][1]) <= LENGTH_DIGITS_MAX
            and (message.method, message.path, message.version) == self._line
        )
