"""The messages between the members of a cluster: those of relay workers, and what a network needs beside them.

No clock is shared, so every time that travels is relative: to the moment in which its message was made, and then to
the one in which it was read. A lease is named by the call that asked for it, which is the member's own number, so that
it means the same to every leader.

Two releases run together, the older one of which skips kinds and fields that it does not know, and takes values of
enums that it does not know for others (`OTHERWISE`). So a release may add kinds that nobody waits for, last fields with
a default, and such values. What the other side has to act upon, such as a call or another stage, is sent only to who
has said in its Hello or Welcome that it knows it, by a last field. Everything else needs another `PROTOCOL`.
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
from llmproxy.core.shards import DEFAULT
from llmproxy.observe.exit import Split
from llmproxy.remote.workers import protocol as workers
from llmproxy.remote.workers.protocol import Message

PROTOCOL = 1
"""The version of what follows. Members of another one do not talk to each other."""


class Hello(Message, frozen=True, tag=40):
    """The first message of a member. `incarnation` differs with each start. `config` is a hash of its configuration.

    `epoch` is the highest one that it knows of, of the `shard` that it is about. `stands`: it would lead that shard.
    """

    protocol: int
    version: str
    name: str
    incarnation: str
    address: str
    config: str
    epoch: int
    shard: str = DEFAULT
    stands: bool = True


class Welcome(Message, frozen=True, tag=41):
    """The leader takes the member in. All grants that follow are of this epoch."""

    epoch: int
    name: str
    version: str
    config: str


class NotLeader(Message, frozen=True, tag=42):
    """The process that was asked does not schedule, or does so no more."""

    why: str


class Resume(Message, frozen=True, tag=43):
    """What the member has, as call numbers: requests that wait, and leases that run. `Admit` and `Running` follow."""

    waiting: frozenset[int]
    running: frozenset[int]


class Running(Message, frozen=True, tag=44):
    """A lease that runs. `request` is the stage that it is for; the ages are those of its grant and first token."""

    call: int
    request: Request
    placed: Placed
    age_s: float
    started_age_s: float | None
    committed: bool
    output_tokens: int


class Resumed(Message, frozen=True, tag=45):
    """Everything that the member has was sent."""


class Ping(Message, frozen=True, tag=46):
    """Nothing is to be said, but the sender is alive."""


class Members(Message, frozen=True, tag=47):
    """Who is there, by name."""

    names: tuple[str, ...]


class Drained(Message, frozen=True, tag=48):
    """The backends of the leader that were drained by hand, and all of its `others`. None: whatever else there is.

    Members may differ about whose a backend is, as where one of them has not read its models yet.
    """

    backends: frozenset[str]
    others: frozenset[str] | None = None


class Balances(Message, frozen=True, tag=49):
    """What changed of the balances of flows of one band (`FairnessPolicy.balances`), which a next leader takes over."""

    pool: str
    band: int
    flows: dict[str, float]


class Learned(Message, frozen=True, tag=51):
    """What the leader learned of engines, by URL, and of pools, with which a next leader begins."""

    limits: dict[str, KnownLimit]
    capacities: dict[str, KnownCapacity]


class RateDebts(Message, frozen=True, tag=52):
    """What changed of used-up rates: (limit, kind, seconds until all that was taken is back); see `Rates.debts`."""

    debts: tuple[tuple[str, str, float], ...]


class PrefixHeld(Message, frozen=True, tag=53):
    """A backend holds these blocks, as a member knows of a request that it relayed before this leader led."""

    pool: str
    backend: str
    hashes: tuple[int, ...]


class LeaseTaken(Message, frozen=True, tag=50):
    """The member knows that it was granted this lease. What it did not take is free when its connection is lost."""

    call: int


FromMember = (
    workers.Admit | workers.CancelCall | workers.LeaseStarted | workers.LeaseCommitted | workers.LeaseProgress
    | workers.LeaseReturned | workers.LeaseRecomputing | workers.RequestEnded | workers.PrefixCached
    | workers.ResponseStored | workers.PageRequest | workers.Resolve
    | workers.ExitReport | Hello | Resume | Running | Resumed | LeaseTaken | PrefixHeld | Ping
)  # fmt: skip
ToMember = (
    workers.LeaseGranted | workers.CallRefused | workers.LeaseCut | workers.ResponseStored | workers.PageResponse
    | workers.NameResolved | Welcome | NotLeader | Members | Drained | Balances | Learned | RateDebts | Ping
)  # fmt: skip

OTHERWISE: Mapping[type[Enum], Enum] = {
    # What a member asks for in a new way was most likely let in before, and would be charged twice.
    AdmissionKind: AdmissionKind.RETRY,
    # 503: the request was refused, and may be tried again.
    Outcome: Outcome.REJECTED_NO_BACKENDS,
    Split: Split.WHOLE,
    Stage: Stage.WHOLE,
    # It proves nothing about a backend.
    Verdict: Verdict.CLIENT_GONE,
}
"""What a value of an enum that a later release knows is taken for, by the enum: all that travel."""
UNKNOWN_MAX = 100
"""Unknown values that are logged, each once."""

MessageT = TypeVar("MessageT")
_log = structlog.get_logger()
_type_of = cache(inspect.type_info)


class KnownMessages(Generic[MessageT]):
    """Decodes the messages of a frame whose kind is known, and skips those of other kinds.

    A frame of known messages alone, with known values, which is every one of the same release, is decoded as a whole.
    """

    def __init__(self, kinds: Any) -> None:
        self._whole: msgspec.msgpack.Decoder[list[MessageT]] = msgspec.msgpack.Decoder(list[kinds])
        self._frame = msgspec.msgpack.Decoder(list[msgspec.Raw])
        self._message: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(kinds)
        self._plain = msgspec.msgpack.Decoder(list[Any])
        self._kinds: dict[Any, Any] = {kind.__struct_config__.tag: kind for kind in kinds.__args__}
        self._unknown: set[tuple[str, str]] = set()

    def decode(self, data: Any) -> list[MessageT]:
        """The known ones, in their order. Raises msgspec.DecodeError."""
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
                    known = self._known(plain, _type_of(kind))
                    yield self._message.decode(msgspec.msgpack.encode(known))

    def _known(self, value: Any, of: inspect.Type) -> Any:
        """Plain data of this type, with what values are `OTHERWISE` in place of those of no enum known here.

        What is of another type is left as it is, and is found by who decodes it.
        """
        match of, value:
            case inspect.EnumType(cls), str() if value not in [one.value for one in cls]:
                return self._otherwise(cls, value)
            case inspect.StructType(fields=fields, array_like=True, tag=tag), list():
                types = [field.type for field in fields]
                begin = 0 if tag is None else 1
                ours = value[begin : begin + len(types)]
                return value[:begin] + [self._known(*pair) for pair in zip(ours, types, strict=False)]
            case inspect.StructType(fields=fields) | inspect.DataclassType(fields=fields), dict():
                types_of = {field.encode_name: field.type for field in fields}
                return {key: self._known(one, types_of[key]) for key, one in value.items() if key in types_of}
            case inspect.UnionType(types), _:
                for one in types:
                    value = self._known(value, one)
                return value
            case inspect.VarTupleType(item_type), list():
                return [self._known(one, item_type) for one in value]
            case _:
                return value

    def _otherwise(self, enum: type[Enum], value: str) -> Any:
        taken_for = OTHERWISE[enum].value
        said = enum.__name__, value
        if said not in self._unknown and len(self._unknown) < UNKNOWN_MAX:
            self._unknown.add(said)
            _log.warning("cluster_value_unknown", of=enum.__name__, value=value, taken_for=taken_for)
        return taken_for


FROM_MEMBER: KnownMessages[FromMember] = KnownMessages(FromMember)
TO_MEMBER: KnownMessages[ToMember] = KnownMessages(ToMember)


def aged(request: Request, now: float) -> Request:
    """A request with times relative to `now`, and back again by `-now`."""
    return replace(request, arrived_s=request.arrived_s - now, deadline_s=request.deadline_s - now)
