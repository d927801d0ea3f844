"""The types of values in a configuration, and the message for each wrong value."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from difflib import get_close_matches
from hashlib import sha256
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Annotated
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, PlainValidator

from llmproxy.config.pods_url import KUBERNETES, PodsUrl

Network = IPv4Network | IPv6Network
TRUST_WORDS: Mapping[str, tuple[Network, ...]] = {
    "loopback": (ip_network("127.0.0.0/8"), ip_network("::1/128")),
    "all": (ip_network("0.0.0.0/0"), ip_network("::/0")),
    "none": (),
}

KEY_PATTERN = r"^[\x21-\x7e]+$"
KEY_CHARS_MAX = 4096
AUTO_SALT = "auto"
AUTO_TRUST = "auto"
DISAGGREGATION = ("auto", "always", "never")
SALT_CHARS_MIN = 16


class TypeName(str):
    """Metadata of an annotated type: the name of the type on the reference page of the configuration."""


def nearest(word: str, known: Sequence[str]) -> str:
    """Returns the word of `known` (not empty) that is most similar to `word`."""
    return get_close_matches(word.lower(), known, n=1, cutoff=0.0)[0]


def named_in(names: Callable[[], Sequence[str]], **removed: str) -> AfterValidator:
    """Returns a validator that accepts these names, in upper or lower case.

    `names` is called at each validation, because plugins register policies. `removed` maps former names to their
    replacements.
    """

    def check(value: str) -> str:
        known = names()
        for word in (value, value.lower()):
            if word in known:
                return word
        if value.lower() in removed:
            raise ValueError(f"{value!r} was removed; write {removed[value.lower()]}")
        raise ValueError(f'{value!r} is none of {", ".join(known)} (nearest: "{nearest(value, known)}")')

    return AfterValidator(check)


def one_of(known: Sequence[str]) -> AfterValidator:
    """Returns a validator that accepts these words, in upper or lower case."""
    return named_in(lambda: known)


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError(f"should be a number, not {str(value).lower()}")
    return value


def integer_of(text: object) -> int | None:
    """Converts an integer or its text; None for other values."""
    if isinstance(text, str) and re.fullmatch(r"\s*[-+]?\d{1,9}\s*", text):
        return int(text)
    return text if isinstance(text, int) and not isinstance(text, bool) else None


def disaggregation_of(value: object) -> str | int:
    tokens = integer_of(value)
    if tokens is not None:
        if tokens < 1:
            raise ValueError("should be at least 1 token; never splits nothing, and always splits every prompt")
        return tokens
    if isinstance(value, str) and (word := value.strip().lower()) in DISAGGREGATION:
        return word
    meant = f' (nearest: "{nearest(value, DISAGGREGATION)}")' if isinstance(value, str) else ""
    raise ValueError(f"{value!r} is none of {', '.join(DISAGGREGATION)}, and no number of tokens{meant}")


def criticality_of(value: object) -> str | int:
    number = integer_of(value)
    if number is not None:
        return number
    if isinstance(value, str):
        return value.strip().lower()
    raise ValueError("should be the name of a band or an integer")


def networks_of(value: object) -> tuple[Network, ...]:
    parts = re.findall(r"[^,\s]+", value.lower()) if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str | Network) for part in parts):
        raise ValueError("should be loopback, all, none, or a list of addresses or networks such as 10.1.2.3")
    found: list[Network] = []
    for part in parts:
        try:
            found += TRUST_WORDS[part] if part in TRUST_WORDS else (ip_network(str(part)),)
        except ValueError as error:
            raise ValueError(f"{error}; should be loopback, all, none, or addresses such as 10.1.2.3") from None
    return tuple(found)


def trust_of(value: object) -> tuple[Network, ...] | str:
    """Parses `trust_headers`: the word `auto`, or networks."""
    is_auto = isinstance(value, str) and value.strip().lower() == AUTO_TRUST
    return AUTO_TRUST if is_auto else networks_of(value)


def words_of(networks: tuple[Network, ...] | str) -> str:
    """Formats networks as text that `networks_of` and `trust_of` accept."""
    if isinstance(networks, str):
        return networks
    word = next((word for word, meant in TRUST_WORDS.items() if meant == networks), None)
    return word or ", ".join(map(str, networks))


_BASE_PATH = re.compile(r"(/[\w.~-]+)*", re.ASCII)


def base_url(value: str) -> str:
    """Returns a URL without a trailing slash and without a final `/v1`, which the paths of requests contain.

    Raises ValueError for a URL with a user or a query, and for an invalid URL.
    """
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
    if url.query or url.fragment:
        raise ValueError(f"{value!r} should have no query: it should end after the port or a path{example}")
    path = url.path.rstrip("/").removesuffix("/v1")
    if not _BASE_PATH.fullmatch(path) or "/." in path:
        raise ValueError(f"{value!r} has a path that is no plain one, such as /engine-1{example}")
    return f"{url.scheme}://{url.netloc.lower()}{path}"


DNS, SRV = "dns+", "srv+"
"""Prefixes of a URL that DNS resolves: to all addresses of a host, or to its SRV records."""
LOOKED_UP = (DNS, SRV, KUBERNETES)
"""Prefixes of a URL that names several servers, found by lookups."""


def backend_url(value: str) -> str:
    """Validates the URL of a server, of servers behind a DNS name (`dns+`, `srv+`), or of pods (`kubernetes+`)."""
    if value.lower().startswith(KUBERNETES):
        return PodsUrl.of(value).text
    prefix = next((prefix for prefix in (DNS, SRV) if value.lower().startswith(prefix)), "")
    url = base_url(value[len(prefix) :])
    if prefix == DNS and url.startswith("https"):
        raise ValueError(
            f"{value!r} leads to addresses, but most certificates have only names; use srv+https, or names"
        )
    if prefix == SRV and urlsplit(url).port is not None:
        raise ValueError(f"{value!r} should hold no port: SRV records bring their own")
    return prefix + url


def flow_of(value: str) -> str:
    flow = value.lower()
    if flow in ("header:authorization", "header:x-api-key", "header:cookie"):
        raise ValueError(f"{value!r} would write keys into logs; flows by key are what tenants are for")
    if flow in ("model", "tenant", "tenant+model") or re.fullmatch(r"header:[\w!#$%&'*+.^`|~-]+", flow, re.ASCII):
        return flow
    raise ValueError(f'{value!r} should be "model", "tenant", "tenant+model" or "header:NAME", such as header:x-tenant')


_USUAL_PORTS = {"http": 80, "https": 443}
SESSION_PLACES = ("header", "cookie", "body")
SESSIONS = (
    "header:x-session-id",
    "header:x-claude-code-session-id",
    "header:session-id",
    "header:x-session-affinity",
    "body:prompt_cache_key",
)
"""Default fields that name the session of a request. They are sent by: clients that set the header by hand, Claude
Code, Codex, aiperf, and other clients of OpenAI's API."""


