"""Replicas that answer polls wrongly: who serves goes on to be asked, and who is ill is back with one good answer."""

from __future__ import annotations

import pytest

from tests.faults.polls import POLL_FAULTS, PollFault, watch


@pytest.mark.parametrize("fault", POLL_FAULTS, ids=lambda fault: fault.name)
async def test_a_replica_that(fault: PollFault) -> None:
    seen = await watch(fault)
    assert (seen.up, seen.status) == (fault.up, 200 if fault.up else 503)
    if fault.up:
        assert seen.running == fault.running
    told = [line["event"] for line in seen.log]
    assert told == ["backend_down"] * (not fault.up) + ["backend_unread"] * fault.unread, "once, and nothing else"
