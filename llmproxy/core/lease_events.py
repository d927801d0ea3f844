"""The events in the life of a lease. The holder of the lease reports them, and processes send them to each other."""

from __future__ import annotations

from msgspec import Struct

from llmproxy.core.domain import Usage, Verdict


class LeaseEvent(Struct, frozen=True, array_like=True):
    """An event of the lease with this number.

    The tag of a subclass is its number on the wire, where it must also differ from the tags in `remote/messages.py`.
    """

    lease: int


class Progress(LeaseEvent, frozen=True, tag=8):
    """The answer has about `output_tokens` tokens so far."""

    output_tokens: int


class Started(LeaseEvent, frozen=True, tag=6):
    """The first token of a stream, or the first bytes of another answer, arrived."""


class Committed(LeaseEvent, frozen=True, tag=7):
    """The first byte of a stream was sent to the client, token or not. From now on, another backend can only generate
    the rest of the answer.
    """


class Returned(LeaseEvent, frozen=True, tag=9):
    """The attempt ended. `usage`: the engine's counts, or the tokens so far of an answer cut short; None if unknown."""

    verdict: Verdict
    usage: Usage | None = None


class Recomputing(LeaseEvent, frozen=True, tag=31):
    """The decode stage computes the prompt, without the prefill stage's KV blocks. No backend is to blame."""


AnyLeaseEvent = Progress | Started | Committed | Returned | Recomputing