def session_of(value: str) -> str:
    place, _, name = value.partition(":")
    # Names of header fields ignore case; names of cookies and body members do not.
    place, name = place.lower(), name.lower() if place.lower() == "header" else name
    if place in SESSION_PLACES and re.fullmatch(r"[\w!#$%&'*+.^`|~-]+", name, re.ASCII):
        return f"{place}:{name}"
    meant = nearest(place, SESSION_PLACES)
    raise ValueError(
        f'{value!r} should be "header:NAME", "cookie:NAME" or "body:NAME", such as body:user (nearest: "{meant}:NAME")'
    )


def origin_of(value: str) -> str:
    """Validates an origin as browsers send it in the header `Origin`, or `*` for all origins."""
    if value == "*":
        return value
    example = "; write it like https://app.example"
    try:
        url = urlsplit(value)
        port = "" if url.port in (None, _USUAL_PORTS.get(url.scheme)) else f":{url.port}"
    except ValueError as error:
        raise ValueError(f"{value!r} is no origin: {error}{example}") from None
    if "*" in value:
        raise ValueError(f"{value!r} should be one origin, or * alone for all of them: there are no patterns")
    if not url.scheme or not re.fullmatch(r"[\w.\-]+(:\d+)?|\[[\da-fA-F:.]+\](:\d+)?", url.netloc, re.ASCII):
        raise ValueError(f"{value!r} should be a scheme and a host, in ASCII as browsers send it{example}")
    host = url.netloc.lower().removesuffix(f":{url.port}")
    origin = f"{url.scheme}://{host}{port}"
    if value.lower() not in (origin, f"{url.scheme}://{url.netloc.lower()}"):
        raise ValueError(f"{value!r} has a path: an origin ends after its host and port; write {origin}")
    return origin


def host_and_port(value: str) -> str:
    """Returns HOST:PORT, with brackets around an IPv6 address. Raises ValueError for other text."""
    host, _, port = value.rpartition(":")
    if not host or (":" in host and not host.startswith("[")) or integer_of(port) is None or not 0 <= int(port) < 65536:
        raise ValueError(f"{value!r} is no HOST:PORT")
    return value


def time_zone_of(value: str) -> str:
    """Returns the name of a time zone. Raises ValueError if this system does not know the name."""
    try:
        ZoneInfo(value)
    except (OSError, ValueError, KeyError):
        raise ValueError("is no time zone that this system knows; write a name such as Europe/Berlin, or UTC") from None
    return value


def lock_of(value: str) -> str:
    """Validates `kubernetes`, or the URL of a Valkey or Redis server."""
    if value == "kubernetes":
        return value
    scheme, found, _ = value.partition("://")
    if not found or scheme not in _STORE_SCHEMES:
        near = nearest(scheme, ("kubernetes", *_STORE_SCHEMES))
        near += "" if near == "kubernetes" else "://"
        allowed = "kubernetes, valkey://HOST:PORT, or valkeys://HOST:PORT with TLS"
        raise ValueError(f'should be {allowed} (nearest: "{near}")')
    # A message must not repeat the URL, because there may be a password in it.
    try:
        parts = urlsplit(value)
        named = parts.hostname and parts.port != 0
    except ValueError:
        named = False
    if not named:
        raise ValueError("should name a host, and no port but a number")
    return value


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can connect to a listener on `host`. An IPv6 address may have brackets."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


