"""Where prompts are priced by their prefix, a conversation stays with the replica that has it cached."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from llmproxy.core.domain import Grant, Usage
from llmproxy.gateway.proxying.answers import Answers, CapturedAnswer
from llmproxy.lab.simulator.replica import ReplicaOptions
from tests.e2e.proxies import CHAT, ENDLESS, FAST, HELLO, REAL, Answer, ProxyUnderTest, decisions, serving, until
from tests.e2e.scripted import serving_script, whole
from tests.upstream.raw_server import Peer

KINDS = ("expected", "cached", "both")
# About 3,000 tokens: `REAL` computes them in 55 ms, far above a tie.
LONG = "All that follows was said before. " * 360
OTHER = "Nobody has said anything of this. " * 360


@asynccontextmanager
async def serving_by_cost(
    path: Path, placement: str = "cost", replica: ReplicaOptions = FAST
) -> AsyncIterator[tuple[ProxyUnderTest, dict[str, dict[str, Any]]]]:
    """A proxy of two replicas, and its decision log by request id, which is filled when the proxy closes."""
    log: dict[str, dict[str, Any]] = {}
    # Answers are kept for continuations too.
    config: dict[str, Any] = {"scheduling": {"placement": placement}, "retry": {"continue": "off"}}
    async with serving(replica, replica, decision_log=str(path), **config) as proxy:
        yield proxy, log
    log.update(decisions(path))


def said(*texts: str, **more: Any) -> dict[str, Any]:
    """A turn of a conversation in which user and assistant said `texts`, one after the other."""
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    return HELLO | {"messages": messages} | more


async def ask(proxy: ProxyUnderTest, name: str, body: dict[str, Any], path: str = CHAT) -> Answer:
    answer = await proxy.post(path, body, headers={"x-request-id": name})
    assert answer.status == 200
    return answer


def spoken(answer: Answer) -> str:
    """The text of an answer, streamed or not."""
    if answer.body.startswith(b"{"):
        return str(answer.json["choices"][0]["message"]["content"])
    chunks = [json.loads(event[6:]) for event in answer.events if event.startswith(b"data: {")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def cached_tokens(answer: Answer) -> int:
    found: int = (answer.json["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return found


async def test_the_turns_of_a_conversation_go_where_it_is_cached(tmp_path: Path) -> None:
    async with serving_by_cost(tmp_path / "log", replica=REAL) as (proxy, log):
        first = await ask(proxy, "first", said(LONG))
        second = await ask(proxy, "second", said(LONG, "Yes.", "And then?"))
        endless = ENDLESS | {"messages": said(LONG, "Yes.", "Go on!")["messages"], "max_tokens": 20_000}
        # A turn of its own makes the replica the busier one: the conversation is not to mind, and another one is.
        async with proxy.stream(endless) as turn:
            await turn.content.readany()
            assert turn.headers["x-llmproxy-backend"] == first.backend
            other = await ask(proxy, "other", said(OTHER))
            third = await ask(proxy, "third", said(LONG, "Yes.", "And then?", "Nothing.", "Sure?"))
        assert first.backend == second.backend == third.backend != other.backend
        assert cached_tokens(first) == cached_tokens(other) == 0
        assert min(cached_tokens(second), cached_tokens(third)) > 2000
    prefill_s = {name: log[name]["placement"]["prefill"] for name in ("first", "second", "third", "other")}
    assert max(prefill_s["second"], prefill_s["third"]) < 0.1 * min(prefill_s["first"], prefill_s["other"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_known_to_be_cached_where_it_was_given(tmp_path: Path, stream: bool) -> None:
    async with serving_by_cost(tmp_path / "log") as (proxy, _):
        first = await ask(proxy, "first", said(LONG, max_tokens=2_000, ignore_eos=True, stream=stream))
        await until(lambda: proxy.app.handler.captured_bytes == 0)
        second = await ask(proxy, "second", said(LONG, spoken(first), "And then?"))
        assert second.backend == first.backend
        expected, cached, both = (proxy.metric("llmproxy_prefix_tokens_total", kind=kind) for kind in KINDS)
        # The prompt alone has 3,000 tokens.
        assert cached == cached_tokens(second) > 5_000
        assert expected == pytest.approx(cached, rel=0.05)
        assert both == min(expected, cached)


async def test_encoded_answer_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    zipped = whole(b"\x1f\x8b...", extra=b"content-encoding: gzip\r\n")
    sizes: list[int] = []

    def finish(answers: Answers, captured: CapturedAnswer, _: Grant | None) -> None:
        sizes.append(answers.captured_bytes)
        captured.drop()

    async def script(peer: Peer, request: bytes) -> None:
        await peer.send(zipped if b"x-hop: zips" in request.lower() else whole(b'{"x":1}'))

    monkeypatch.setattr(Answers, "finish", finish)
    async with serving_script(script, scheduling={"placement": "cost"}) as (proxy, _):
        for hop in ("zips", "does not"):
            headers = {"x-hop": hop}
            async with proxy.http.post(
                proxy.url + CHAT, json=HELLO, headers=headers, auto_decompress=False
            ) as response:
                await response.read()
            await proxy.settled()
    assert sizes == [0, 7]


@pytest.mark.parametrize(("placement", "keeps"), [("cost", True), ("least_request", False)])
async def test_answers_are_kept_for_placements_that_read_them(tmp_path: Path, placement: str, keeps: bool) -> None:
    async with serving_by_cost(tmp_path / "log", placement) as (proxy, _), proxy.stream(ENDLESS) as turn:
        await turn.content.readany()
        assert (proxy.app.handler.captured_bytes > 0) is keeps


@pytest.mark.parametrize("change", [{"model": "lora-0"}, {"cache_salt": "mine"}])
async def test_adapters_and_salts_share_no_prefix(tmp_path: Path, change: dict[str, str]) -> None:
    async with serving_by_cost(tmp_path / "log", replica=REAL) as (proxy, log):
        await ask(proxy, "plain", said(LONG))
        changed = await ask(proxy, "changed", said(LONG, **change))
        again = await ask(proxy, "again", said(LONG, **change))
        assert (cached_tokens(changed), again.backend) == (0, changed.backend)
        assert cached_tokens(again) > 2000
    prefill_s = [log[name]["placement"]["prefill"] for name in ("plain", "changed", "again")]
    assert 10 * prefill_s[2] < min(prefill_s[:2])


async def test_a_prompt_that_was_only_counted_is_cached_nowhere(tmp_path: Path) -> None:
    async with serving_by_cost(tmp_path / "log", replica=REAL) as (proxy, log):
        await ask(proxy, "counted", said(LONG), "/v1/messages/count_tokens")
        await ask(proxy, "first", said(LONG), "/v1/messages")
        await ask(proxy, "second", said(LONG), "/v1/messages")
    counted, first, second = (log[name]["placement"]["prefill"] for name in ("counted", "first", "second"))
    # To count computes no prompt, and is no work for an engine.
    assert counted < second < first / 10


async def test_token_ids_are_counted_as_they_are(tmp_path: Path) -> None:
    prompt = {"model": "base", "max_tokens": 4, "prompt": list(range(1000, 1000 + 128 * 8 + 1))}
    async with serving_by_cost(tmp_path / "log", replica=REAL) as (proxy, log):
        # Bytes per token of texts say nothing of token ids.
        proxy.app.pools.estimator.learn("base", 1000, 1, Usage(100, 4))
        await ask(proxy, "first", prompt, "/v1/completions")
        await ask(proxy, "second", prompt, "/v1/completions")
    first, second = (log[name]["placement"]["prefill"] for name in ("first", "second"))
    # Eight blocks of 128 ids are expected to be cached, and the last id is not.
    assert second == pytest.approx(first / (128 * 8 + 1), abs=1e-4)


@pytest.mark.parametrize("placement", ["least_request", "session"])
async def test_prompts_are_hashed_only_for_placements_that_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    monkeypatch.delattr("llmproxy.gateway.request.body_reader.prompt_chain")
    async with serving_by_cost(tmp_path / "log", placement) as (proxy, _):
        await ask(proxy, "first", said(LONG))


@pytest.mark.parametrize("stream", [False, True])
async def test_two_runs_of_an_agent_meet_at_one_replica(tmp_path: Path, stream: bool) -> None:
    """77 KB of system behind a first block that is another in each run, which the engine drops."""

    def run(number: int, prompt: str) -> dict[str, Any]:
        header = f"x-anthropic-billing-header: cc_version=2.1.7.{number:03x}; cc_entrypoint=cli; cch={number:05x};"
        system = [{"type": "text", "text": text} for text in (header, "You are a coding agent.", prompt * 7)]
        return said(f"Do {number}.", system=system, stream=stream)

    prompts = [LONG, OTHER]
    async with serving_by_cost(tmp_path / "log") as (proxy, log):
        backends = [(await ask(proxy, f"run-{n}", run(n, prompts[n % 2]), "/v1/messages")).backend for n in range(2)]
        for n in range(2, 8):
            again = await ask(proxy, f"run-{n}", run(n, prompts[n // 2 % 2]), "/v1/messages")
            assert again.backend == backends[n // 2 % 2]
    for n in range(2, 8):
        found = log[f"run-{n}"]
        assert found["cached_tokens"] > 20_000
        assert found["predicted"]["cached_tokens"] == pytest.approx(found["cached_tokens"], rel=0.05)
