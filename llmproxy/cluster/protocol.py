"""The messages between the members of a cluster: those of relay workers, and what a network needs beside them.

No clock is shared, so every time that travels is relative: to the moment in which its message was made, and then to
the one in which it was read. A lease is named by the call that asked for it, which is the member's own number, so that
it means the same to every leader. Unknown kinds are skipped, and unknown last fields too: that lets two releases run
together.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
from msgspec.structs import replace

from llmproxy.core.domain import KnownCapacity, KnownLimit, Placed, Request
from llmproxy.core.shards import DEFAULT
from llmproxy.workers import protocol as workers
from llmproxy.workers.protocol import Message

PROTOCOL = 1
"""The version of what follows. Members of another one do not talk to each other."""


class Hello(Message, frozen=True, tag=40):
    """The first message of a member. `incarnation` differs with each start. `config` is a hash of its configuration.

    `epoch` is the highest one that it knows of, of the `shard` that it is about.
    """

    protocol: int
    version: str
    name: str
    incarnation: str
    address: str
    config: str
    epoch: int
    shard: str = DEFAULT


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
    """The backends that were drained by hand, all of them."""

    backends: frozenset[str]


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


class LeaseTaken(Message, frozen=True, tag=50):
    """The member knows that it was granted this lease. What it did not take is free when its connection is lost."""

    call: int


FromMember = (
    workers.Admit | workers.CancelCall | workers.LeaseStarted | workers.LeaseCommitted | workers.LeaseProgress
    | workers.LeaseReturned | workers.LeaseRecomputing | workers.RequestEnded | workers.PrefixCached
    | workers.ResponseStored | workers.PageRequest | workers.Resolve
    | workers.ExitReport | Hello | Resume | Running | Resumed | LeaseTaken | Ping
)  # fmt: skip
ToMember = (
    workers.LeaseGranted | workers.CallRefused | workers.LeaseCut | workers.ResponseStored | workers.PageResponse
    | workers.NameResolved | Welcome | NotLeader | Members | Drained | Balances | Learned | RateDebts | Ping
)  # fmt: skip

MessageT = TypeVar("MessageT")


class KnownMessages(Generic[MessageT]):
    """Decodes the messages of a frame whose kind is known, and skips those of other kinds.

    A frame of known messages alone, which is every one of the same release, is decoded as a whole.
    """

    def __init__(self, kinds: Any) -> None:
        self._whole: msgspec.msgpack.Decoder[list[MessageT]] = msgspec.msgpack.Decoder(list[kinds])
        self._frame = msgspec.msgpack.Decoder(list[msgspec.Raw])
        self._message: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(kinds)
        self._kind = msgspec.msgpack.Decoder(list[Any])
        self._tags = frozenset(kind.__struct_config__.tag for kind in kinds.__args__)

    def decode(self, data: Any) -> list[MessageT]:
        """The known ones, in their order. Raises msgspec.DecodeError."""
        try:
            return self._whole.decode(data)
        except msgspec.ValidationError:
            return self._decode_each(data)

    def _decode_each(self, data: Any) -> list[MessageT]:
        decoded = []
        for raw in self._frame.decode(data):
            try:
                decoded.append(self._message.decode(raw))
            except msgspec.ValidationError:
                kind = self._kind.decode(raw)
                if kind and kind[0] in self._tags:
                    raise
        return decoded


FROM_MEMBER: KnownMessages[FromMember] = KnownMessages(FromMember)
TO_MEMBER: KnownMessages[ToMember] = KnownMessages(ToMember)


def aged(request: Request, now: float) -> Request:
    """A request with times relative to `now`, and back again by `-now`."""
    return replace(request, arrived_s=request.arrived_s - now, deadline_s=request.deadline_s - now)
