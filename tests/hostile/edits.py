"""Mutations of a message, by byte and by line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random

EVERY = [bytes([byte]) for byte in range(256)]
NASTY = [bytes([byte]) for byte in b'\x00\t\n\x0b\r\x1f !"#,-/0:;=A\\_\x7f\x85\xa0\xff']
"""Bytes with a meaning for some reader of HTTP."""
LINE_ENDS = (
    b"\n", b"\r", b"\r\r\n", b"\n\r", b"\n\n", b"\r\n\r", b"\r\n ", b"\r\n\t", b" \r\n", b"\t\r\n", b"\x00\r\n",
    b"\r\x00\n", b"\x0b\r\n", b"\x0c", b"\x85", b"\xe2\x80\xa8", b"\xc4\x8d\xc4\x8a", b"", b"\r\n\r\n", b"\r \n",
)  # fmt: skip
"""Replacements for CR and LF."""


def spelt(before: bytes, text: bytes, after: bytes, slots: Iterable[int], inserted: Iterable[bytes]) -> Iterator[bytes]:
    """Insert each of `inserted` at each slot of `text`, and also replace the byte there."""
    inserted = list(inserted)
    for slot in slots:
        for one in inserted:
            yield before + text[:slot] + one + text[slot:] + after
            if slot < len(text) and text[slot : slot + 1] != one:
                yield before + text[:slot] + one + text[slot + 1 :] + after


def everywhere(message: bytes, inserted: Iterable[bytes], step: int = 1, start: int = 0) -> Iterator[bytes]:
    """Delete every `step`th byte, replace it by each of `inserted`, or insert each of them before it."""
    inserted = list(inserted)
    for at in range(start, len(message), step):
        yield message[:at] + message[at + 1 :]
        yield from spelt(b"", message, b"", [at], inserted)


def line_ends(message: bytes) -> Iterator[bytes]:
    """Replace each line end by each of LINE_ENDS, and all line ends at once."""
    lines = message.split(b"\r\n")
    for end in LINE_ENDS:
        for at in range(1, len(lines)):
            yield b"\r\n".join(lines[:at]) + end + b"\r\n".join(lines[at:])
        yield end.join(lines)


def several(message: bytes, random: Random, count: int) -> Iterator[bytes]:
    """Make two to six random changes: delete, insert, double, replace or copy bytes."""
    for _ in range(count):
        data = message
        for _ in range(random.randint(2, 6)):
            at, size = random.randrange(len(data) + 1), random.randint(1, 8)
            piece = data[at : at + size]
            other = random.randrange(len(data) + 1)
            data = random.choice(
                (
                    data[:at] + data[at + size :],
                    data[:at] + random.choice(NASTY) + data[at:],
                    data[:at] + piece + data[at:],
                    data[:at] + random.choice(EVERY) + data[at + 1 :],
                    data[:at] + data[other : other + size] + data[at:],
                    data[:at] + b"\r\n" + data[at:],
                )
            )
        yield data
