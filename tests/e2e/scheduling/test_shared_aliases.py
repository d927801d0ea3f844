"""A name whose requests are shared by several models: what reaches the replicas, and what stays together."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from llmproxy.config import hash_of
from tests.e2e.proxies import FAST, HELLO, Answer, ProxyUnderTest, is_poll, serving

NEW = replace(FAST, model="new", adapters=())
CANARY = [{"name": "chat", "targets": {"base": 3, "new": 1}}]
ASKED = HELLO | {"model": "chat"}
RESPONSES = "/v1/responses"


def models_of(answers: list[Answer]) -> Counter[str]:
    assert {answer.status for answer in answers} == {200}
    return Counter(answer.json["model"] for answer in answers)


async def asked(proxy: ProxyUnderTest, times: int, **headers: str) -> list[Answer]:
    # With ids of their own, so that the numbers are the same in each run.
    given = ({"x-request-id": f"r{number}"} | headers for number in range(times))
    return [*await asyncio.gather(*(proxy.chat(ASKED, headers=one) for one in given))]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
async def test_models_share_the_requests_of_a_name(workers: int) -> None:
    async with serving(FAST, NEW, models=CANARY, workers=workers) as proxy:
        answers = await asked(proxy, 60)
        found = models_of(answers)
        assert set(found) == {"base", "new"}
        assert 5 <= found["new"] <= 25, "a quarter of 60, three standard deviations"
        for answer in answers:
            assert answer.json["model"] == ("base" if answer.backend == "b0" else "new")
        for replica, model in zip(proxy.replicas, ("base", "new"), strict=True):
            bodies = [json.loads(seen.body) for seen in replica.requests_seen if not is_poll(seen)]
            assert {body["model"] for body in bodies} == {model}
        assert models_of(await asked(proxy, 60)) == found, "the same ids get the same models"
        assert len(models_of(await asked(proxy, 12, **{"x-session-id": "one"}))) == 1, "a session stays together"
        assert [one["id"] for one in (await proxy.get("/v1/models")).json["data"]].count("chat") == 1
        # A model without a backend gets no requests.
        assert (await proxy.chat(HELLO | {"model": "none"})).status == 404


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
async def test_a_conversation_goes_on_with_the_model_that_began_it(workers: int) -> None:
    body: dict[str, Any] = {"model": "chat", "input": "Hello there, and more", "max_output_tokens": 4}
    async with serving(FAST, NEW, models=CANARY, workers=workers) as proxy:
        firsts = [await proxy.post(RESPONSES, body, headers={"x-request-id": f"r{number}"}) for number in range(12)]
        assert {first.backend for first in firsts} == {"b0", "b1"}
        for first in firsts:
            further = await proxy.post(RESPONSES, body | {"previous_response_id": first.json["id"]})
            assert (further.status, further.backend) == (200, first.backend)


async def test_tenant_may_use_an_allowed_alias_of_any_model() -> None:
    tenants = [{"name": "acme", "keys": [hash_of("acme")], "models": ["mine"]}]
    async with serving(FAST, models=[{"name": "*", "target": "base"}], tenants=tenants) as proxy:
        headers = {"authorization": "Bearer acme"}
        assert [(await proxy.chat(HELLO | {"model": name}, headers=headers)).status for name in ("mine", "base")] == [
            200,
            404,
        ]
