"""KV that simulated servers hand to each other in virtual time: how long it takes, and what becomes of the blocks."""

from __future__ import annotations

import asyncio

import pytest

from llmproxy.lab.fleet.job import ServerJob, TransferFailed
from llmproxy.lab.fleet.kv_connector import KeptKv
from llmproxy.lab.fleet.server import SimulatedServer
from llmproxy.lab.simulator.engine.kv_transfer import KvTransfer
from llmproxy.lab.simulator.engine.profiles import Noise
from llmproxy.lab.simulator.engine.sequence import EngineRequest
from tests.dispatching import virtual
from tests.lab.fleet.test_server import spec

TIMES = KvTransfer(bytes_per_token=1_000, bytes_per_s=1e6, latency_s=0.1, handshake_s=2.0)
TOKENS = 1_000
TRANSFER_S = 1.1
"""Of the whole prompt."""
HASHES = tuple(range(TOKENS // 16))


def server(times: KvTransfer = TIMES) -> SimulatedServer:
    quiet = Noise(sigma=0.0, slow_chance=0.0)
    made = SimulatedServer(spec(), 1.0, 0, asyncio.get_running_loop(), quiet, times)
    made.start()
    return made


async def prefilled(on: SimulatedServer, name: str = "p") -> KeptKv:
    job = on.open(EngineRequest(name, TOKENS, 1, HASHES, pins=True), lambda: None)
    await job.ended
    return on.kept(job)


def opened(on: SimulatedServer, kept: KeptKv, name: str = "d", hashes: tuple[int, ...] = HASHES) -> ServerJob:
    return on.open(EngineRequest(name, TOKENS, 10, hashes, remote=True), lambda: None, kept)


async def first_after_s(job: ServerJob) -> float:
    began_s = asyncio.get_running_loop().time()
    await job.ended
    assert job.first_s is not None
    return job.first_s - began_s


def used(one: SimulatedServer) -> float:
    return one.engine.gauges().kv_used


@virtual
async def test_the_first_transfer_between_two_servers_takes_a_handshake_more() -> None:
    one, other = server(), server()
    took_s = [await first_after_s(opened(other, await prefilled(one, f"p{i}"), f"d{i}", ())) for i in range(2)]
    assert took_s[1] == pytest.approx(TRANSFER_S, abs=0.05)
    assert took_s[0] - took_s[1] == pytest.approx(TIMES.handshake_s, abs=0.01)
    # Nothing but the last token of a prompt was computed where it was answered.
    assert other.engine.counters.external == 2 * TOKENS
    assert (used(one), used(other)) == (0.0, 0.0)


@virtual
async def test_what_is_cached_is_not_transferred() -> None:
    one, other = server(), server()
    await first_after_s(opened(other, await prefilled(one, "p0"), "d0"))
    assert await first_after_s(opened(other, await prefilled(one, "p1"), "d1")) < 0.3


@virtual
async def test_blocks_are_kept_until_they_were_read() -> None:
    one, other = server(), server()
    kept = await prefilled(one)
    assert used(one) > 0.2
    job = opened(other, kept)
    await asyncio.sleep(TIMES.handshake_s)
    assert used(one) > 0.2
    await job.ended
    assert used(one) == 0.0


@virtual
async def test_blocks_that_nobody_reads_are_kept_for_a_lease() -> None:
    one = server()
    await prefilled(one)
    await asyncio.sleep(TIMES.lease_s - 1.0)
    assert used(one) > 0.2
    await asyncio.sleep(2.0)
    assert used(one) == 0.0


@virtual
async def test_a_request_that_waits_keeps_the_lease_alive() -> None:
    one, other = server(), server()
    other.freeze(True)
    job = opened(other, await prefilled(one))
    await asyncio.sleep(2 * TIMES.lease_s)
    assert used(one) > 0.2
    other.freeze(False)
    await job.ended
    assert used(one) == 0.0


@pytest.mark.parametrize("after_s", [0.0, 1.0])
@virtual
async def test_a_client_that_leaves_frees_both_sides(after_s: float) -> None:
    one, other = server(), server()
    job = opened(other, await prefilled(one))
    await asyncio.sleep(after_s)
    other.leave(job)
    # A transfer under way goes on to its end.
    await asyncio.sleep(TRANSFER_S + TIMES.handshake_s)
    assert (used(one), used(other)) == (0.0, 0.0)


@pytest.mark.parametrize("known", [True, False])
@virtual
async def test_a_server_that_died_fails_the_request(known: bool) -> None:
    one, other = server(), server()
    if known:
        await opened(other, await prefilled(one, "p0"), "d0", ()).ended
    job = opened(other, await prefilled(one), hashes=())
    one.kill()
    one.start()
    began_s = asyncio.get_running_loop().time()
    with pytest.raises(TransferFailed):
        await job.ended
    noticed_s = TIMES.lost_s if known else TIMES.unreachable_s
    assert asyncio.get_running_loop().time() - began_s == pytest.approx(noticed_s, abs=0.05)
    assert used(other) == 0.0


@virtual
async def test_a_server_that_dies_during_the_transfer_fails_the_request() -> None:
    one, other = server(), server()
    job = opened(other, await prefilled(one))
    await asyncio.sleep(1.0)
    one.kill()
    with pytest.raises(TransferFailed):
        await job.ended
    assert used(other) == 0.0


@virtual
async def test_where_the_policy_is_to_recompute_the_prompt_is_computed() -> None:
    times = KvTransfer(on_failure="recompute", unreachable_s=1.0)
    one, other = server(times), server(times)
    job = opened(other, await prefilled(one))
    one.kill()
    await job.ended
    assert other.engine.counters.external == 0
    assert other.engine.counters.prompt == TOKENS


@virtual
async def test_a_reader_that_dies_leaves_the_lease_to_run_out() -> None:
    one, other = server(), server()
    opened(other, await prefilled(one)).ended.add_done_callback(lambda ended: ended.exception())
    other.kill()
    await asyncio.sleep(TIMES.extension_s - 1.0)
    assert used(one) > 0.2
    await asyncio.sleep(2.0)
    assert used(one) == 0.0
