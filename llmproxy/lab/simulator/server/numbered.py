"""Numbered text, which shows at once that a token was lost, doubled or torn: token 12 of an answer is ` 12~ka`.

`ka` is the tag of the answer. It depends on the prompt, so a token of another answer is detected too. Some tokens end
with a character that is hard to pass on: `é`, a character that JSON escapes, or a character whose last bytes begin the
next token, as byte-level BPE splits characters.

The id of a token contains its tag and number, so every replica knows the text of every id. No four bytes of UTF-8 are
such an id.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

FIRST_ID = 0xF8000000
TAGS = 100
_NUMBERS = 1 << 20
_TAGS = [f"{consonant}{vowel}" for consonant in "bcdfghjklmnprstvwxyz" for vowel in "aeiou"]
_TAG_OF = {tag.encode(): number for number, tag in enumerate(_TAGS)}
_TOKEN = re.compile(rb" (\d{1,6})~([bcdfghjklmnprstvwxyz][aeiou])")


def _ending(number: int) -> tuple[bytes, bytes]:
    """Returns the bytes behind the tag of a token, and the bytes before the number of the next token."""
    turn, kind = divmod(number, 7)
    if kind == 2:
        return "é".encode(), b""
    if kind == 4:
        return b'"\\\n\t'[turn % 4 :][:1], b""
    if kind == 6:
        character = "😀ü€"[turn % 3].encode()
        cut = 1 + turn // 3 % (len(character) - 1)
        return character[:cut], character[cut:]
    return b"", b""


_ENDINGS = [_ending(number) for number in range(7 * 4 * 9)]


def token_id(tag: int, number: int) -> int:
    """Returns the id of token `number`, below 2**20, of the answer with this tag, from 0 to 99."""
    return FIRST_ID + tag * _NUMBERS + number


def number_of(token: int) -> int:
    """Returns the number of a token within its answer."""
    return (token - FIRST_ID) % _NUMBERS


def bytes_of(token: int) -> bytes:
    """Returns the UTF-8 of a token. It may begin and end within a character."""
    tag, number = divmod(token - FIRST_ID, _NUMBERS)
    return _carried(number) + f" {number}~{_TAGS[tag % TAGS]}".encode() + _ENDINGS[number % len(_ENDINGS)][0]


def found_in(text: bytes) -> Iterator[tuple[int, int, int]]:
    """Yields the numbered tokens of a text: start, end and id. Other text can be between them."""
    if b"~" not in text:
        return
    for match in _TOKEN.finditer(text):
        token = token_id(_TAG_OF[match[2]], int(match[1]))
        data = bytes_of(token)
        start = match.start() - len(_carried(number_of(token)))
        if text.startswith(data, start):
            yield start, start + len(data), token


def _carried(number: int) -> bytes:
    """Returns the rest of a character at the start of a token."""
    return _ENDINGS[(number - 1) % len(_ENDINGS)][1] if number else b""
