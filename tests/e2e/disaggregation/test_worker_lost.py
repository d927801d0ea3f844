"""A relay worker that dies while it has requests in two stages: only those are lost, and nothing is held for them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from llmproxy.lab.simulator.replica import Replica
from tests.e2e.disaggregation.conftest import NIXL
from tests.e2e.disaggregation.test_split import LONG, text
from tests.e2e.operators.test_workers import MANY, metric, reached, workers
from tests.e2e.processes import START_MAX_S, served
from tests.e2e.proxies import CHAT, until
from tests.lab.simulator.legs import kv_used, metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300, method="thread")]
LEASED = replace(NIXL, kv_lease_s=5.0)


async def answer(url: str) -> str | None:
    """Returns the text of an answer on a connection of its own; None if the connection breaks."""
    async with aiohttp.ClientSession() as session:
        try:
            async with session.post(url + CHAT, json=LONG) as got:
                return text(CHAT, await got.json()) if got.status == 200 else f"status {got.status}"
        except aiohttp.ClientError:
            return None


def in_engine(replica: Replica) -> int:
    gauges = replica.engine.gauges()
    return gauges.running + gauges.waiting


@pytest.mark.parametrize("stage", ["between", "decode"])
async def test_a_worker_that_is_killed_between_the_stages_leaves_nothing(stage: str, tmp_path: Path) -> None:
    """If the worker had unread answers of prefills, only the engine's lease frees their KV blocks."""
    # Where nothing is to expire, no slow machine should see to it.
    async with Replica(LEASED if stage == "between" else NIXL) as first, Replica(NIXL) as second:
        config: dict[str, Any] = {
            "backends": [
                {"url": first.url, "name": "p", "role": "prefill", "max_in_flight": 2 * MANY},
                {"url": second.url, "name": "d", "role": "decode", "max_in_flight": 2 * MANY},
            ],
            "scheduling": {"disaggregation": "always", "prompt_window_s": None},
            "health": {"hung_s": None},
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        options = ("--port", "0", "--workers", "2", "--config", str(tmp_path / "config.json"))
        async with served(tmp_path / "log", *options) as process:
            url = await process.url()
            await process.event("backend_up", 2)
            right = await answer(url)
            victim, witness = workers(process)
            frozen = first if stage == "between" else second
            frozen.faults.set("frozen")
            asked = [asyncio.create_task(answer(url)) for _ in range(MANY)]
            # A request that is cut before it reaches the engine does not free the blocks of its prefill.
            await until(lambda: in_engine(frozen) == MANY, START_MAX_S)
            if stage == "between":
                os.kill(victim, signal.SIGSTOP)
                frozen.faults.clear()
                # The other worker hands over its requests. Blocks that remain now are fetched by nobody.
                await until(lambda: not first.in_flight, START_MAX_S)
            os.kill(victim, signal.SIGKILL)
            lost = await process.event("worker_lost")
            cut = lost["requests"]
            assert (lost["pid"], 0 < cut < MANY) == (victim, True)
            frozen.faults.clear()
            answers = await asyncio.gather(*asked)
            assert (answers.count(None), answers.count(right)) == (cut, MANY - cut)
            # The scheduler keeps neither leases nor places for answers, and the engines no blocks.
            for name in ("llmproxy_in_flight_requests", "llmproxy_backend_saturation", "llmproxy_queued_requests"):
                await reached(url, name, 0)
            await until(lambda: kv_used(first) == kv_used(second) == 0.0, START_MAX_S)
            async with aiohttp.ClientSession() as client:
                expired = (await metrics(client, first))["nixl_num_kv_expired_reqs_total"]
            assert expired == (cut if stage == "between" else 0)
            await until(lambda: len(workers(process)) == 2, START_MAX_S)
            assert witness in workers(process)
            assert await asyncio.gather(*[answer(url) for _ in range(MANY)]) == [right] * MANY
            assert await metric(url, "llmproxy_disaggregation_total", mode="split") == 1 + MANY - cut + MANY
