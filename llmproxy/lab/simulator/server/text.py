"""A tokenizer without a vocabulary, and the pseudo-words of simulated answers.

A token is four bytes of UTF-8, and its id is their number. Real tokenizers reach about the same length on English. The
encoding is cheap and reversible, and prompts with a common head share their first tokens. Each pseudo-word is one
token, so an answer that returns in the next turn of a conversation is found in the prefix cache.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence

TOKEN_BYTES = 4
WRONG_WORD = " BAD"
"""Every token of an answer that was computed from KV of another prompt."""
_CONSONANTS = "bcdfghjklmnprstvwxyz"
_VOWELS = "aeiou"


def tokens_of(text: str) -> tuple[int, ...]:
    """Returns the token ids of a text. The last token is padded with zero bytes."""
    data = text.encode("utf-8", "replace")
    data += bytes(-len(data) % TOKEN_BYTES)
    return struct.unpack(f">{len(data) // TOKEN_BYTES}I", data)


def text_of(tokens: Iterable[int]) -> str:
    """Returns the text of token ids. A character whose other part is missing becomes U+FFFD."""
    data = b"".join((token & 0xFFFFFFFF).to_bytes(TOKEN_BYTES, "big") for token in tokens)
    return data.replace(b"\0", b"").decode("utf-8", "replace")


def seed_of(tokens: Sequence[int], name: str, index: int) -> int:
    """Returns the seed of an answer, from the prompt's tokens, the model name and the index of the choice."""
    return zlib.crc32(f"{name}\0{index}\0{hash(tuple(tokens))}".encode())


def word(seed: int, position: int) -> str:
    """Returns token number `position` of the answer with this seed: a space and three letters."""
    mixed = (seed + position * 0x9E3779B1) * 0x85EBCA6B & 0xFFFFFFFF
    mixed ^= mixed >> 15
    first, vowel, last = mixed % 20, mixed // 20 % 5, mixed // 100 % 20
    return f" {_CONSONANTS[first]}{_VOWELS[vowel]}{_CONSONANTS[last]}"


def words(seed: int, first: int, end: int) -> str:
    """Returns the text of tokens `first` to `end`, exclusive, of the answer with this seed."""
    return "".join(word(seed, position) for position in range(first, end))
