"""The files of the page of recipes keep its promises, with simulated replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmproxy.config import load, warnings_of
from tests import ROOT
from tests.docs.pages import blocks
from tests.e2e.backends.test_adapters import adapters
from tests.e2e.proxies import ENDLESS, FAST, HELLO, Answer, ProxyUnderTest, serving, until
from tests.e2e.scheduling.test_waiting_room import OBJECTIVE

FILES = {block.title: block.text for block in blocks(ROOT / "docs/how-to/recipes.md") if block.title}
QWEN, CODER, SMALL = "Qwen/Qwen3-8B", "Qwen/Qwen3-Coder-30B-A3B-Instruct", "Qwen/Qwen2.5-Coder-1.5B"
SEATS = 2


@asynccontextmanager
async def recipe(title: str, *models: str) -> AsyncIterator[ProxyUnderTest]:
    """Run a proxy with a file of the page, and a simulated replica of these models for each of its backends."""
    config: dict[str, Any] = yaml.safe_load(FILES[title])
    assert len(config.pop("backends")) == len(models)
    options = [replace(FAST, model=model, adapters=()) for model in models]
    async with serving(*options, fixed_limit=SEATS, **config) as proxy:
        yield proxy


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-of-{name}"}


@pytest.mark.parametrize("title", FILES)
def test_files_are_accepted_without_a_warning(title: str, tmp_path: Path) -> None:
    file = tmp_path / title
    file.write_text(FILES[title])
    assert warnings_of(file, load(file)) == []


async def test_chat_goes_before_batches() -> None:
    async with recipe("chat-and-batch.yaml", *[QWEN] * 4) as proxy:
        body = ENDLESS | {"model": QWEN}
        async with flood(proxy.waiting(body, **{OBJECTIVE: "sheddable"}) for _ in range(5 * SEATS)):
            await until(lambda: proxy.queued > 0)
            assert (await proxy.chat(HELLO | {"model": "chat"})).status == 200
            assert proxy.queued > 0


async def test_a_person_does_not_wait_for_the_agents_of_another() -> None:
    async with recipe("team.yaml", CODER, CODER) as proxy:
        body = {"model": "claude-qwen", "messages": HELLO["messages"], "max_tokens": 30}

        def asked(person: str) -> asyncio.Task[Answer]:
            return asyncio.create_task(proxy.post("/v1/messages", body, headers=key(person)))

        async with flood(asked("ana") for _ in range(40)) as agents:
            await until(lambda: proxy.queued > 2 * SEATS)
            assert (await asked("ben")).status == 200
            assert not all(task.done() for task in agents)
        usage = (await proxy.get("/v1/usage", headers=key("ben"))).json
        assert (usage["tenant"], usage["today"]["requests"]) == ("ben", 1)


async def test_each_adapter_is_on_two_replicas_and_comes_back() -> None:
    async with recipe("adapters.yaml", *[QWEN] * 3) as proxy:
        for name in ("legal", "sql", "support"):
            change = {"lora_name": name, "lora_path": f"/adapters/{name}", "replicas": 2}
            assert (await proxy.post("/v1/load_lora_adapter", change, headers=key("admin"))).json["ok"] == 2
        first = await proxy.chat(HELLO | {"model": "sql"})
        assert first.status == 200
        # Each of the three adapters is on two replicas, once all replicas have been polled.
        await until(lambda: sum(len(adapters(proxy, name)) for name in proxy.app.pools.backends) == 6)
        before, replica = set(adapters(proxy, first.backend)), proxy.replica(first.backend)
        assert "sql" in before
        replica.requests_seen.clear()
        await replica.restart()
        await until(lambda: sum("load_lora" in one.path for one in replica.requests_seen) == len(before))
        await until(lambda: set(adapters(proxy, first.backend)) == before)


async def test_requests_wait_while_weights_are_updated() -> None:
    async with recipe("rollouts.yaml", QWEN, QWEN) as proxy:
        for replica in proxy.replicas:
            replica.faults.set("refuse")
        await until(lambda: all(backend.health.down for backend in proxy.app.pools.backends.values()))
        samples = [proxy.waiting(HELLO | {"model": QWEN}) for _ in range(10)]
        await until(lambda: proxy.queued == len(samples))
        for replica in proxy.replicas:
            await replica.restart()
        assert [(await sample).status for sample in samples] == [200] * len(samples)


async def test_each_model_has_its_own_queue() -> None:
    async with recipe("two-models.yaml", QWEN, SMALL) as proxy:
        listed = {card["id"] for card in (await proxy.get("/v1/models")).json["data"]}
        assert listed == {QWEN, SMALL, "chat", "autocomplete"}
        async with flood(proxy.waiting(ENDLESS | {"model": "chat"}) for _ in range(2 * SEATS)):
            await until(lambda: proxy.queued > 0)
            asked = {"model": "autocomplete", "prompt": "def main(", "max_tokens": 4}
            assert (await proxy.post("/v1/completions", asked)).status == 200
            assert proxy.queued > 0
        pools = (await proxy.get("/scale")).json["pools"]
        assert {QWEN, SMALL} == {pool["pool"] for pool in pools}


@asynccontextmanager
async def flood(tasks: Iterable[asyncio.Task[Any]]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Requests that are cancelled at the end, as of clients that leave."""
    started = list(tasks)
    try:
        yield started
    finally:
        for task in started:
            task.cancel()
        await asyncio.gather(*started, return_exceptions=True)
