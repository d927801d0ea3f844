"""Which engine of a pool is tried beyond what is known to run there: one at a time, so that the others stay sure."""

from __future__ import annotations

from typing import Protocol

from llmproxy.core.capacity import BatchLimit


class Member(Protocol):
    """What of a backend counts here."""

    @property
    def up(self) -> bool: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def limit(self) -> BatchLimit: ...


class Exploration:
    """What the engines of one pool were seen to run.

    They are taken for twins until they prove otherwise: what one of them runs, the others may be given as well, and
    where one has met its end, theirs is believed to be there. Beyond that one alone is tried at a time, because what is
    too much for an engine waits inside it, before everything that comes later. Whoever may not wait finds room at the
    others meanwhile.
    """

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}

    @property
    def sure(self) -> int:
        """The most that any of them was seen to run."""
        return max((member.limit.sure for member in self.members.values()), default=0)

    def bound(self, of: Member) -> int | None:
        """How far the limit of a member may grow; None while no other is being tried."""
        sure = self.sure
        others = (one for one in self.members.values() if one is not of and one.up)
        tried = any(one.in_flight > max(sure, one.limit.sure) for one in others)
        return sure if tried else None

    def end_of_a_twin(self, of: Member) -> int | None:
        """Where another has met its end, no sooner than this member was seen to run; None where none has."""
        ends = (one.limit.sure for one in self.members.values() if one is not of and one.limit.proven)
        return min((end for end in ends if end >= of.limit.sure), default=None)
