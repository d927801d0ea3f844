"""Decodes messages of another release: skips unknown kinds and fields, and replaces unknown enum values.

So a release may add kinds that need no answer, trailing fields with defaults, and enum values. For a message that the
receiver must act upon, the receiver declares support by a trailing field in Hello or Welcome. Every other change needs
a new `PROTOCOL`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from typing import Any, Generic, TypeVar

import msgspec
import structlog
from msgspec import inspect

from llmproxy.core.domain import AdmissionKind, Outcome, Stage, Verdict
from llmproxy.core.retry import Again
from llmproxy.remote.messages import FromMember, ToMember
from llmproxy.scheduling.attempt import AttemptState, Split

FALLBACKS: Mapping[type[Enum], Enum] = {
    # An admission of an unknown kind most likely repeats an earlier one. As NEW it would be charged twice.
    AdmissionKind: AdmissionKind.RETRY,
    Again: Again.NO,
    AttemptState: AttemptState.FAILED,
    # 503: the client may retry.
    Outcome: Outcome.REJECTED_NO_BACKENDS,
    Split: Split.WHOLE,
    Stage: Stage.WHOLE,
    # This verdict says nothing about a backend.
    Verdict: Verdict.CLIENT_GONE,
}
"""The replacement of unknown values, for each enum of the protocol."""
UNKNOWN_MAX = 100  # Number of unknown values that are logged, each once.

MessageT = TypeVar("MessageT")
_log = structlog.get_logger()
_type_of = cache(inspect.type_info)


class TolerantDecoder(Generic[MessageT]):
    """Decodes frames that may come from another release. Skips messages of unknown kinds."""

    def __init__(self, kinds: Any) -> None:
        self._whole: msgspec.msgpack.Decoder[list[MessageT]] = msgspec.msgpack.Decoder(list[kinds])
        self._frame = msgspec.msgpack.Decoder(list[msgspec.Raw])
        self._message: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(kinds)
        self._plain = msgspec.msgpack.Decoder(list[Any])
        self._kinds: dict[Any, Any] = {kind.__struct_config__.tag: kind for kind in kinds.__args__}
        self._unknown: set[tuple[str, str | int]] = set()

    def decode(self, data: Any) -> list[MessageT]:
        """Returns the messages of known kinds, in order. Raises msgspec.DecodeError."""
        try:
            return self._whole.decode(data)
        except msgspec.ValidationError:
            return [*self._decode_each(data)]

    def _decode_each(self, data: Any) -> Iterator[MessageT]:
        for raw in self._frame.decode(data):
            try:
                yield self._message.decode(raw)
            except msgspec.ValidationError:
                plain = self._plain.decode(raw)
                kind = self._kinds.get(plain[0]) if plain and isinstance(plain[0], int) else None
                if kind is not None:
                    replaced = self._with_fallbacks(plain, _type_of(kind))
                    yield self._message.decode(msgspec.msgpack.encode(replaced))

    def _with_fallbacks(self, value: Any, type_: inspect.Type) -> Any:
        """Replaces unknown enum values in plain data of this type. Decoding rejects wrong types later."""
        match type_, value:
            case inspect.EnumType(cls), str() | int() if value not in [one.value for one in cls]:
                return self._fallback(cls, value)
            case inspect.StructType(fields=fields, array_like=True, tag=tag), list():
                types = [field.type for field in fields]
                begin = 0 if tag is None else 1
                ours = value[begin : begin + len(types)]
                return value[:begin] + [self._with_fallbacks(*pair) for pair in zip(ours, types, strict=False)]
            case inspect.StructType(fields=fields) | inspect.DataclassType(fields=fields), dict():
                types_of = {field.encode_name: field.type for field in fields}
                return {key: self._with_fallbacks(one, types_of[key]) for key, one in value.items() if key in types_of}
            case inspect.UnionType(variants), _:
                for variant in variants:
                    value = self._with_fallbacks(value, variant)
                return value
            case inspect.CollectionType(item_type), list():
                return [self._with_fallbacks(one, item_type) for one in value]
            case _:
                return value

    def _fallback(self, enum: type[Enum], value: str | int) -> Any:
        taken_for = FALLBACKS[enum].value
        unknown = enum.__name__, value
        if unknown not in self._unknown and len(self._unknown) < UNKNOWN_MAX:
            self._unknown.add(unknown)
            _log.warning("cluster_value_unknown", of=enum.__name__, value=value, taken_for=taken_for)
        return taken_for


FROM_MEMBER: TolerantDecoder[FromMember] = TolerantDecoder(FromMember)
TO_MEMBER: TolerantDecoder[ToMember] = TolerantDecoder(ToMember)
