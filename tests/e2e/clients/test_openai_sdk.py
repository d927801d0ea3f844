"""The unchanged OpenAI SDK gets the same from the proxy as from a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.e2e.proxies import ProxyUnderTest

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
