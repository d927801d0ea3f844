"""The kinds of values that a configuration holds, and the words for a value that is not of its kind."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

Network = IPv4Network | IPv6Network
TRUST_WORDS: Mapping[str, tuple[Network, ...]] = {
    "loopback": (ip_network("127.0.0.0/8"), ip_network("::1/128")),
    "all": (ip_network("0.0.0.0/0"), ip_network("::/0")),
    "none": (),
}


def nearest(word: str, known: Sequence[str]) -> str:
    """The member of `known` (not empty) that looks most like `word`."""
    return get_close_matches(word.lower(), known, n=1, cutoff=0.0)[0]


def one_of(known: Sequence[str]) -> AfterValidator:
    def check(value: str) -> str:
        if value.lower() in known:
            return value.lower()
        raise ValueError(f'{value!r} is none of {", ".join(known)} (nearest: "{nearest(value, known)}")')

    return AfterValidator(check)


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError(f"should be a number, not {str(value).lower()}")
    return value


def integer_of(text: object) -> int | None:
    """The integer that `text` is or spells, None where it is neither."""
    if isinstance(text, str) and re.fullmatch(r"\s*[-+]?\d{1,9}\s*", text):
        return int(text)
    return text if isinstance(text, int) and not isinstance(text, bool) else None


def criticality_of(value: object) -> str | int:
    number = integer_of(value)
    if number is not None:
        return number
    if isinstance(value, str):
        return value.strip().lower()
    raise ValueError("should be the name of a band or an integer")


def networks_of(value: object) -> tuple[Network, ...]:
    parts = re.split(r"[,\s]+", value.strip().lower()) if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str | Network) for part in parts):
        raise ValueError("should be loopback, all, none, or a list of networks such as 10.0.0.0/8")
    found: list[Network] = []
    for part in parts:
        try:
            found += TRUST_WORDS[part] if part in TRUST_WORDS else (ip_network(str(part)),)
        except ValueError as error:
            raise ValueError(f"{error}; should be loopback, all, none, or networks such as 10.0.0.0/8") from None
    return tuple(found)


def base_url(value: str) -> str:
    example = "; write it like http://gpu-0:8000"
    if "@" in value:
        raise ValueError(f"should hold no user name or password; an engine's key goes into api_key{example}")
    try:
        url = urlsplit(value)
        port = url.port
    except ValueError as error:
        raise ValueError(f"{value!r} is no URL: {error}{example}") from None
    if url.scheme not in ("http", "https"):
        raise ValueError(f"{value!r} should start with http:// or https://{example}")
    if not url.hostname or port == 0 or not re.fullmatch(r"[\w.\-]+(:\d+)?|\[[\da-fA-F:.]+\](:\d+)?", url.netloc):
        raise ValueError(f"{value!r} names no host{example}")
    if url.path.rstrip("/") not in ("", "/v1") or url.query or url.fragment:
        raise ValueError(f"{value!r} should end after the port (or with /v1): requests keep their own path{example}")
    return f"{url.scheme}://{url.netloc.lower()}"


def flow_of(value: str) -> str:
    if value == "model" or re.fullmatch(r"header:[\w!#$%&'*+.^`|~-]+", value, re.ASCII):
        return value.lower()
    raise ValueError(f'{value!r} should be "model" or "header:NAME", such as header:x-tenant')


def from_text(key: str) -> BeforeValidator:
    """Lets an entry that is a mapping be written as the plain text of its one indispensable key."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)


Number = Annotated[float, BeforeValidator(_no_bool)]
Seconds = Annotated[Number, Field(gt=0)]
Integer = Annotated[int, BeforeValidator(_no_bool)]
Count = Annotated[Integer, Field(ge=1)]
Fraction = Annotated[Number, Field(gt=0, le=1)]
Name = Annotated[str, Field(min_length=1, max_length=512)]
ApiKey = Annotated[str, Field(pattern=r"^[\x21-\x7e]+$", max_length=4096)]
Criticality = Annotated[str | int, PlainValidator(criticality_of)]
