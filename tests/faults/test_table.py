"""Every row of docs/reference/faults.md: what clients saw, the verdict, what is left behind, and the log."""

from __future__ import annotations

from operator import attrgetter

import pytest

from llmproxy.core.domain import Stage
from llmproxy.scheduling.attempt import Split
from tests.e2e.proxies import serving
from tests.e2e.scripted import answering, scripted
from tests.faults.clients import CLIENT_FAULTS, ClientFault, observe
from tests.faults.misbehaviours import MISBEHAVIOURS
from tests.faults.polls import BODY, POLL_FAULTS, PollFault, huge, watch
from tests.faults.rig import Misbehaviour, Seen, play
from tests.faults.scenes import SCENES, Scene, perform
from tests.faults.table import PAGE, generated

NAME = attrgetter("name")
PREFILL_CAUSES = (Split.PREFILL_FAILED, Split.PREFILL_REFUSED, Split.NO_PARAMETERS, Split.BAD_PARAMETERS)


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


@pytest.mark.sampled(13)
@pytest.mark.parametrize("alone", [False, True], ids=["beside another", "alone"])
@pytest.mark.parametrize("ask", ["stream", "whole"])
@pytest.mark.parametrize("fault", MISBEHAVIOURS, ids=NAME)
async def test_a_replica_that(fault: Misbehaviour, ask: str, alone: bool) -> None:
    seen = await play(fault, ask, alone=alone)
    holds(seen)
    assert seen.client == fault.client(ask, alone)
    if not alone:
        verdict = fault.whole_verdict if ask == "whole" and fault.whole_verdict is not None else fault.verdict
        assert seen.verdicts == (verdict,)
        assert seen.retries == (seen.client == "other" or "continued" in seen.exit)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("fault", MISBEHAVIOURS, ids=NAME)
async def test_a_prefill_replica_that(fault: Misbehaviour) -> None:
    """Its answer is for the proxy alone, so that the client sees nothing of it."""
    seen = await play(fault, "whole", stage=Stage.PREFILL)
    holds(seen)
    assert seen.client == "other"
    assert seen.retries == 1
    assert seen.exit["disaggregation"] in PREFILL_CAUSES


@pytest.mark.sampled(9)
@pytest.mark.parametrize("fault", MISBEHAVIOURS, ids=NAME)
async def test_a_decode_replica_that(fault: Misbehaviour) -> None:
    """Before its first token it costs time; after that, or alone, it is what it would be without a prefill."""
    seen = await play(fault, "stream", stage=Stage.DECODE)
    holds(seen)
    # Who answered with an error may be asked for the whole, once more.
    assert seen.client in ("other", fault.client("stream", alone=False))
    if seen.exit["disaggregation"] != Split.SPLIT:
        assert seen.exit["disaggregation"] in (Split.DECODE_FAILED, Split.DECODE_REFUSED, Split.TRANSFER_FAILED)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("fault", CLIENT_FAULTS, ids=NAME)
async def test_a_client_that(fault: ClientFault) -> None:
    seen = await observe(fault)
    assert (seen.client, seen.outcomes) == (fault.saw, fault.outcomes)
    exits = [line for line in seen.log if line["event"] == "request"]
    assert sorted(line["outcome"] for line in exits) == sorted(
        outcome for outcome, count in seen.outcomes.items() for _ in range(count)
    ), "the log names each, once"
    assert seen.cut == fault.cut, "the engine learns of it"


@pytest.mark.sampled(9)
@pytest.mark.parametrize("fault", POLL_FAULTS, ids=NAME)
async def test_a_polled_replica_that(fault: PollFault) -> None:
    seen = await watch(fault)
    assert (seen.up, seen.status) == (fault.up, 200 if fault.up else 503)
    if fault.up:
        assert seen.running == fault.running
    events = [line["event"] for line in seen.log]
    assert events == ["backend_down"] * (not fault.up) + ["backend_metrics_unreadable"] * fault.unread, (
        "once, and nothing else"
    )


async def test_an_unread_replica_does_not_get_all_that_waits() -> None:
    async with scripted(answering(BODY)) as backend:
        backend.polls[b"/metrics"] = huge
        async with serving(extra=[backend.url]) as proxy:
            pools = proxy.app.pools
            assert pools.backends["b0"].limit.value == pools.settings.capacity.initial_batch_limit


@pytest.mark.sampled(4)
@pytest.mark.parametrize("scene", SCENES, ids=NAME)
async def test_when(scene: Scene) -> None:
    played = await perform(scene)
    assert (played.clients, played.outcomes, played.events) == (scene.clients, scene.outcomes, scene.events)
    assert len(played.exits) == sum(played.outcomes.values()), "one line for each request"


def test_the_page_has_these_faults_and_results() -> None:
    assert PAGE.read_text() == generated(PAGE.read_text()), "write it anew: python -m tests.faults.table"
