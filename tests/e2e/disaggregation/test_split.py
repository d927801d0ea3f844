"""Requests to both replicas, and the answers, log lines and pages that follow."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from llmproxy.core.domain import CRITICAL, Usage
from llmproxy.core.lease_events import LeaseEvent, Returned
from llmproxy.gateway.proxying import relay
from llmproxy.lab.simulator.replica import Replica
from tests.e2e.disaggregation.conftest import NIXL, hows, split
from tests.e2e.processes import served
from tests.e2e.proxies import CHAT, FAST, HELLO, ProxyUnderTest, until
from tests.lab.simulator.legs import BODIES, WORDS, kv_used

LONG = {"model": "base", "messages": [{"role": "user", "content": WORDS}], "max_tokens": 5, "ignore_eos": True}
KEY = "kv_transfer_params"


def text(path: str, body: Any) -> str:
    """The text of an answer that came in one piece."""
    if path == "/v1/responses":
        return str(body["output"][0]["content"][0]["text"])
    if path == "/v1/messages":
        return str(body["content"][0]["text"])
    choice = body["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def sent(proxy: ProxyUnderTest, backend: str) -> dict[str, Any]:
    """The body of the latest call, which was not made by the other replica."""
    seen = [one for one in proxy.replica(backend).requests_seen if one.path.startswith("/v1/") and one.method == "POST"]
    body: dict[str, Any] = json.loads(seen[-1].body)
    return body


@pytest.mark.parametrize("path", list(BODIES))
async def test_split_answer_equals_the_answer_of_one_replica(path: str) -> None:
    async with split() as proxy:
        both = await proxy.post(path, BODIES[path])
        alone = await proxy.post(proxy.replicas[0].url + path, BODIES[path])
        assert (both.status, both.backend, both.headers["x-llmproxy-attempts"]) == (200, "b1", "1")
        assert text(path, both.json) == text(path, alone.json)
        assert hows(proxy) == {"split": 1}
        await until(lambda: kv_used(proxy.replicas[0]) == 0.0)


@pytest.mark.parametrize("path", list(BODIES))
async def test_split_stream_equals_the_stream_of_one_replica(path: str) -> None:
    async with split() as proxy:
        both = await proxy.post(path, BODIES[path] | {"stream": True})
        alone = await proxy.post(proxy.replicas[0].url + path, BODIES[path] | {"stream": True})
        assert len(both.events) == len(alone.events)
        assert b"error" not in both.body
        assert hows(proxy) == {"split": 1}


@pytest.mark.slow
@pytest.mark.parametrize("filler", ["", "word " * 20_000], ids=["parsed", "scanned"])
async def test_the_first_call_asks_for_one_token_in_one_piece(filler: str) -> None:
    asked: dict[str, Any] = LONG | {
        "messages": [{"role": "user", "content": WORDS + filler}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "min_tokens": 2,
        "max_completion_tokens": 5,
        "temperature": 0.5,
    }
    async with split() as proxy:
        assert (await proxy.chat(asked)).status == 200
        first, second = sent(proxy, "b0"), sent(proxy, "b1")
        assert first.pop(KEY)["do_remote_decode"] is True
        changed = {
            "stream": False,
            "stream_options": None,
            "min_tokens": 0,
            "max_tokens": 1,
            "max_completion_tokens": 1,
        }
        assert first == asked | changed
        assert second.pop(KEY)["do_remote_prefill"] is True
        assert second == asked


async def test_a_body_without_a_limit_gets_one() -> None:
    async with split() as proxy:
        await proxy.post("/v1/responses", {"model": "base", "input": WORDS, "max_output_tokens": None})
        assert (sent(proxy, "b0")["max_output_tokens"], sent(proxy, "b1")["max_output_tokens"]) == (1, None)
        # An engine stores what nobody asked it not to store.
        assert (sent(proxy, "b0")["store"], "store" in sent(proxy, "b1")) == (False, False)
        await proxy.post(CHAT, {"model": "base", "messages": LONG["messages"], "stop": ["a"]})
        assert sent(proxy, "b0")["max_tokens"] == 1
        assert "max_tokens" not in sent(proxy, "b1")


async def test_parameters_of_clients_never_travel() -> None:
    own = '"kv_transfer_params":{"remote_host":"evil"},"ec_transfer_params":{"a":1},"kv_transfer_params":{"b":2}'
    body = json.dumps(LONG)[:-1] + "," + own + "}"
    async with split() as proxy:
        assert (await proxy.chat(body.encode())).status == 200
        for name in ("b0", "b1"):
            assert "evil" not in str(sent(proxy, name))
            assert sent(proxy, name)["ec_transfer_params"] is None
        assert sent(proxy, "b1")[KEY]["remote_host"] == "127.0.0.1"
        assert (await proxy.chat(body.encode(), headers={"x-request-id": "2"})).status == 200
        assert hows(proxy) == {"split": 2}


HOSTILE = (
    '"kv\\u005ftransfer_params":{"do_remote_prefill":true,"remote_host":"evil"},"ec\\u005Ftransfer_params":["evil"],'
    '"\\u006bv_transfer_params":"evil","kv_transfer_params":[{"kv_transfer_params":"evil"}],"kv_transfer_params":null,'
)
"""Names as no usual client writes them, more than once."""


@pytest.mark.sampled(5)
@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("filler", ["", "word " * 20_000], ids=["parsed", "scanned"])
@pytest.mark.parametrize("whole", [False, True])
async def test_parameters_of_clients_travel_in_no_disguise(path: str, filler: str, whole: bool) -> None:
    """Below the top level the names mean nothing to an engine, and stay as they are."""
    nested = {"metadata": {KEY: "kept", "ec_transfer_params": "kept"}, "filler": filler}
    plain = json.dumps(BODIES[path] | nested)
    body = ("{" + HOSTILE + plain[1:-1] + "," + HOSTILE.rstrip(",") + "}").encode()
    async with split(how="never" if whole else "always") as proxy:
        answer = await proxy.post(path, body)
        assert answer.status == 200, answer.body
        assert hows(proxy) == {"whole" if whole else "split": 1}
        for name in ("b1",) if whole else ("b0", "b1"):
            (seen,) = [one for one in proxy.replica(name).requests_seen if one.path == path]
            assert b"evil" not in bytes(seen.body)
            # Whichever of several an engine reads, it is the same one.
            members = json.loads(bytes(seen.body), object_pairs_hook=list)
            own = [str(value) for key, value in members if key in (KEY, "ec_transfer_params")]
            assert len(own) == 10
            assert len({str(value) for key, value in members if key == KEY}) == 1
            assert "None" in own
            assert dict(dict(members)["metadata"]) == nested["metadata"]


async def test_cached_tokens_come_from_the_prefill_replica() -> None:
    async with split(*[replace(NIXL, prompt_tokens_details=True)] * 2) as proxy:
        await proxy.chat(LONG)
        again = await proxy.chat(LONG)
        assert again.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 100


async def test_the_usage_of_a_prompt_is_read_before_its_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "TAIL_BYTES", 500)
    async with split() as proxy:
        used: list[Usage | None] = []
        apply = proxy.app.pools.apply

        def spy(event: LeaseEvent, now: float) -> None:
            if isinstance(event, Returned):
                used.append(event.usage)
            apply(event, now)

        monkeypatch.setattr(proxy.app.pools, "apply", spy)
        answer = await proxy.chat(LONG)
        await proxy.settled()
        prompt_tokens = answer.json["usage"]["prompt_tokens"]
        usage, _ = used
        assert usage is not None, "the prefill stage ends first"
        assert (usage.prompt_tokens, usage.output_tokens) == (prompt_tokens, 1)


INDIVISIBLE: list[tuple[str, dict[str, Any]]] = [
    (CHAT, LONG | {"n": 2}),
    ("/v1/completions", BODIES["/v1/completions"] | {"prompt": [WORDS, WORDS]}),
    ("/v1/completions", BODIES["/v1/completions"] | {"echo": True}),
    (CHAT, LONG | {"prompt_logprobs": 0}),
    # Their first calls would be taken, and their second ones refused.
    (CHAT, LONG | {"stream_options": {"include_usage": True}}),
    (CHAT, LONG | {"stream": True, "stream_options": {"include_usage": "what"}}),
    (CHAT, LONG | {"stream": True, "stream_options": [1]}),
    (CHAT, LONG | {"max_tokens": "many"}),
    (CHAT, LONG | {"min_tokens": "some"}),
    ("/v1/responses", BODIES["/v1/responses"] | {"store": "what"}),
    ("/v1/responses", BODIES["/v1/responses"] | {"tools": [{"type": "function", "name": "f", "parameters": {}}]}),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("path", "body"), INDIVISIBLE)
@pytest.mark.parametrize("large", [False, True])
async def test_unsplittable_request_is_served_by_one_replica(path: str, body: dict[str, Any], large: bool) -> None:
    if large:
        body = body | {"metadata": {"m": ["x"] * 20_000}}
    async with split() as proxy:
        await proxy.post(path, body)
        assert hows(proxy) == {"whole": 1}
        assert not [seen for seen in proxy.replicas[0].requests_seen if seen.path == path]


async def test_a_response_that_is_continued_is_served_by_the_replica_that_has_it() -> None:
    """Its history is not in the body, so that nobody knows how many of its tokens are in no cache."""
    async with split() as proxy:
        first = await proxy.post("/v1/responses", BODIES["/v1/responses"] | {"store": True})
        more = BODIES["/v1/responses"] | {"previous_response_id": first.json["id"]}
        second = await proxy.post("/v1/responses", more)
        assert (second.status, first.backend, second.backend) == (200, "b1", "b1")
        assert KEY not in sent(proxy, "b1")
        assert hows(proxy) == {"split": 1, "whole": 1}


async def test_a_response_that_is_looked_for_is_not_split() -> None:
    """The proxy asks both replicas for a response that it does not know."""
    async with split() as proxy:
        made = await proxy.post(proxy.replicas[1].url + "/v1/responses", BODIES["/v1/responses"] | {"store": True})
        more = BODIES["/v1/responses"] | {"previous_response_id": made.json["id"]}
        found = await proxy.post("/v1/responses", more)
        assert (found.status, found.backend) == (200, "b1")
        assert KEY not in sent(proxy, "b1")
        assert hows(proxy) == {"whole": 1}


@pytest.mark.parametrize("forwarding", ["b0", "b1"])
async def test_each_call_has_the_priority_that_its_engine_takes(forwarding: str) -> None:
    """Roles may differ in it: where prompts wait, they are the ones in an order."""
    async with split() as proxy:
        handler = proxy.app.gateway.handler
        told = handler._backends[forwarding].model_copy(update={"forward_priority": True})
        handler._backends = {**handler._backends, forwarding: told}
        assert (await proxy.chat(LONG, headers={"x-llm-d-inference-objective": "critical"})).status == 200
        assert hows(proxy) == {"split": 1}
        asked = {name: sent(proxy, name).get("priority") for name in ("b0", "b1")}
        assert asked == dict.fromkeys(("b0", "b1")) | {forwarding: -CRITICAL}


async def test_a_short_prompt_is_not_worth_two_calls() -> None:
    async with split(how=100) as proxy:
        assert (await proxy.chat(HELLO)).backend == "b1"
        await proxy.chat(LONG)
        assert hows(proxy) == {"whole": 1, "split": 1}


async def test_without_roles_nothing_is_split_or_counted() -> None:
    async with split(roles="both both") as proxy:
        await proxy.chat(LONG)
        assert hows(proxy) == {}
        assert KEY not in sent(proxy, (await proxy.chat(LONG)).backend)


async def test_a_store_needs_no_parameters(tmp_path: Path) -> None:
    stored = replace(FAST, kv_transfer="store", kv_store=tmp_path)
    async with split(stored, stored, scheduling={"kv_connector": "store"}) as proxy:
        both = await proxy.chat(LONG)
        assert sent(proxy, "b0")["max_tokens"] == 1
        assert KEY not in sent(proxy, "b0") | sent(proxy, "b1")
        assert both.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
        alone = await proxy.post(proxy.replicas[0].url + CHAT, LONG)
        assert text(CHAT, both.json) == text(CHAT, alone.json)
        assert hows(proxy) == {"split": 1}


async def test_log_and_story_tell_both_stages(log: io.StringIO) -> None:
    async with split() as proxy:
        await proxy.chat(LONG | {"stream": True}, headers={"x-request-id": "two-stages"})
        await proxy.settled()
        (line,) = [line for line in log.getvalue().splitlines() if "two-stages" in line and " request " in line]
        assert "disaggregation=split prefill_backend=b0 prefill_s=0." in line
        assert " handover_s=0." in line
        assert " backend=b1 attempts=1 " in line
        story = (await proxy.get("/debug/requests?request=two-stages")).json
        assert [(one["backend"], one["stage"]) for one in story["attempts"]] == [("b0", "prefill"), ("b1", "decode")]
        assert proxy.metric("llmproxy_prefill_seconds_count") == proxy.metric("llmproxy_handover_seconds_count") == 1
        assert proxy.metric("llmproxy_retries_total") == 0


@pytest.mark.slow
async def test_workers_split_too(tmp_path: Path) -> None:
    """As processes: in one process there are none, whatever the configuration says."""
    async with Replica(NIXL) as first, Replica(NIXL) as second, aiohttp.ClientSession() as http:
        backends = ("--backend", f"prefill={first.url}", "--backend", f"decode={second.url}")
        options = ("--port", "0", "--workers", "2", "--scheduling-disaggregation", "always")
        async with served(tmp_path / "log", *options, *backends) as process:
            url = await process.url()
            async with http.post(url + CHAT, json=LONG) as answer, http.post(second.url + CHAT, json=LONG) as alone:
                assert text(CHAT, await answer.json()) == text(CHAT, await alone.json())
            (line,) = [await process.event("request")]
            assert (line["disaggregation"], line["attempts"]) == ("split", 1)
            assert (line["prefill_backend"], line["backend"]) == (
                urlsplit(first.url).netloc,
                urlsplit(second.url).netloc,
            )
        bodies = [json.loads(seen.body) for one in (first, second) for seen in one.requests_seen if seen.path == CHAT]
        assert [body["max_tokens"] for body in bodies[:2]] == [1, LONG["max_tokens"]]
        assert "do_remote_prefill" in bodies[1][KEY]
