"""The messages between cluster members: the messages of relay workers, and messages for network connections.

Members share no clock. The sender makes each time relative to its own clock, and the receiver makes it absolute again.
A lease has the call number of its `Admit`, which the member chose, so that the number is valid under every leader.

Compatibility during an upgrade: a member skips unknown message kinds and fields, and replaces unknown enum values by
`FALLBACKS`. So a release may add kinds that need no answer, trailing fields with defaults, and enum values. A message
that the receiver must act upon needs a trailing field in Hello or Welcome by which the receiver declares support. Every
other change needs a new `PROTOCOL`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from typing import Any, Generic, TypeVar

import msgspec
import structlog
from msgspec import inspect
from msgspec.structs import replace

from llmproxy.core.domain import AdmissionKind, KnownCapacity, KnownLimit, Outcome, Placed, Request, Stage, Verdict
from llmproxy.core.lease_events import AnyLeaseEvent
from llmproxy.core.shards import DEFAULT
from llmproxy.observe.exit import Split
from llmproxy.remote.workers import protocol as workers
from llmproxy.remote.workers.protocol import Message

PROTOCOL = 1
"""The version of the protocol. Members with different versions do not connect."""


class Hello(Message, frozen=True, tag=40):
    """The first message of a member on a connection, for one shard."""

    protocol: int
    version: str
    name: str
    incarnation: str
    """Differs after each start of the process."""
    address: str
    config: str
    """See `config_hash`."""
    epoch: int
    """The highest epoch of the shard that the member knows."""
    shard: str = DEFAULT
    candidate: bool = True
    """Whether the member can become the leader of the shard."""


class Welcome(Message, frozen=True, tag=41):
    """The leader accepts the member. All later grants on this connection belong to this epoch."""

    epoch: int
    name: str
    version: str
    config: str


class NotLeader(Message, frozen=True, tag=42):
    """The receiver of a Hello refuses it, or stops leading."""

    why: str


class Resume(Message, frozen=True, tag=43):
    """The member's calls at the time of connecting. An `Admit` or `RunningLease` follows for each, then `Resumed`."""

    waiting: frozenset[int]
    """Calls that wait for a lease."""
    running: frozenset[int]
    """Calls that have a running lease."""


class RunningLease(Message, frozen=True, tag=44):
    """A running lease, as reported to a new leader or after a lost connection."""

    call: int
    request: Request
    placed: Placed
    age_s: float
    """Seconds since the grant."""
    started_age_s: float | None
    """Seconds since the first token; None before it."""
    committed: bool
    output_tokens: int


class Resumed(Message, frozen=True, tag=45):
    """The member has reported all its requests and leases."""


class Ping(Message, frozen=True, tag=46):
    """A heartbeat."""


class Members(Message, frozen=True, tag=47):
    """The names of all members that have a session."""

    names: tuple[str, ...]


class Drained(Message, frozen=True, tag=48):
    """Which backends of the shard an operator has drained.

    The leader lists the other backends too, because a member that has not read the models of a backend yet may assign
    it to another shard.
    """

    backends: frozenset[str]
    others: frozenset[str] | None = None
    """Backends that are not drained; None: all others of the shard."""


class Balances(Message, frozen=True, tag=49):
    """The changed balances of flows in one band (`FairnessPolicy.balances`), for the next leader."""

    pool: str
    band: int
    flows: dict[str, float]


class Learned(Message, frozen=True, tag=51):
    """Measurements for the next leader."""

    limits: dict[str, KnownLimit]
    """Backend URL -> batch limit."""
    capacities: dict[str, KnownCapacity]
    """Pool -> capacity."""


class RateDebts(Message, frozen=True, tag=52):
    """Changed debts of rate limits, for the next leader; see `Rates.debts`."""

    debts: tuple[tuple[str, str, float], ...]
    """(Limit, kind, seconds until the limit has refilled)."""


