"""The metrics page: a real scraper can read it, and it changes only after a step."""

from __future__ import annotations

import gzip
from dataclasses import replace

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from llmproxy.lab.simulator.engine.reports import Counters, Gauges
from llmproxy.lab.simulator.replica import Replica
from llmproxy.lab.simulator.server.metrics import ReplicaMetrics
from tests.lab.simulator.conftest import CHAT, ENDLESS, FAST, post, until


async def samples(client: aiohttp.ClientSession, path: str = "/metrics") -> list[Sample]:
    async with client.get(path) as answer:
        assert answer.status == 200
        families = text_string_to_metric_families(await answer.text())
        return [sample for family in families for sample in family.samples]


def value(found: list[Sample], name: str, **labels: str) -> float:
    matching = [s.value for s in found if s.name == name and labels.items() <= s.labels.items()]
    assert len(matching) == 1, (name, matching)
    return matching[0]


async def test_a_real_parser_reads_the_page(client: aiohttp.ClientSession) -> None:
    body = {"prompt": "x" * 400, "max_tokens": 5}
    for _ in range(2):
        await post(client, "/v1/completions", body)
    found = await samples(client)
    common = {"engine": "0", "model_name": "base"}
    assert value(found, "vllm:num_requests_running", **common) == 0
    assert value(found, "vllm:prompt_tokens_total", **common) == 200
    assert value(found, "vllm:generation_tokens_total", **common) == 10
    assert value(found, "vllm:prefix_cache_queries_total", **common) == 200
    assert value(found, "vllm:prefix_cache_hits_total", **common) == 96
    assert value(found, "vllm:request_success_total", finished_reason="length", **common) == 2
    assert value(found, "vllm:request_success_total", finished_reason="abort", **common) == 0
    assert value(found, "vllm:time_to_first_token_seconds_count", **common) == 2
    assert value(found, "vllm:inter_token_latency_seconds_count", **common) == 8
    assert value(found, "vllm:request_prompt_tokens_bucket", le="100.0", **common) == 2
    assert value(found, "vllm:request_prompt_tokens_bucket", le="50.0", **common) == 0
    assert value(found, "vllm:cache_config_info", block_size="16", num_gpu_blocks="4096") == 1
    assert value(found, "http_requests_total", handler="/v1/completions", method="POST", status="2xx") == 2
    rejections = [s for s in found if s.name == "vllm:admission_rejections_total"]
    assert all("engine" not in s.labels for s in rejections)
    async with client.get("/metrics") as answer:
        assert answer.headers["content-type"] == "text/plain; version=1.0.0; charset=utf-8"
        line = next(line for line in (await answer.text()).splitlines() if line.startswith("vllm:num_requests_running"))
        assert line == 'vllm:num_requests_running{engine="0",model_name="base"} 0.0'


async def test_only_the_page_with_the_slash_filters(client: aiohttp.ClientSession) -> None:
    query = "?name[]=vllm:num_requests_running&name[]=vllm:kv_cache_usage_perc"
    filtered = await samples(client, f"/metrics/{query}")
    assert sorted(sample.name for sample in filtered) == ["vllm:kv_cache_usage_perc", "vllm:num_requests_running"]
    assert len(await samples(client, f"/metrics{query}")) > 100


async def test_only_the_page_with_the_slash_compresses(replica: Replica) -> None:
    async with aiohttp.ClientSession(auto_decompress=False, headers={"accept-encoding": "gzip"}) as client:
        async with client.get(f"{replica.url}/metrics/") as answer:
            assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert answer.headers["content-encoding"] == "gzip"
            assert b"vllm:num_requests_running" in gzip.decompress(await answer.read())
        async with client.get(f"{replica.url}/metrics") as answer:
            assert "content-encoding" not in answer.headers


async def test_adapter_series_pile_up_and_the_newest_counts(client: aiohttp.ClientSession) -> None:
    async def series() -> dict[str, float]:
        found = await samples(client, f"{replica.url}/metrics")
        infos = [sample for sample in found if sample.name == "vllm:lora_requests_info"]
        for info in infos:
            assert info.labels["waiting_lora_adapters"] == info.labels["running_lora_adapters"]
            assert info.labels["max_lora"] == "1"
            assert "engine" not in info.labels
        return {info.labels["running_lora_adapters"]: info.value for info in infos}

    async with Replica(replace(FAST, max_loras=1)) as replica:
        assert await series() == {}, "there is none before the first step"
        url = f"{replica.url}/v1/chat/completions"
        async with client.post(url, json=ENDLESS | {"model": "lora-0"}) as running:
            await running.content.readany()
            async with client.post(url, json=ENDLESS | {"model": "lora-1"}) as deferred:
                await until(lambda: replica.engine.gauges().deferred == 1)
                steps = replica.engine.counters.steps
                await until(lambda: replica.engine.counters.steps > steps + 2)
                assert set(await series()) == {"lora-0"}, "who only waits is not shown"
                found = await samples(client, f"{replica.url}/metrics")
                assert value(found, "vllm:num_requests_waiting") == 1
                assert value(found, "vllm:num_requests_waiting_by_reason", reason="deferred") == 1
                assert value(found, "vllm:num_requests_waiting_by_reason", reason="capacity") == 0
                deferred.close()
            running.close()
        await replica.idle()
        await post(client, url, CHAT | {"model": "lora-1"})
        steps = replica.engine.counters.steps
        await post(client, url, CHAT)
        await until(lambda: replica.engine.counters.steps > steps)
        now = await series()
        assert set(now) == {"lora-0", "lora-1", ""}
        assert max(now, key=lambda names: now[names]) == ""


def test_adapter_series_are_bounded() -> None:
    metrics = ReplicaMetrics("base", 4, {"block_size": "16"})
    for number in range(2000):
        metrics.publish(Gauges(running_adapters=(f"lora-{number}",)), Counters())
    kept = [
        sample.labels["running_lora_adapters"]
        for family in metrics.registry.collect()
        if family.name == "vllm:lora_requests_info"
        for sample in family.samples
    ]
    assert len(kept) == 512
    assert kept[-1] == "lora-1999"
