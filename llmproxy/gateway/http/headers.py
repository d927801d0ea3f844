"""The header fields that are forwarded between client and backend (RFC 9110, section 7.6.1)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Set

Headers = list[tuple[str, str]]

_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
CREDENTIALS = frozenset({"authorization", "x-api-key", "cookie"})
"""Fields with the client's credentials. They are forwarded to backends only if `forward_credentials` is set."""
_NOTHING: frozenset[str] = frozenset()
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_REPLACED_UPSTREAM = frozenset({"host", "content-length", "expect", "x-request-id", "accept-encoding"})
SERVER = ("Server", "llmproxy")  # The name of this server (RFC 9110, section 10.2.4). A version would help attackers.
_OURS_DOWNSTREAM = frozenset(
    {"server", "x-request-id", "x-llmproxy-backend", "x-llmproxy-queue-ms", "x-llmproxy-attempts"}
)
_DROPPED_BUT_CREDENTIALS = _HOP_BY_HOP | _REPLACED_UPSTREAM
_DROPPED_UPSTREAM = _DROPPED_BUT_CREDENTIALS | CREDENTIALS
_DROPPED_DOWNSTREAM = _HOP_BY_HOP | _OURS_DOWNSTREAM
OBJECTIVE_HEADERS = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
FAIRNESS_HEADERS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
TTFT_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
TPOT_HEADERS = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
# Addresses of other engines, which llm-d's sidecar in front of an engine asks for a part of the work or for all of it.
_DISAGGREGATION_HEADERS = ("x-prefiller-host-port", "x-encoder-hosts-ports", "x-data-parallel-host-port")
PRIVILEGED = frozenset(
    {
        "x-vllm-priority",
        "x-data-parallel-rank",
        *_DISAGGREGATION_HEADERS,
        *OBJECTIVE_HEADERS,
        *FAIRNESS_HEADERS,
        *TTFT_HEADERS,
        *TPOT_HEADERS,
    }
)
"""Fields by which a client could choose its priority or its backend. They are forwarded for trusted clients only."""


def to_backend(
    fields: Iterable[tuple[str, str]],
    *,
    request_id: str,
    withheld: Set[str],
    authorization: str | None,
    keep_credentials: bool,
    forwarded: dict[bool, Headers] | None = None,
) -> Headers:
    """Returns the header fields of a request to a backend: the client's end-to-end fields, and the proxy's request id.

    Asks the backend not to compress, because compressing a stream delays its tokens. Drops the fields in `withheld`
    (lower case), and CREDENTIALS unless `keep_credentials`. An `authorization` always replaces the client's key; None
    sends no key of the proxy. `forwarded` is a cache for requests with an equal head, which this function fills:
    whether there is an `authorization` -> the client's end-to-end fields.
    """
    own_key = authorization is not None
    end_to_end = None if forwarded is None else forwarded.get(own_key)
    if end_to_end is None:
        end_to_end = _end_to_end(list(fields), withheld, own_key, keep_credentials)
        if forwarded is not None:
            forwarded[own_key] = end_to_end
    sent = [*end_to_end, ("x-request-id", request_id), ("accept-encoding", "identity")]
    if authorization is not None:
        sent.append(("authorization", authorization))
    return sent


def _end_to_end(fields: Headers, withheld: Set[str], own_key: bool, keep_credentials: bool) -> Headers:
    dropped = _DROPPED_UPSTREAM if not keep_credentials else _DROPPED_BUT_CREDENTIALS
    if named := named_in_connection(fields):
        dropped |= named
    if keep_credentials and own_key:
        dropped |= {"authorization", "x-api-key"}
    return [(name, value) for name, value in fields if (lower := name.lower()) not in dropped and lower not in withheld]


def to_client(fields: Iterable[tuple[str, str]]) -> Headers:
    """Returns a backend's end-to-end fields for the client, and the proxy's `Server`.

    Fields that the proxy sets itself are left out. Control characters such as line breaks become spaces (RFC 9110,
    section 5.5), and bytes that are not UTF-8 are read as Latin-1.
    """
    sent, named = Headers(), _NOTHING
    for name, value in fields:
        lower = name.lower()
        # Nearly every value is printable ASCII and needs no cleaning.
        if not (value.isascii() and value.isprintable()):
            value = _clean(value)
        if lower == "connection":
            named |= named_in_connection([(name, value)])
        if lower not in _DROPPED_DOWNSTREAM:
            sent.append((name, value))
    if named:
        sent = [(name, value) for name, value in sent if name.lower() not in named]
    sent.append(SERVER)
    return sent


def reason_to_client(reason: str) -> str:
    """Returns a backend's reason phrase with control characters replaced by spaces (RFC 9112, section 4)."""
    return reason if reason.isascii() and reason.isprintable() else _clean(reason)


def _clean(value: str) -> str:
    """Returns `value` as `as_text` reads it, with control characters replaced by spaces."""
    return _CONTROL.sub(" ", as_text(value))


def as_text(value: str) -> str:
    """Returns a header value with its bytes read as Latin-1 if they are not UTF-8, as engines do.

    aiohttp represents such bytes as surrogate escapes.
    """
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-8", "surrogateescape").decode("latin-1")
    return value


def named_in_connection(fields: Iterable[tuple[str, str]]) -> frozenset[str]:
    """Returns the field names, in lower case, that the `Connection` fields declare as hop-by-hop."""
    named = _NOTHING
    for name, value in fields:
        if name.lower() == "connection":
            named |= {token.strip().lower() for token in value.split(",")}
    return named
