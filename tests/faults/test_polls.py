"""Replicas that answer polls wrongly: a serving one stays up, and a failing one is back with one good answer."""

from __future__ import annotations

import pytest

from tests.e2e.proxies import serving
from tests.e2e.scripted import answering, scripted
from tests.faults.polls import BODY, POLL_FAULTS, PollFault, huge, watch


@pytest.mark.parametrize("fault", POLL_FAULTS, ids=lambda fault: fault.name)
async def test_a_replica_that(fault: PollFault) -> None:
    seen = await watch(fault)
    assert (seen.up, seen.status) == (fault.up, 200 if fault.up else 503)
    if fault.up:
        assert seen.running == fault.running
    told = [line["event"] for line in seen.log]
    assert told == ["backend_down"] * (not fault.up) + ["backend_unread"] * fault.unread, "once, and nothing else"


async def test_an_unread_replica_does_not_get_all_that_waits() -> None:
    async with scripted(answering(BODY)) as backend:
        backend.polls[b"/metrics"] = huge
        async with serving(extra=[backend.url]) as proxy:
            pools = proxy.app.pools
            assert pools.backends["b0"].limit.value == pools.settings.capacity.start_limit
