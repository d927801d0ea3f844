"""What all readers of request bodies share."""

from __future__ import annotations

from enum import StrEnum

from llmproxy.gateway.scan import BadBody, Member, Slices, scan_every

# What is parsed in one go has at most so many bytes and values. Text costs by its bytes, and little; values cost an
# object each: a body of nothing but brackets would hold the loop for some 15 ms, and this many hold it for 2.
# `benchmarks/desk.py` measures it.
PARSE_BYTES_MAX = 128 * 1024
PARSE_VALUES_MAX = 16 * 1024

TRANSFER = ("kv_transfer_params", "ec_transfer_params")
"""Members by which an engine is told to read the cache of another or to keep its own for another, or dies of it: for
those who run engines, never for clients."""
# Members that hold the engine's own arguments, where transfer parameters count as well, and the way to them inside.
_ARGUMENTS = {"vllm_xargs": (), "sampling_params": ("extra_args",)}
PRIORITY = "priority"
GUARDED = frozenset({*TRANSFER, *_ARGUMENTS, PRIORITY})
"""The members by which a client could tell an engine what is not for it to say."""


def parses_at_once(body: bytes) -> bool:
    """Whether a parser holds the loop for no more than about 2 ms; in doubt not, as text may hold brackets too."""
    if len(body) <= 2 * PARSE_VALUES_MAX:
        return True
    # Every value but the outermost follows an opening bracket or a comma.
    return len(body) <= PARSE_BYTES_MAX and sum(map(body.count, (b"[", b"{", b","))) <= PARSE_VALUES_MAX


class BodyKind(StrEnum):
    """How the body of a route is to be read.

    `CHAT` and `COMPLETION` streams can be asked for usage; `OTHER` is any JSON body of an endpoint whose engine does
    not vet `stream`; `FORM` is multipart/form-data.
    """

    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSES = "responses"
    MESSAGES = "messages"
    OTHER = "other"
    FORM = "form"


def guarded_in(body: bytes, found: list[tuple[str, Member]]) -> Slices[tuple[tuple[str, Member], ...]]:
    """The transfer parameters and priorities among `found`. Raises BadBody for the former among engine arguments."""
    for name, member in found:
        if name in _ARGUMENTS:
            yield from _check_arguments(body[member.start : member.end], name, *_ARGUMENTS[name])
    return tuple((name, member) for name, member in found if name in TRANSFER or name == PRIORITY)


def _check_arguments(value: bytes, name: str, *path: str) -> Slices[None]:
    """Raise BadBody for transfer parameters in `value`, the JSON value of `name`, or below it at `path`."""
    if not value.startswith(b"{"):
        return
    for inner, member in (yield from scan_every(value, path[:1] or TRANSFER)):
        if inner in TRANSFER:
            raise BadBody(f"The field {name}.{inner} is not taken from clients.", f"body.{name}.{inner}")
        yield from _check_arguments(value[member.start : member.end], f"{name}.{inner}", *path[1:])
