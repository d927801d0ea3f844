"""The OpenAI SDK, unchanged, against the proxy: what it gets is what a real server gives it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.e2e.proxies import FAST, ProxyUnderTest, serving

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello there"}]


@pytest.fixture
async def sdk(proxy: ProxyUnderTest) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="any", max_retries=0) as client:
        yield client


async def test_models(sdk: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in sdk.models.list()] == ["base", "lora-0", "lora-1"]
    assert (await sdk.models.retrieve("lora-1")).id == "lora-1"


async def test_chat(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(model="base", messages=HELLO, max_tokens=4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    stream = await sdk.chat.completions.create(model="base", messages=HELLO, max_tokens=4, stream=True)
    chunks = [chunk async for chunk in stream]
    assert all(chunk.usage is None and chunk.choices for chunk in chunks), "nothing of the hidden usage shows"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.choices[0].message.content


async def test_chat_with_usage(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(
        model="base", messages=HELLO, max_tokens=4, stream=True, stream_options={"include_usage": True}
    )
    last = [chunk async for chunk in stream][-1]
    assert last.usage is not None
    assert (last.choices, last.usage.completion_tokens) == ([], 4)


async def test_completions(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.completions.create(model="base", prompt="Hello", max_tokens=3)
    stream = await sdk.completions.create(model="base", prompt="Hello", max_tokens=3, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == answer.choices[0].text


async def test_responses(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.responses.create(model="base", input="Hello", max_output_tokens=3)
    assert answer.output_text
    assert (await sdk.responses.retrieve(answer.id)).output_text == answer.output_text
    async with sdk.responses.stream(model="base", input="Hello", max_output_tokens=3) as stream:
        assert "response.created" in {event.type async for event in stream}


async def test_an_adapter_by_its_name(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(model="lora-1", messages=HELLO, max_tokens=2)
    assert answer.model == "lora-1"


async def test_embeddings_get_the_engines_own_error(sdk: openai.AsyncOpenAI, proxy: ProxyUnderTest) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await sdk.embeddings.create(model="base", input="Hello")
    direct = await proxy.post(proxy.replicas[0].url + "/v1/embeddings", {"model": "base", "input": "Hello"})
    assert caught.value.response.json() == direct.json


async def test_an_unknown_model_is_not_found(sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="The model `nope` does not exist"):
        await sdk.chat.completions.create(model="nope", messages=HELLO)


async def test_an_error_in_a_stream_is_raised(sdk: openai.AsyncOpenAI, proxy: ProxyUnderTest) -> None:
    stream = await sdk.chat.completions.create(
        model="base", messages=HELLO, max_tokens=30_000, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(stream)
    for replica in proxy.replicas:
        replica.faults.set("refuse")
    with pytest.raises(openai.APIError, match="The stream broke"):
        async for _ in stream:
            pass


async def test_two_hundred_streams_at_once() -> None:
    wide = replace(FAST, max_num_seqs=64, reply_tokens=(5, 20))
    async with (
        serving(wide, wide) as proxy,
        openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="any", max_retries=0) as sdk,
    ):

        async def one(number: int) -> str | None:
            messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": f"Number {number}"}]
            stream = await sdk.chat.completions.create(model="base", messages=messages, stream=True)
            reason = None
            async for chunk in stream:
                reason = chunk.choices[0].finish_reason or reason
            return reason

        assert await asyncio.gather(*map(one, range(200))) == ["stop"] * 200
        await proxy.settled()
        assert proxy.outcomes() == {"completed": 200}