class RememberedPrefix(Message, frozen=True, tag=53):
    """Blocks that a backend has cached, from a request that the member relayed under an earlier leader."""

    pool: str
    backend: str
    hashes: tuple[int, ...]


class LeaseAcknowledged(Message, frozen=True, tag=50):
    """The member has received its lease. Without this, the leader frees the lease when the connection is lost."""

    call: int


FromMember = (
    workers.Admit | workers.CancelCall | AnyLeaseEvent | workers.RequestEnded | workers.PrefixCached
    | workers.ResponseStored | workers.PageRequest | workers.Resolve
    | workers.ExitReport | Hello | Resume | RunningLease | Resumed | LeaseAcknowledged | RememberedPrefix | Ping
)  # fmt: skip
ToMember = (
    workers.LeaseGranted | workers.CallRefused | workers.LeaseCut | workers.ResponseStored | workers.PageResponse
    | workers.NameResolved | Welcome | NotLeader | Members | Drained | Balances | Learned | RateDebts | Ping
)  # fmt: skip

FALLBACKS: Mapping[type[Enum], Enum] = {
    # An admission of an unknown kind most likely repeats an earlier one. As NEW it would be charged twice.
    AdmissionKind: AdmissionKind.RETRY,
    # 503: the client may retry.
    Outcome: Outcome.REJECTED_NO_BACKENDS,
    Split: Split.WHOLE,
    Stage: Stage.WHOLE,
    # This verdict says nothing about a backend.
    Verdict: Verdict.CLIENT_GONE,
}
"""The replacement of unknown values, for each enum of the protocol."""
UNKNOWN_MAX = 100
"""Number of unknown values that are logged, each once."""

MessageT = TypeVar("MessageT")
_log = structlog.get_logger()
_type_of = cache(inspect.type_info)


class TolerantDecoder(Generic[MessageT]):
    """Decodes frames that may come from another release. It skips messages of unknown kinds.

    A frame with only known kinds and values, as between members of one release, is decoded in one step.
    """

    def __init__(self, kinds: Any) -> None:
        self._whole: msgspec.msgpack.Decoder[list[MessageT]] = msgspec.msgpack.Decoder(list[kinds])
        self._frame = msgspec.msgpack.Decoder(list[msgspec.Raw])
        self._message: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(kinds)
        self._plain = msgspec.msgpack.Decoder(list[Any])
        self._kinds: dict[Any, Any] = {kind.__struct_config__.tag: kind for kind in kinds.__args__}
        self._unknown: set[tuple[str, str]] = set()

    def decode(self, data: Any) -> list[MessageT]:
        """Returns the messages of known kinds, in their order. Raises msgspec.DecodeError."""
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
        """Returns plain data of this type, in which `FALLBACKS` replace unknown enum values.

        Data of a wrong type stays as it is; decoding rejects it later.
        """
        match type_, value:
            case inspect.EnumType(cls), str() if value not in [one.value for one in cls]:
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
            case inspect.VarTupleType(item_type), list():
                return [self._with_fallbacks(one, item_type) for one in value]
            case _:
                return value

    def _fallback(self, enum: type[Enum], value: str) -> Any:
        taken_for = FALLBACKS[enum].value
        unknown = enum.__name__, value
        if unknown not in self._unknown and len(self._unknown) < UNKNOWN_MAX:
            self._unknown.add(unknown)
            _log.warning("cluster_value_unknown", of=enum.__name__, value=value, taken_for=taken_for)
        return taken_for


FROM_MEMBER: TolerantDecoder[FromMember] = TolerantDecoder(FromMember)
TO_MEMBER: TolerantDecoder[ToMember] = TolerantDecoder(ToMember)


def relative_to(request: Request, now: float) -> Request:
    """Returns a request with its times relative to `now`. `relative_to(request, -now)` makes them absolute again."""
    return replace(request, arrived_s=request.arrived_s - now, deadline_s=request.deadline_s - now)
