"""`/v1/responses` and `/v1/messages`: events and bodies as they were recorded from a real vLLM 0.32."""

from __future__ import annotations

import json
import re
from typing import Any

import aiohttp

from tests.lab.simulator.conftest import CHAT, chunks_of, post
from tests.lab.simulator.test_replica import keys


async def test_responses_have_events_from_acceptance_on_and_can_be_fetched(client: aiohttp.ClientSession) -> None:
    body = {"input": "Hello", "max_output_tokens": 2, "stream": True}
    async with client.post("/v1/responses", json=body) as answer:
        chunks = await chunks_of(answer)
    names = [chunk.split(b"\n")[0].removeprefix(b"event: response.").decode() for chunk in chunks]
    assert names == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    events = [json.loads(chunk.split(b"data: ")[1]) for chunk in chunks]
    assert [event["sequence_number"] for event in events] == list(range(10))
    assert keys(events[4]) == [
        *("content_index", "delta", "item_id", "logprobs", "output_index", "sequence_number", "type")
    ]
    final = events[-1]["response"]
    assert (final["status"], final["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert final["usage"]["total_tokens"] == final["usage"]["input_tokens"] + 2
    async with client.get(f"/v1/responses/{final['id']}") as kept:
        assert await kept.json() == final
    status, answer_body = await post(client, f"/v1/responses/{final['id']}/cancel", {})
    assert (status, answer_body["error"]["message"]) == (400, "Cannot cancel a synchronous response.")


async def test_response_id_is_the_request_id_and_store_false_is_kept(client: aiohttp.ClientSession) -> None:
    url, body = "/v1/responses", {"input": "Hello", "max_output_tokens": 2}
    async with client.post(url, json=body, headers={"x-request-id": "mine"}) as answer:
        assert re.fullmatch("resp_[0-9a-f]{16}", (await answer.json())["id"])
    named = body | {"request_id": "resp_mine"}
    for store in (False, None):
        assert (await post(client, url, named | {"store": store}))[1]["id"] == "resp_mine"
        async with client.get(f"{url}/resp_mine") as kept:
            assert kept.status == 404
    for output in (1, 2):
        _, made = await post(client, url, named | {"max_output_tokens": output})
        async with client.get(f"{url}/resp_mine") as kept:
            assert (made["id"], await kept.json()) == ("resp_mine", made), "the last of an id is the one that is kept"
    assert (await post(client, url, body | {"request_id": 7}))[0] == 400


async def test_messages_speak_anthropic(client: aiohttp.ClientSession) -> None:
    url = "/v1/messages"
    async with client.post(url, json=CHAT | {"stream": True}, headers={"x-request-id": "mine"}) as answer:
        chunks = await chunks_of(answer)
    assert [chunk.split(b"\n")[0] for chunk in chunks] == [
        *(b"event: message_start", b"event: content_block_start"),
        *([b"event: content_block_delta"] * 3),
        *(b"event: content_block_stop", b"event: message_delta", b"event: message_stop"),
    ]
    status, whole = await post(client, url, CHAT | {"system": "You are terse."})
    assert status == 200
    assert keys(whole) == ["id", "type", "role", "content", "model", "stop_reason", "usage"]
    usage = {"input_tokens": 0, "output_tokens": 3}
    usage |= {"cache_creation_input_tokens": 16, "cache_read_input_tokens": 0}
    assert (whole["stop_reason"], whole["usage"]) == ("max_tokens", usage)
    _, counted = await post(client, f"{url}/count_tokens", {"messages": CHAT["messages"]})
    assert counted == {"input_tokens": 9, "context_management": {"original_input_tokens": 9}}
    assert await post(client, url, CHAT | {"model": "nope"}) == (
        404,
        {
            "type": "error",
            "error": {"type": "NotFoundError", "message": "The model `nope` does not exist. Valid aliases: base."},
        },
    )


async def test_a_response_goes_on_from_one_that_is_stored(client: aiohttp.ClientSession) -> None:
    url = "/v1/responses"
    asked = {"model": "base", "input": "Hello there", "instructions": "Be kind", "max_output_tokens": 2}

    async def answer(**more: Any) -> tuple[int, Any]:
        async with client.post(url, json=asked | more) as got:
            return got.status, await got.json()

    _, first = await answer()
    status, second = await answer(previous_response_id=first["id"], instructions=None)
    _, third = await answer(previous_response_id=second["id"], instructions=None)
    assert (status, second["previous_response_id"]) == (200, first["id"])
    # Instructions are not carried over; what was said and answered is.
    counted = [one["usage"]["input_tokens"] for one in (second, third)]
    assert counted[1] > counted[0] > first["usage"]["input_tokens"] - 4
    status, unknown = await answer(previous_response_id="resp_x")
    assert (status, unknown["error"]["param"]) == (404, "response_id")
