"""Every way in which a client may misbehave: what it saw, what the backend saw, and what is left of it."""

from __future__ import annotations

import pytest

from tests.faults.clients import CLIENT_FAULTS, ClientFault, observe


@pytest.mark.parametrize("fault", CLIENT_FAULTS, ids=lambda fault: fault.name)
async def test_a_client_that(fault: ClientFault) -> None:
    seen = await observe(fault)
    assert (seen.client, seen.outcomes) == (fault.saw, fault.outcomes)
    exits = [line for line in seen.log if line["event"] == "request"]
    assert sorted(line["outcome"] for line in exits) == sorted(
        outcome for outcome, count in seen.outcomes.items() for _ in range(count)
    ), "the log tells of each, once"
    assert seen.cut == fault.cut, "the engine learns of it"
