"""A tenant sees its own use and limits, also over workers and a restart, and gets 429 when its day is used up."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from llmproxy.config import hash_of
from llmproxy.lab.simulator.replica import Replica
from tests.e2e.processes import served
from tests.e2e.proxies import CHAT, FAST, HELLO, STREAM, one_seat, serving

ACME = {"authorization": "Bearer acme-1"}
SECOND = {"authorization": "Bearer acme-2"}
OTHER = {"authorization": "Bearer other-1"}


def tenants(**limits: Any) -> list[dict[str, Any]]:
    keys = [{"hash": hash_of("acme-1"), "name": "laptop"}, {"hash": hash_of("acme-2"), "name": "server"}]
    return [{"name": "acme", "keys": keys, "limits": limits}, {"name": "other", "keys": [hash_of("other-1")]}]


async def test_a_tenant_sees_its_own_use_by_key_and_model() -> None:
    async with serving(FAST, tenants=tenants(in_flight=3, tokens_per_day=10_000, requests_per_day=50)) as proxy:
        answers = [await proxy.chat(headers=headers) for headers in (ACME, ACME, SECOND, OTHER)]
        # The engine refuses it, so it costs a request and no tokens.
        await proxy.chat({"max_tokens": "many"}, headers=ACME)
        counted = [answer.json["usage"] for answer in answers[:3]]
        page = (await proxy.get("/v1/usage", headers=ACME)).json
        today, tokens = page["today"], sum(one["total_tokens"] for one in counted)
        assert (page["tenant"], page["key"], page["time_zone"]) == ("acme", "laptop", "UTC")
        assert today["requests"] == 4
        assert today["prompt_tokens"] == sum(one["prompt_tokens"] for one in counted)
        assert today["output_tokens"] == sum(one["completion_tokens"] for one in counted)
        assert {key: used["requests"] for key, used in today["by_key"].items()} == {"laptop": 3, "server": 1}
        assert {model: used["requests"] for model, used in today["by_model"].items()} == {"base": 4}
        assert page["limits"] == {
            "in_flight": 3, "requests_per_day": 50, "tokens_per_day": 10_000,
            "requests_per_day_left": 46, "tokens_per_day_left": 10_000 - tokens,
        }  # fmt: skip
        assert (await proxy.get("/v1/usage", headers=OTHER)).json["today"]["requests"] == 1
        assert (await proxy.get("/v1/usage")).status == 401


async def test_a_used_up_day_is_refused_with_its_end() -> None:
    async with serving(FAST, tenants=tenants(requests_per_day=2)) as proxy:
        statuses = [(await proxy.chat(STREAM if number else None, headers=ACME)).status for number in range(2)]
        refused = await proxy.chat(headers=ACME)
        assert (statuses, refused.status) == ([200, 200], 429)
        message = refused.json["error"]["message"]
        assert message.startswith(
            "The limit of 2 requests per day of the tenant `acme` is used up. A new day begins in"
        )
        assert 0 < int(refused.headers["retry-after"]) <= 86_400
        assert (await proxy.chat(headers=OTHER)).status == 200


@pytest.mark.parametrize("reads", [True, False])
async def test_a_stream_without_usage_counts_as_in_the_budget(reads: bool) -> None:
    async with (
        Replica(FAST) as replica,
        serving(backends=[{"url": replica.url, "ask_usage": False}], tenants=tenants(tokens_per_day=100_000)) as proxy,
    ):
        if reads:
            assert (await proxy.chat(STREAM, headers=ACME)).status == 200
        else:
            async with proxy.stream(**ACME) as stream:
                await stream.content.readany()
            await proxy.settled()
        page = (await proxy.get("/v1/usage", headers=ACME)).json
        today = page["today"]
        assert today["estimated_tokens"] == today["prompt_tokens"] + today["output_tokens"] > 0
        assert page["limits"]["tokens_per_day_left"] == 100_000 - today["estimated_tokens"]


async def test_a_request_that_reached_no_backend_costs_none() -> None:
    async with one_seat(headers=ACME, tenants=tenants(requests_per_day=2)) as (proxy, _):
        for _ in range(3):
            refused = await proxy.chat(headers=ACME | {"x-llm-d-inference-ttl": "10ms"})
            assert "per day" not in refused.json["error"]["message"]
        page = (await proxy.get("/v1/usage", headers=ACME)).json
        assert page["limits"]["requests_per_day_left"] == 1


def of_another_process(folder: Path) -> None:
    """Renames the files of this process."""
    for file in folder.iterdir():
        file.rename(folder / f"{file.name[:10]}.another-process.jsonl")


async def test_a_budget_counts_aliases_also_after_a_restart(tmp_path: Path) -> None:
    models = [{"name": "base", "limits": {"requests_per_day": 3}}, {"name": "alias", "target": "base"}]
    for statuses in ([200, 200], [200, 429]):
        of_another_process(tmp_path)
        async with serving(FAST, usage_folder=tmp_path, models=models) as proxy:
            body = HELLO | {"model": "alias"}
            assert [(await proxy.chat(body)).status for _ in statuses] == statuses


@pytest.mark.slow
async def test_the_use_is_kept_over_workers_and_a_restart(tmp_path: Path) -> None:
    async with Replica(replace(FAST)) as backend, aiohttp.ClientSession(headers=ACME) as http:
        file = tmp_path / "config.yaml"
        file.write_text(
            f"backends: [{{url: '{backend.url}'}}]\nusage: {{dir: {tmp_path}/usage}}\n"
            f"tenants: [{{name: acme, keys: ['{hash_of('acme-1')}'], limits: {{requests_per_day: 12}}}}]\n"
        )
        for run, statuses in enumerate(([200] * 8, [200] * 4 + [429] * 4)):
            async with served(
                tmp_path / f"log{run}", "--port", "0", "--workers", "2", "--config", str(file)
            ) as process:
                url = await process.url()
                for status in statuses:
                    async with http.post(url + CHAT, json=HELLO) as answer:
                        await answer.read()
                        assert answer.status == status
                async with http.get(url + "/v1/usage") as answer:
                    page = await answer.json()
                assert (page["today"]["requests"], page["limits"]["requests_per_day_left"]) == ((8, 4), (12, 0))[run]
                process.process.terminate()
                await process.process.wait()


@pytest.mark.slow
async def test_the_command_prints_the_use() -> None:
    async with serving(FAST, tenants=tenants(requests_per_day=50)) as proxy:
        await proxy.chat(headers=ACME)
        for key, code, text in (
            ("acme-1", 0, "requests per day: 50, 49 left"),
            ("wrong", 1, "wants the key of a tenant"),
        ):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "llmproxy", "usage", proxy.app.url, "--api-key", key, stdout=-1, stderr=-1
            )
            out, err = await process.communicate()
            assert (process.returncode, text in (out + err).decode()) == (code, True), (out, err)
