"""A tokenizer without a vocabulary, and the pseudo-words of simulated answers.

A token is four bytes of UTF-8, and its id is their number. Real tokenizers reach about the same length on English. The
encoding is cheap and reversible, and prompts with a common head share their first tokens. Each pseudo-word, and each
token of numbered text, is one token, so an answer that returns in the next turn of a conversation is found in the
prefix cache.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence

from llmproxy.lab.simulator.server import numbered

TOKEN_BYTES = 4
WRONG_WORD = " BAD"  # Every token of an answer that was computed from KV of another prompt.
_CONSONANTS = "bcdfghjklmnprstvwxyz"
_VOWELS = "aeiou"
_WORDS = frozenset(
    f" {first}{vowel}{last}".encode() for first in _CONSONANTS for vowel in _VOWELS for last in _CONSONANTS
)


def tokens_of(text: str) -> tuple[int, ...]:
    """Returns the token ids of a text."""
    data = text.encode("utf-8", "replace")
    tokens: list[int] = []
    rest = 0
    for start, end, token in numbered.found_in(data):
        tokens += packed(data[rest:start])
        tokens.append(token)
        rest = end
    return (*tokens, *packed(data[rest:]))


def packed(data: bytes) -> tuple[int, ...]:
    """Returns tokens of four bytes each. The last token is padded with zero bytes."""
    data += bytes(-len(data) % TOKEN_BYTES)
    return struct.unpack(f">{len(data) // TOKEN_BYTES}I", data)


def bytes_of(tokens: Iterable[int]) -> bytes:
    """Returns the UTF-8 of tokens. It may begin and end within a character."""
    data = b"".join(
        numbered.bytes_of(token) if token >= numbered.FIRST_ID else token.to_bytes(TOKEN_BYTES, "big")
        for token in (token & 0xFFFFFFFF for token in tokens)
    )
    return data.replace(b"\0", b"")


def text_of(tokens: Iterable[int]) -> str:
    """Returns the text of tokens. A character whose other part is missing becomes U+FFFD."""
    return bytes_of(tokens).decode("utf-8", "replace")


def seed_of(tokens: Sequence[int], name: str, index: int) -> int:
    """Returns the seed of an answer, from the prompt's tokens, the model name and the index of the choice."""
    return zlib.crc32(f"{name}\0{index}\0{hash(tuple(tokens))}".encode())


def words_at_end(data: bytes) -> int:
    """Returns how many pseudo-words `data` ends with."""
    count = 0
    while data[-4 * (count + 1) : len(data) - 4 * count] in _WORDS:
        count += 1
    return count


def word(seed: int, position: int) -> str:
    """Returns token number `position` of the answer with this seed: a space and three letters."""
    mixed = (seed + position * 0x9E3779B1) * 0x85EBCA6B & 0xFFFFFFFF
    mixed ^= mixed >> 15
    first, vowel, last = mixed % 20, mixed // 20 % 5, mixed // 100 % 20
    return f" {_CONSONANTS[first]}{_VOWELS[vowel]}{_CONSONANTS[last]}"


def words(seed: int, first: int, end: int) -> str:
    """Returns the text of tokens `first` to `end`, exclusive, of the answer with this seed."""
    return "".join(word(seed, position) for position in range(first, end))