_STORE_SCHEMES = ("valkey", "valkeys", "redis", "rediss")


def listed(value: object) -> object:
    """Splits a text with commas into its items. Returns other values unchanged."""
    return [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value


def is_api_key(text: str) -> bool:
    """Returns whether a client can send this text as its key in a header field."""
    return len(text) <= KEY_CHARS_MAX and re.fullmatch(KEY_PATTERN, text) is not None


def hash_of(key: str) -> str:
    """Returns the hash of a client's key, as the configuration has it."""
    return f"sha256:{sha256(key.encode()).hexdigest()}"


def api_key_name(key: str) -> str:
    """Returns the name of a key of `api_keys` in logs, metrics and the use by day. The name does not reveal the key.

    The name does not depend on the place of the key in the list, because a reload may move a key while its requests
    run.
    """
    return f"api_keys:{sha256(hash_of(key).encode()).hexdigest()[:12]}"


def key_hash(value: object) -> str:
    if isinstance(value, str) and re.fullmatch(r"sha256:[0-9a-fA-F]{64}", value):
        return value.lower()
    # The value may be a key, so the message must not repeat it.
    raise ValueError("should be sha256: and 64 hex digits; `llmproxy hash-key` prints the hash of a key")


def moment_of(value: object) -> datetime:
    """Parses a timestamp, or a date, which means its first moment. Without a time zone, the time is in UTC."""
    if isinstance(value, str) and re.match(r"\d{4}-\d\d-\d\d", value):
        try:
            moment = datetime.fromisoformat(value.strip())
            return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
        except (ValueError, OverflowError):
            pass
    raise ValueError(f"should be a date or a timestamp, such as 2027-01-31 or 2027-01-31T18:00:00Z, not {value!r}")


def salt_of(value: str) -> str:
    if value == AUTO_SALT or len(value) >= SALT_CHARS_MIN:
        return value
    raise ValueError(f"should be auto, or a secret of {SALT_CHARS_MIN} characters or more")


def prompt_range(value: tuple[int, int]) -> tuple[int, int]:
    """Returns a range of prompt tokens, (from, to). Raises ValueError if `from` is above `to`."""
    if value[0] > value[1]:
        raise ValueError(f"should be [from, to] with from at most to, such as [1, 4000], not {list(value)}")
    return value


def module_name(value: str) -> str:
    if re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", value):
        return value
    raise ValueError(f"{value!r} should be the name of a Python module, such as our_policies or our.policies")


def from_text(key: str) -> BeforeValidator:
    """Returns a validator that accepts the plain value of `key` in place of a section."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)


def backend_from_text(value: object) -> object:
    """Accepts a URL in place of a backend, with an optional role before it: `prefill=http://gpu-0:8000`."""
    if not isinstance(value, str):
        return value
    role, separator, url = value.partition("=")
    if not separator or ":" in role:
        return {"url": value}
    return {"role": role.strip(), "url": url.strip()}


Number = Annotated[float, BeforeValidator(_no_bool)]
Seconds = Annotated[Number, Field(gt=0)]
Integer = Annotated[int, BeforeValidator(_no_bool)]
Count = Annotated[Integer, Field(ge=1)]
Fraction = Annotated[Number, Field(gt=0, le=1)]
Weight = Annotated[Number, Field(gt=0)]
Rate = Annotated[Number, Field(ge=1)]
Name = Annotated[str, Field(min_length=1, max_length=512)]
LockName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,250}[a-z0-9])?$")]
ApiKey = Annotated[str, Field(pattern=KEY_PATTERN, max_length=KEY_CHARS_MAX)]
Criticality = Annotated[str | int, PlainValidator(criticality_of), TypeName("band")]
Disaggregated = Annotated[str | int, PlainValidator(disaggregation_of), TypeName("auto, always, never or tokens")]
KeyHash = Annotated[str, PlainValidator(key_hash), TypeName("hash of a key")]
Networks = Annotated[
    tuple[Network, ...], PlainValidator(networks_of), PlainSerializer(words_of, return_type=str), TypeName("networks")
]
Trust = Annotated[
    tuple[Network, ...] | str,
    PlainValidator(trust_of),
    PlainSerializer(words_of, return_type=str),
    TypeName("auto or networks"),
]
PromptRange = Annotated[tuple[Count, Count], AfterValidator(prompt_range), TypeName("[from, to]")]
Moment = Annotated[datetime, BeforeValidator(moment_of), TypeName("date or timestamp")]
Module = Annotated[str, AfterValidator(module_name)]
Origins = Annotated[tuple[Annotated[str, AfterValidator(origin_of)], ...], BeforeValidator(listed)]
PathOrNone = Annotated[str, BeforeValidator(lambda value: "none" if str(value).lower() in ("null", "none") else value)]
Names = Annotated[tuple[Name, ...], BeforeValidator(listed)]
Sessions = Annotated[tuple[Annotated[str, AfterValidator(session_of)], ...], BeforeValidator(listed)]
