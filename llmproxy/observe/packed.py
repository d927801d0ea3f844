"""Encodes records and messages as MessagePack, also with texts that are not UTF-8 and integers beyond 64 bits."""

from __future__ import annotations

from typing import Any

import msgspec

INTEGER_MAX = (1 << 64) - 1


def packed(value: object) -> bytes:
    """Returns `value` as MessagePack.

    Bytes that are not UTF-8 are escaped in texts. Integers beyond 64 bits become INTEGER_MAX.
    """
    try:
        return _ENCODER.encode(value)
    except (UnicodeEncodeError, OverflowError):
        return _ENCODER.encode(_bounded(msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=_plain)))


def _plain(value: Any) -> Any:
    """Returns `value`, an instance of a subclass of `str` such as a header name, as a plain `str`.

    Raises NotImplementedError for other types.
    """
    if isinstance(value, str):
        return str(value)
    raise NotImplementedError(type(value).__name__)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)


def _bounded(value: Any) -> Any:
    """Returns plain data with all texts in UTF-8 and all integers within 64 bits."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int):
        return value if -(INTEGER_MAX >> 1) <= value <= INTEGER_MAX else INTEGER_MAX
    if isinstance(value, dict):
        return {_bounded(key): _bounded(one) for key, one in value.items()}
    return [_bounded(one) for one in value] if isinstance(value, list | tuple) else value
