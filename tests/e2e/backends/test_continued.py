"""A stream whose replica fails goes on at another replica, and its client reads one answer."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from llmproxy.core.domain import Outcome
from llmproxy.observe.exit import RequestExit
from tests.e2e.proxies import CHAT, FAST, ProxyUnderTest, all_of, serving, until
from tests.e2e.scripted import STREAM_HEAD, breaking, chunk, scripted
from tests.numbered import fault_in

NUMBERED = replace(FAST, text="numbered")
COMPLETIONS = "/v1/completions"
TOKENS = 60
LIMIT = {
    "model": "base",
    "stream": True,
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "stream_options": {"include_usage": True},
}
CHAT_BODY = LIMIT | {"messages": [{"role": "user", "content": "Count, please: é"}]}
TEXT_BODY = LIMIT | {"prompt": "Count, please: é"}
IDS_BODY = TEXT_BODY | {"return_token_ids": True}
WHOLE = {"stream": False, "stream_options": None}
REQUESTS_MAX = 50
TURNS: dict[str, Any] = {"scheduling": {"placement": "round_robin"}}
"""Requests take turns. By price, all of them might go to one replica, and none would meet the fault of the other."""
WAYS = {"chat": (CHAT, CHAT_BODY), "text": (COMPLETIONS, TEXT_BODY), "ids": (COMPLETIONS, IDS_BODY)}


class Read:
    """A stream as its client reads it."""

    def __init__(self, events: list[bytes]) -> None:
        self.comments = [event for event in events if event.startswith(b":")]
        lines = [event[6:] for event in events if event.startswith(b"data: ")]
        self.done = lines.count(b"[DONE]")
        self.events: list[Any] = [json.loads(line) for line in lines if line != b"[DONE]"]
        self.errors = [event for event in self.events if "error" in event]
        choices = [choice for event in self.events for choice in event.get("choices", ())]
        self.text = "".join(choice.get("text", choice.get("delta", {}).get("content", "")) or "" for choice in choices)
        self.roles = sum("role" in choice.get("delta", ()) for choice in choices)
        self.ends = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
        self.ids = {event["id"] for event in self.events if "id" in event}
        self.usage = [event["usage"] for event in self.events if event.get("usage")]


async def read(proxy: ProxyUnderTest, path: str, body: object, **headers: str) -> Read:
    async with proxy.stream(body, path, **headers) as answer:
        assert answer.status == 200
        return Read((await all_of(answer)).split(b"\n\n"))


def tokens(usage: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    return [(one["prompt_tokens"], one["completion_tokens"], one["total_tokens"]) for one in usage]


async def read_broken(
    proxy: ProxyUnderTest, path: str, body: object, fault: str, number: int = 0, **options: Any
) -> Read:
    """Reads streams until one of them met the fault, which only one replica has."""
    faults = proxy.replicas[number].faults
    faults.set(fault, times=1, **options)
    for _ in range(REQUESTS_MAX):
        found = await read(proxy, path, body)
        if faults.kind is None:
            return found
    raise AssertionError(f"none of {REQUESTS_MAX} requests met the fault")


def check(found: Read, undisturbed: Read) -> None:
    """Both streams look alike, although one broke."""
    assert fault_in(found.text) is None
    assert found.text == undisturbed.text
    assert found.errors == []
    assert (found.done, found.ends, found.roles) == (1, undisturbed.ends, undisturbed.roles)
    assert len(found.ids) == 1
    assert tokens(found.usage) == tokens(undisturbed.usage)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("after_bytes", [0, 250, 700, 2000, 2111, 7003])
async def test_a_reset_is_not_seen(way: str, after_bytes: int) -> None:
    path, body = WAYS[way]
    async with serving(NUMBERED, NUMBERED, **TURNS) as proxy:
        undisturbed = await read(proxy, path, body)
        check(await read_broken(proxy, path, body, "reset", after_bytes=after_bytes), undisturbed)
        await proxy.settled()
        assert set(proxy.outcomes()) == {"completed"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fault", ["engine_dead", "refuse", "hang", pytest.param("frozen", marks=pytest.mark.slow)])
async def test_a_replica_that_fails_is_not_seen(way: str, fault: str) -> None:
    path, body = WAYS[way]
    async with serving(NUMBERED, NUMBERED, timeouts={"stall_s": 3.0, "first_byte_s": 5.0}) as proxy:
        undisturbed = await read(proxy, path, body)
        reading = [asyncio.create_task(read(proxy, path, body)) for _ in range(6)]
        await until(lambda: all(replica.engine.busy for replica in proxy.replicas))
        proxy.replicas[0].faults.set(fault)
        for found in await asyncio.gather(*reading):
            check(found, undisturbed)
        if fault == "frozen":
            proxy.replicas[0].faults.clear()
        await proxy.settled()
        assert set(proxy.outcomes()) == {"completed"}


@pytest.mark.parametrize(
    "member",
    [{"response_format": {"type": "json_object"}}, {"logprobs": True}, {"n": 2}, {"seed": 1}, {"new_member": 1}],
)
async def test_an_answer_that_must_not_go_on_ends_with_one_error(member: dict[str, Any]) -> None:
    async with serving(NUMBERED, NUMBERED, **TURNS) as proxy:
        found = await read_broken(proxy, CHAT, CHAT_BODY | member, "reset", after_bytes=2000)
        assert len(found.errors) == 1
        assert "The stream broke" in found.errors[0]["error"]["message"]
        await proxy.settled()
        assert proxy.outcomes()["broken_stream"] == 1


async def test_off_ends_the_stream_with_an_error() -> None:
    async with serving(NUMBERED, NUMBERED, **TURNS, retry={"continue": "off"}) as proxy:
        found = await read_broken(proxy, CHAT, CHAT_BODY, "reset", after_tokens=8)
        assert len(found.errors) == 1
        await proxy.settled()
        assert proxy.outcomes()["broken_stream"] == 1


@pytest.mark.parametrize("continues", ["safe", "off"])
@pytest.mark.parametrize(
    ("fault", "outcome"), [("reset", Outcome.BROKEN_STREAM), ("stream_error", Outcome.UPSTREAM_STATUS)]
)
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("messages", {"messages": [{"role": "user", "content": "Count, please"}], "max_tokens": TOKENS}),
        ("responses", {"input": "Count, please", "max_output_tokens": TOKENS}),
    ],
)
async def test_the_record_says_why_other_kinds_of_streams_end(
    kind: str, body: dict[str, Any], fault: str, outcome: Outcome, continues: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[RequestExit] = []
    monkeypatch.setattr("llmproxy.gateway.proxying.handler.log_exit", ended.append)
    async with serving(NUMBERED, retry={"continue": continues}) as proxy:
        proxy.replicas[0].faults.set(fault, after_tokens=8)
        async with proxy.stream(body | {"model": "base", "stream": True}, f"/v1/{kind}") as answer:
            assert b"error" in await all_of(answer)
        await proxy.settled()
        assert ended[0].outcome is outcome
        why = f"answers of the kind `{kind}` are not continued"
        assert ended[0].not_continued == (None if continues == "off" else why)


async def test_a_continued_stream_is_counted_once_with_its_first_byte() -> None:
    async with serving(NUMBERED, NUMBERED, **TURNS, timeouts={"stall_s": 1.0}) as proxy:
        await read_broken(proxy, CHAT, CHAT_BODY, "silent", after_tokens=8)
        await proxy.settled()
        assert proxy.metric("llmproxy_continued_streams_total") == 1
        assert proxy.metric("llmproxy_retries_total") == 1
        # The client had its first token before the pause.
        assert proxy.metric("llmproxy_time_to_first_token_seconds_sum") < 1.0
        assert proxy.metric("llmproxy_inter_chunk_seconds_sum", gap="max") >= 1.0


async def test_always_continues_with_penalties() -> None:
    body = CHAT_BODY | {"presence_penalty": 0.5}
    async with serving(NUMBERED, NUMBERED, **TURNS, retry={"continue": "always"}) as proxy:
        undisturbed = await read(proxy, CHAT, body)
        check(await read_broken(proxy, CHAT, body, "reset", after_bytes=2000), undisturbed)


@pytest.mark.parametrize("limit", [1, 7, 8, 9])
async def test_the_limit_of_tokens_holds_for_the_whole_answer(limit: int) -> None:
    body = CHAT_BODY | {"max_tokens": limit}
    async with serving(NUMBERED, NUMBERED, **TURNS) as proxy:
        undisturbed = await read(proxy, CHAT, body)
        assert undisturbed.usage[0]["completion_tokens"] == limit
        check(await read_broken(proxy, CHAT, body, "reset", after_tokens=min(8, limit)), undisturbed)


async def test_an_answer_in_one_piece_that_broke_is_repeated_once() -> None:
    body = CHAT_BODY | WHOLE
    async with serving(NUMBERED, NUMBERED) as proxy:
        undisturbed = (await proxy.chat(body)).json
        proxy.replicas[0].faults.set("reset", after_bytes=100, times=1)
        while proxy.replicas[0].faults.kind is not None:
            answer = await proxy.chat(body)
        assert answer.json["choices"][0]["message"] == undisturbed["choices"][0]["message"]
        assert answer.headers["x-llmproxy-attempts"] == "2"
        await proxy.settled()
        assert set(proxy.outcomes()) == {"completed"}


@pytest.mark.parametrize("way", WAYS)
async def test_answers_that_an_engine_aborts_before_it_stops_go_on(way: str) -> None:
    path, body = WAYS[way]
    async with serving(NUMBERED, NUMBERED) as proxy:
        undisturbed = await read(proxy, path, body)
        reading = [asyncio.create_task(read(proxy, path, body)) for _ in range(4)]
        plain = [asyncio.create_task(proxy.post(path, body | WHOLE)) for _ in range(4)]
        await until(lambda: all(replica.in_flight == 4 for replica in proxy.replicas))
        proxy.replicas[0].faults.set("abort")
        for found in await asyncio.gather(*reading):
            check(found, undisturbed)
        for answer in await asyncio.gather(*plain):
            assert answer.json["choices"][0]["finish_reason"] == undisturbed.ends[0]
        await proxy.settled()
        assert set(proxy.outcomes()) == {"completed"}


async def test_an_aborted_answer_is_passed_on_if_there_is_no_other_replica() -> None:
    async with serving(NUMBERED) as proxy:
        asked = asyncio.create_task(proxy.chat(CHAT_BODY | WHOLE))
        await until(lambda: proxy.replicas[0].engine.counters.generation > 5)
        proxy.replicas[0].faults.set("abort")
        answer = await asked
        assert (answer.status, answer.json["choices"][0]["finish_reason"]) == (200, "abort")
        await proxy.settled()
        assert proxy.outcomes() == {"upstream_status": 1}


GZIP = STREAM_HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n")
JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 999999\r\n\r\n"


@pytest.mark.parametrize("pieces", [(GZIP, chunk(b"\x1f\x8b\x08")), (JSON, b"{" + b" " * (128 << 10))])
async def test_an_answer_that_cannot_be_read_is_not_continued(pieces: tuple[bytes, ...]) -> None:
    async with (
        scripted(breaking(*pieces)) as first,
        scripted(breaking(*pieces)) as second,
        serving(extra=[first.url, second.url]) as proxy,
    ):
        with pytest.raises(aiohttp.ClientPayloadError):
            await proxy.chat(CHAT_BODY)
        await proxy.settled()
        assert proxy.outcomes() == {"broken_stream": 1}
        assert len(first.requests) + len(second.requests) == 1


async def test_a_stream_that_no_other_replica_can_continue_is_not_counted() -> None:
    async with serving(NUMBERED) as proxy:
        found = await read_broken(proxy, CHAT, CHAT_BODY, "reset", after_bytes=2000)
        assert len(found.errors) == 1
        await proxy.settled()
        assert proxy.metric("llmproxy_continued_streams_total") == 0


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
async def test_a_reset_after_any_token_is_not_seen(way: str) -> None:
    path, body = WAYS[way]
    async with serving(NUMBERED, NUMBERED, **TURNS) as proxy:
        undisturbed = await read(proxy, path, body | {"max_tokens": 22})
        for number in range(1, 22):
            # In turn, because a replica that fails more often than the other is ejected.
            found = await read_broken(proxy, path, body | {"max_tokens": 22}, "reset", number % 2, after_tokens=number)
            assert (found.text, found.ends) == (undisturbed.text, undisturbed.ends)
            assert found.usage[0]["completion_tokens"] == 22


@pytest.mark.slow
async def test_a_frozen_replica_keeps_the_streams_that_cannot_go_on_elsewhere() -> None:
    body = CHAT_BODY | {"max_tokens": 330}
    settings: dict[str, Any] = {"scheduling": {"placement": "round_robin"}}
    async with (
        serving(*[replace(NUMBERED, speed=0.2)] * 2, **settings) as proxy,
        # An endless stream shows that the other replica works.
        proxy.stream(),
        proxy.stream(body) as moves,
        proxy.stream(),
        proxy.stream(body | {"response_format": {"type": "json_object"}}) as stays,
    ):
        name = stays.headers["x-llmproxy-backend"]
        assert moves.headers["x-llmproxy-backend"] == name
        proxy.replica(name).faults.set("frozen")
        moved = Read((await all_of(moves)).split(b"\n\n"))
        assert proxy.replica(name).in_flight == 1
        proxy.replica(name).faults.clear()
        stayed = Read((await all_of(stays)).split(b"\n\n"))
        for found, comments in ((moved, 1), (stayed, 0)):
            assert (found.errors, found.ends, len(found.comments)) == ([], ["length"], comments)
            assert fault_in(found.text) is None


@pytest.mark.slow
async def test_the_rest_of_a_stream_waits_for_a_second_replica_that_hangs() -> None:
    settings: dict[str, Any] = {
        "scheduling": {"placement": "round_robin"},
        "health": {"hung_s": 0.5, "ejected_ratio_max": 1.0},
    }
    body = CHAT_BODY | {"max_tokens": 330}
    async with (
        serving(*[replace(NUMBERED, speed=0.2)] * 3, **settings) as proxy,
        proxy.stream() as works,
        proxy.stream(body) as answer,
    ):
        first = answer.headers["x-llmproxy-backend"]
        [second] = {"b0", "b1", "b2"} - {works.headers["x-llmproxy-backend"], first}
        for name in (first, second):
            proxy.replica(name).faults.set("frozen")
        await until(lambda: proxy.app.pools.backends[second].health.ejected)
        await asyncio.sleep(0.1)
        proxy.replica(second).faults.clear()
        found = Read((await all_of(answer)).split(b"\n\n"))
        assert (found.errors, found.ends, len(found.comments), fault_in(found.text)) == ([], ["length"], 1, None)


@pytest.mark.parametrize(("fault", "planned"), [("hang", True), ("refuse", False), ("refuse", True)])
async def test_a_stream_goes_on_after_each_planned_end(fault: str, planned: bool) -> None:
    """A closed port with open connections, or a drain before the reset, shows that the end is planned."""
    async with serving(*[replace(NUMBERED, speed=0.1)] * 3) as proxy, proxy.stream(CHAT_BODY) as answer:
        left = {"b0", "b1", "b2"}

        def serves() -> set[str]:
            return {name for name in left if proxy.replica(name).engine.counters.generation > 5}

        for _ in range(2):
            await until(serves)
            [name] = serves()
            if planned and fault == "refuse":
                proxy.app.registry.drain(name)
                await asyncio.sleep(0)
            proxy.replica(name).faults.set(fault)
            left -= {name}
        found = Read((await all_of(answer)).split(b"\n\n"))
        await proxy.settled()
        assert set(proxy.outcomes()) == {"completed" if planned else "broken_stream"}
        assert len(found.errors) == (not planned)
        assert fault_in(found.text) is None
