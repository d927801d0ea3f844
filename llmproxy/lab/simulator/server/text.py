"""A tokenizer without a vocabulary, and the pseudo-words that a simulated model answers with.

A token is four bytes of UTF-8 and its id is their number. That is about what real tokenizers reach on English, costs
nothing, is reversible, and gives prompts with a common head a common head of tokens. Every pseudo-word is one token, so
an answer that comes back in the next turn of a conversation is found in the prefix cache.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence

TOKEN_BYTES = 4
WRONG_WORD = " BAD"
"""Every token of an answer that was computed from KV which is not that of its prompt."""
_CONSONANTS = "bcdfghjklmnprstvwxyz"
_VOWELS = "aeiou"


def tokens_of(text: str) -> tuple[int, ...]:
    """The token ids of a text; the last one is filled up with zero bytes."""
    data = text.encode("utf-8", "replace")
    data += bytes(-len(data) % TOKEN_BYTES)
    return struct.unpack(f">{len(data) // TOKEN_BYTES}I", data)


def text_of(tokens: Iterable[int]) -> str:
    """The text of token ids; a character cut between two tokens that are not both there becomes U+FFFD."""
    data = b"".join((token & 0xFFFFFFFF).to_bytes(TOKEN_BYTES, "big") for token in tokens)
    return data.replace(b"\0", b"").decode("utf-8", "replace")


def seed_of(tokens: Sequence[int], name: str, index: int) -> int:
    """What the answer to a prompt grows from: the same for the same tokens, model name and index of the choice."""
    return zlib.crc32(f"{name}\0{index}\0{hash(tuple(tokens))}".encode())


def word(seed: int, position: int) -> str:
    """Token number `position` of the answer that grows from `seed`: a space and three letters."""
    mixed = (seed + position * 0x9E3779B1) * 0x85EBCA6B & 0xFFFFFFFF
    mixed ^= mixed >> 15
    first, vowel, last = mixed % 20, mixed // 20 % 5, mixed // 100 % 20
    return f" {_CONSONANTS[first]}{_VOWELS[vowel]}{_CONSONANTS[last]}"


def words(seed: int, first: int, end: int) -> str:
    """The tokens from `first` to before `end` of the answer that grows from `seed`."""
    return "".join(word(seed, position) for position in range(first, end))
