"""Names are learned from the backends: when they are known, when they are not known yet, and when they are gone."""

from __future__ import annotations

import io
from dataclasses import replace

from llmproxy.lab.simulator.replica import Replica
from tests.e2e.proxies import FAST, HELLO, ProxyUnderTest, serving, until

OTHER = replace(FAST, model="other", adapters=("lora-9",))
UNKNOWN = HELLO | {"model": "not-yet"}


def names(proxy: ProxyUnderTest) -> set[str]:
    return {card["id"] for card in proxy.app.pools.catalogue.models()}


async def everybody_down(proxy: ProxyUnderTest) -> None:
    await until(lambda: all(backend.health.down for backend in proxy.app.pools.backends.values()))


async def test_a_name_is_unknown_only_when_every_backend_was_read(port: int) -> None:
    async with serving(FAST, extra=[f"http://127.0.0.1:{port}"], wait=False) as proxy:
        await until(lambda: "base" in names(proxy) and not proxy.app.pools.backends["b0"].health.down)
        early = await proxy.chat(UNKNOWN)
        assert early.status == 503
        assert int(early.headers["retry-after"]) >= 1
        assert "not known yet" in early.json["error"]["message"]
        assert (await proxy.chat()).status == 200, "known names are served"
        async with Replica(replace(FAST, adapters=("not-yet",)), port=port):
            await until(lambda: "not-yet" in names(proxy) and not proxy.app.pools.backends["b1"].health.down)
            answer = await proxy.chat(UNKNOWN)
            assert (answer.status, answer.backend) == (200, "b1")
            late = await proxy.chat(HELLO | {"model": "never"})
            assert (late.status, late.json["error"]["type"]) == (404, "NotFoundError")
        assert proxy.outcomes() == {"rejected_no_backends": 1, "completed": 2, "unknown_model": 1}


async def test_names_are_remembered_while_their_backends_are_down() -> None:
    async with serving(FAST, OTHER) as proxy:
        proxy.replicas[1].faults.set("refuse")
        await until(lambda: proxy.app.pools.backends["b1"].health.down)
        for name in ("other", "lora-9"):
            answer = await proxy.chat(HELLO | {"model": name})
            assert (answer.status, answer.json["error"]["type"]) == (503, "ServiceUnavailableError")
            assert int(answer.headers["retry-after"]) >= 1
        assert (await proxy.chat(HELLO | {"model": "nope"})).status == 404
        assert (await proxy.chat()).status == 200
        assert {"other", "lora-9"} <= names(proxy)
        proxy.replicas[0].faults.set("refuse")
        await everybody_down(proxy)
        assert (await proxy.chat()).status == 503


async def test_the_log_names_the_target_of_an_alias_only(log: io.StringIO) -> None:
    async with serving(FAST, models=[{"name": "nick", "target": "base"}]) as proxy:
        for model in ("base", "nick"):
            assert (await proxy.chat(HELLO | {"model": model})).status == 200
    lines = [line for line in log.getvalue().splitlines() if "outcome=completed" in line]
    assert [" target=base" in line for line in lines] == [False, True]
