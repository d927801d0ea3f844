"""Every way in which a replica may misbehave: what its client saw, the verdict, and the log."""

from __future__ import annotations

import pytest

from tests.faults.misbehaviours import MISBEHAVIOURS
from tests.faults.rig import Misbehaviour, Seen, play

EVERY = pytest.mark.parametrize("fault", MISBEHAVIOURS, ids=lambda fault: fault.name)
ASKED = pytest.mark.parametrize("ask", ["stream", "whole"])


def holds(seen: Seen) -> None:
    """What must hold of every request, whatever happened to it."""
    assert sum(seen.outcomes.values()) == 1, "one outcome"
    (outcome,) = seen.outcomes
    assert seen.exit["outcome"] == outcome
    assert seen.exit["attempts"] == 1 + seen.retries
    assert not [line for line in seen.log if line["event"] == "internal"]
    if outcome != "completed":
        assert seen.exit["error"], "the log says why"
    assert "location" not in seen.received.headers, "clients cannot follow a redirect to a backend"
    if seen.client == "other":
        assert b"error" not in seen.received.body
    if seen.client == "event":
        assert [b"The stream broke" in event for event in seen.received.events].count(True) == 1
        assert b"The stream broke" in seen.received.events[-1]
    if seen.received.whole and seen.received.status >= 400:
        assert seen.received.headers["content-type"].startswith("application/json")


@EVERY
@ASKED
async def test_beside_a_replica_that_is_well(fault: Misbehaviour, ask: str) -> None:
    seen = await play(fault, ask)
    holds(seen)
    verdict = fault.whole_verdict if ask == "whole" and fault.whole_verdict is not None else fault.verdict
    assert (seen.client, seen.verdicts) == (fault.stream if ask == "stream" else fault.whole, (verdict,))
    assert seen.retries == (seen.client == "other")


@EVERY
@ASKED
async def test_without_another_backend(fault: Misbehaviour, ask: str) -> None:
    seen = await play(fault, ask, alone=True)
    holds(seen)
    assert seen.client == fault.alone[ask == "whole"]
