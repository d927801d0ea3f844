"""The HTTP routes: responses, streams and errors in the shapes that were recorded from a real vLLM 0.32."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from llmproxy.lab.simulator.replica import Replica, ReplicaOptions
from tests.lab.simulator.conftest import CHAT, CHAT_PATH, ENDLESS, FAST, chunks_of, post, until

USAGE_WHOLE = {
    "prompt_tokens": 9,
    "total_tokens": 12,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": 0, "multimodal_tokens": None},
    "completion_tokens_details": None,
}


def data_of(chunk: bytes) -> Any:
    """The JSON of one event that is `data: ` and nothing else."""
    assert chunk.startswith(b"data: ")
    assert chunk.endswith(b"\n\n")
    return json.loads(chunk[6:])


def keys(body: dict[str, Any]) -> list[str]:
    return list(body)


async def test_a_chat_answer_has_the_recorded_shape(client: aiohttp.ClientSession) -> None:
    async with client.post(CHAT_PATH, json=CHAT, headers={"x-request-id": "mine"}) as answer:
        raw = await answer.read()
        assert [name.decode() for name, _ in answer.raw_headers] == [
            *("date", "server", "content-length", "content-type", "vary")
        ]
    body = json.loads(raw)
    assert raw == json.dumps(body, separators=(",", ":")).encode()
    assert keys(body) == [
        *("id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage"),
        *("prompt_logprobs", "prompt_token_ids", "prompt_text", "kv_transfer_params", "ec_transfer_params", "metrics"),
    ]
    assert (body["id"], body["object"], body["model"]) == ("chatcmpl-mine", "chat.completion", "base")
    assert body["usage"] == USAGE_WHOLE
    choice = body["choices"][0]
    assert keys(choice) == [
        *("index", "message", "logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts")
    ]
    assert keys(choice["message"]) == [
        *("role", "content", "refusal", "annotations", "audio", "function_call", "reasoning")
    ]
    assert choice["finish_reason"] == "length"
    assert len(choice["message"]["content"].split()) == 3


async def test_a_chat_stream_is_one_chunk_per_event(client: aiohttp.ClientSession) -> None:
    body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    async with client.post(CHAT_PATH, json=body) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert "cache-control" not in answer.headers
        role, *deltas, usage, done = await chunks_of(answer)
    assert done == b"data: [DONE]\n\n"
    begin = {name: data_of(role)[name] for name in ("id", "object", "created", "model")}
    assert data_of(role) == begin | {
        "choices": [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ],
        "prompt_token_ids": None,
        "prompt_text": None,
    }
    assert [keys(data_of(delta)["choices"][0]) for delta in deltas] == [
        ["index", "delta", "logprobs", "finish_reason", "token_ids"],
        ["index", "delta", "logprobs", "finish_reason", "token_ids"],
        ["index", "delta", "logprobs", "finish_reason", "stop_reason", "token_ids"],
    ]
    assert data_of(usage) == begin | {
        "choices": [],
        "usage": {
            "prompt_tokens": 9,
            "total_tokens": 12,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": 0},
        },
        "system_fingerprint": data_of(usage)["system_fingerprint"],
    }
    _, whole = await post(client, CHAT_PATH, CHAT)
    assert "system_fingerprint" not in data_of(deltas[-1])
    streamed = "".join(data_of(delta)["choices"][0]["delta"]["content"] for delta in deltas)
    assert streamed == whole["choices"][0]["message"]["content"]


async def test_without_usage_the_fingerprint_is_on_the_last_delta(client: aiohttp.ClientSession) -> None:
    async with client.post("/v1/completions", json={"prompt": "x", "stream": True}) as answer:
        *deltas, done = await chunks_of(answer)
    assert done == b"data: [DONE]\n\n"
    assert len(deltas) == 16, "the default of max_tokens"
    assert keys(data_of(deltas[-1])) == ["id", "object", "created", "model", "choices", "system_fingerprint"]
    assert all("system_fingerprint" not in data_of(delta) for delta in deltas[:-1])
    assert keys(data_of(deltas[0])["choices"][0]) == [
        *("index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids")
    ]


async def test_continuous_usage_counts_up(client: aiohttp.ClientSession) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = CHAT | {"stream": True, "stream_options": options}
    async with client.post(CHAT_PATH, json=body) as answer:
        events = [data_of(chunk) for chunk in (await chunks_of(answer))[:-1]]
    assert [event["usage"]["completion_tokens"] for event in events] == [0, 1, 2, 3, 3]
    assert keys(events[0]) == [
        *("id", "object", "created", "model", "choices", "usage", "prompt_token_ids", "prompt_text")
    ]


@pytest.mark.parametrize(
    ("prompt", "prompt_tokens", "choices"),
    [("Hello", 2, 1), (["Hello", "World!!!!"], 5, 2), ([5, 6, 7], 3, 1), ([[5, 6], [7, 8, 9]], 5, 2)],
)
async def test_all_forms_of_a_prompt(
    client: aiohttp.ClientSession, prompt: Any, prompt_tokens: int, choices: int
) -> None:
    body = {"model": "lora-0", "prompt": prompt, "max_tokens": 2, "n": 2}
    status, answer = await post(client, "/v1/completions", body)
    assert status == 200
    assert answer["model"] == "lora-0"
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * choices))
    assert len({choice["text"] for choice in answer["choices"]}) == 2 * choices
    assert answer["usage"]["prompt_tokens"] == prompt_tokens
    assert answer["usage"]["completion_tokens"] == 4 * choices


async def test_an_answer_ends_of_itself_unless_asked_to_go_on(client: aiohttp.ClientSession) -> None:
    async with Replica(replace(FAST, reply_tokens=(5, 5))) as replica:
        asked = CHAT | {"max_tokens": 10}
        _, stopped = await post(client, replica.url + CHAT_PATH, asked)
        _, ignoring = await post(client, replica.url + CHAT_PATH, asked | {"ignore_eos": True})
    assert (stopped["usage"]["completion_tokens"], stopped["choices"][0]["finish_reason"]) == (5, "stop")
    assert (ignoring["usage"]["completion_tokens"], ignoring["choices"][0]["finish_reason"]) == (10, "length")


async def test_cached_tokens_are_those_of_the_same_adapter_and_salt(client: aiohttp.ClientSession) -> None:
    async def cached(**fields: str) -> int:
        body = {"prompt": "x" * 400, "max_tokens": 1, **fields}
        _, answer = await post(client, "/v1/completions", body)
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert await cached() == 0
    assert await cached() == 96
    assert await cached(model="lora-1") == 0
    assert await cached(cache_salt="other") == 0
    assert await cached(model="lora-1") == 96


async def test_the_next_turn_finds_the_answer_cached(client: aiohttp.ClientSession) -> None:
    first = {"role": "user", "content": "x" * 101}
    body = {"messages": [first], "max_tokens": 40}
    _, answer = await post(client, CHAT_PATH, body)
    reply = answer["choices"][0]["message"]
    body = {"messages": [first, reply, {"role": "user", "content": "y" * 100}], "max_tokens": 1}
    _, again = await post(client, CHAT_PATH, body)
    known = answer["usage"]["total_tokens"] - 1
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == known // 16 * 16 > 48


async def test_the_head_comes_long_before_the_first_token(client: aiohttp.ClientSession) -> None:
    async with Replica(replace(FAST, max_num_seqs=1)) as replica:
        async with client.post(replica.url + CHAT_PATH, json=ENDLESS) as running:
            await running.content.readany()
            async with client.post(replica.url + CHAT_PATH, json=ENDLESS) as queued:
                assert queued.status == 200
                reading = asyncio.create_task(queued.content.readany())
                await until(lambda: replica.engine.gauges().waiting == 1)
                assert not reading.done()
                running.close()
                assert b'"role":"assistant"' in await reading
                queued.close()
        await until(lambda: not replica.engine.busy)


async def test_models_lists_adapters_with_their_parent(client: aiohttp.ClientSession) -> None:
    async with client.get("/v1/models") as answer:
        base, lora, _ = (await answer.json())["data"]
    names = ("id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission")
    assert keys(base) == keys(lora) == list(names)
    assert (base["id"], base["parent"], base["max_model_len"]) == ("base", None, 32768)
    assert (lora["id"], lora["root"], lora["parent"], lora["max_model_len"]) == ("lora-0", "base/lora-0", "base", None)
    async with client.get("/v1/models") as answer:
        again, *_ = (await answer.json())["data"]
    assert base["permission"][0]["id"] != again["permission"][0]["id"], "vLLM makes the id anew for each answer"


async def test_adapters_come_and_go(client: aiohttp.ClientSession) -> None:
    async def post(path: str, **body: object) -> tuple[int, str]:
        async with client.post(f"/v1/{path}", json=body) as answer:
            return answer.status, await answer.text()

    new = {"lora_name": "lora-9", "lora_path": "somewhere"}
    chat = CHAT | {"model": "lora-9"}
    assert (await post("chat/completions", **chat))[0] == 404
    assert await post("load_lora_adapter", **new) == (200, "Success: LoRA adapter 'lora-9' added successfully.")
    assert (await post("chat/completions", **chat))[0] == 200
    status, text = await post("load_lora_adapter", **new)
    assert (status, json.loads(text)["error"]["type"]) == (400, "InvalidUserInput")
    assert (await post("load_lora_adapter", **new, load_inplace=True))[0] == 200
    for wrong in ({"lora_path": ""}, {"lora_name": ""}, {"lora_name": "base"}):
        assert (await post("load_lora_adapter", **new | wrong))[0] == 400
    async with client.get("/v1/models") as listed:
        assert (await listed.json())["data"][-1]["root"] == "somewhere"
    assert (await post("load_lora_adapter", lora_name="lora-8"))[0] == 400
    gone = (200, "Success: LoRA adapter 'lora-9' removed successfully.")
    assert await post("unload_lora_adapter", lora_name="lora-9") == gone
    assert (await post("unload_lora_adapter", lora_name="lora-9"))[0] == 404
    assert (await post("chat/completions", **chat))[0] == 404


async def test_a_replica_without_slots_loads_no_adapter(client: aiohttp.ClientSession) -> None:
    body = {"lora_name": "x", "lora_path": "somewhere"}
    async with (
        Replica(ReplicaOptions(max_loras=0)) as replica,
        client.post(f"{replica.url}/v1/load_lora_adapter", json=body) as answer,
    ):
        assert answer.status == 500
        assert "LoRA is not enabled" in (await answer.json())["error"]["message"]


async def test_tokenize_and_back(client: aiohttp.ClientSession) -> None:
    _, tokens = await post(client, "/tokenize", {"prompt": "Größe 1", "return_token_strs": True})
    assert keys(tokens) == ["count", "max_model_len", "tokens", "token_strs"]
    assert (tokens["count"], tokens["max_model_len"]) == (3, 32768)
    assert len(tokens["token_strs"]) == 3
    _, text = await post(client, "/detokenize", {"tokens": tokens["tokens"]})
    assert text == {"prompt": "Größe 1"}
    _, chat = await post(client, "/tokenize", {"messages": CHAT["messages"]})
    assert (chat["count"], chat["token_strs"]) == (9, None)


async def test_a_full_server_is_busy(replica: Replica, client: aiohttp.ClientSession) -> None:
    replica.faults.set("busy_503", times=2)
    for body in (CHAT, CHAT | {"stream": True}):
        status, answer = await post(client, CHAT_PATH, body)
        assert (status, answer["error"]["type"]) == (503, "Service Unavailable")
        assert "currently busy" in answer["error"]["message"]
    assert (await post(client, CHAT_PATH, CHAT))[0] == 200


async def test_idle_pauses_are_filled_with_comments_where_asked_for(client: aiohttp.ClientSession) -> None:
    async with Replica(replace(FAST, sse_keep_alive_s=0.01)) as replica:
        replica.faults.set("frozen")
        async with client.post(replica.url + CHAT_PATH, json=CHAT | {"stream": True}) as answer:
            assert await answer.content.readexactly(28) == b": keep-alive\n\n" * 2
            replica.faults.clear()
            assert (await answer.content.read()).endswith(b"data: [DONE]\n\n")


async def test_ragged_deltas_lose_no_text(client: aiohttp.ClientSession) -> None:
    asked = CHAT | {"max_tokens": 60, "stream": True}
    async with Replica(FAST) as even, Replica(replace(FAST, ragged_deltas=True)) as ragged:
        texts = []
        for replica in (even, ragged):
            async with client.post(replica.url + CHAT_PATH, json=asked) as answer:
                chunks = (await chunks_of(answer))[1:-1]
            texts.append([data_of(chunk)["choices"][0]["delta"]["content"] for chunk in chunks])
    assert "".join(texts[0]) == "".join(texts[1])
    assert "" not in texts[0]
    assert "" in texts[1]
    assert len(texts[1]) < len(texts[0])


async def test_what_arrived_is_remembered_up_to_a_limit(client: aiohttp.ClientSession) -> None:
    async with Replica(replace(FAST, requests_kept=2)) as replica:
        for number in range(3):
            async with client.get(f"{replica.url}/health?{number}", headers={"X-Mine": "yes"}):
                pass
        seen = list(replica.requests_seen)
    assert [(one.method, one.path, one.headers["x-mine"]) for one in seen] == [
        ("GET", "/health?1", "yes"),
        ("GET", "/health?2", "yes"),
    ]


async def test_expect_continue_and_large_bodies(client: aiohttp.ClientSession) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 3_000_000}}
    body = CHAT | {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]}]}
    data, headers = io.BytesIO(json.dumps(body).encode()), {"content-type": "application/json"}
    async with client.post(CHAT_PATH, data=data, headers=headers, expect100=True) as answer:
        assert answer.status == 200
        assert (await answer.json())["usage"]["prompt_tokens"] == 265


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speed": 0.0}, "speed must be above 0"),
        ({"reply_tokens": (5, 4)}, "least <= most"),
        ({"adapters": ("base",)}, "different names"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(FAST, **options)


def test_model_length_beyond_the_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="max_model_len 5000 does not fit the KV cache of 4080 tokens"):
        Replica(ReplicaOptions(kv_tokens=4096, max_model_len=5000))
    Replica(ReplicaOptions(kv_tokens=4096))
