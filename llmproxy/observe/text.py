"""Converts values to printable text for people: a word, or a JSON string for a value with spaces."""

from __future__ import annotations

import json
import re

_is_word = re.compile(r"[!#-<>-~]+").fullmatch


def shown(value: object) -> str:
    """Returns a text or number as a printable word, or as a JSON string if it is none.

    A dict or list becomes `{key:value,...}` or `[item,...]` of these. No result begins a new line or controls the
    terminal.
    """
    if isinstance(value, str):
        if _is_word(value):
            return value
    elif isinstance(value, int | float):
        return str(value)
    elif isinstance(value, dict):
        return "{" + ",".join([f"{shown(key)}:{shown(inner)}" for key, inner in value.items()]) + "}"
    elif isinstance(value, list | tuple | set | frozenset):
        items = value if isinstance(value, list | tuple) else sorted(value, key=str)
        return "[" + ",".join([shown(item) for item in items]) + "]"
    text = str(value)
    plain = text.isprintable() and " " not in text and '"' not in text and "=" not in text
    return text if plain and text else json.dumps(text)


class ShownNames(dict[str, str]):
    """Caches the result of `shown` for frequent names. Its size is limited, because clients send names too."""

    NAMES_MAX = 1_024
    NAME_CHARS_MAX = 256

    def __missing__(self, name: str) -> str:
        word = shown(name)
        if len(self) < self.NAMES_MAX and len(name) <= self.NAME_CHARS_MAX:
            self[name] = word
        return word
