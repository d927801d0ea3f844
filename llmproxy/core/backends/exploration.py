"""Which engine of a pool is tried beyond what is known to run there: one at a time, so that the others stay sure."""

from __future__ import annotations

from typing import Protocol

from llmproxy.core.backends.batch_limit import BatchLimit


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
        self.sure = 0
        """The most that any of them was seen to run."""
        self._by: BatchLimit | None = None

    def learned(self, limit: BatchLimit) -> None:
        """One of the limits may have changed."""
        if limit.sure >= self.sure:
            self.sure, self._by = limit.sure, limit
        elif limit is self._by:
            self.look()

    def look(self) -> None:
        """Members came or went, or less is known than was."""
        self._by = max((member.limit for member in self.members.values()), key=lambda limit: limit.sure, default=None)
        self.sure = 0 if self._by is None else self._by.sure

    def bound(self, of: BatchLimit) -> int | None:
        """How far the limit of a member may grow; None while no other is being tried."""
        others = (one for one in self.members.values() if one.limit is not of and one.up)
        tried = any(one.in_flight > max(self.sure, one.limit.sure) for one in others)
        return self.sure if tried else None

    def end_of_a_twin(self, of: BatchLimit) -> int | None:
        """Where another has met its end, no sooner than this one was seen to run; None where none has."""
        ends = (one.limit.sure for one in self.members.values() if one.limit is not of and one.limit.proven)
        return min((end for end in ends if end >= of.sure), default=None)
