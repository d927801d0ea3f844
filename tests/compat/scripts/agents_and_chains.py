"""Anthropic's Python SDK, LangChain and OpenAI's agents in one environment: `agents_and_chains.py URL MODEL`."""

import asyncio
import json
import sys

import anthropic
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI

url, model = sys.argv[1:3]
tokens = requests = 0
hello = [{"role": "user", "content": "Hello there"}]

client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
listed = client.models.list(limit=1000)
assert (listed.data[0].id, listed.data[0].display_name, listed.has_more) == (model, model, False)
assert client.messages.count_tokens(model=model, messages=hello).input_tokens > 0
requests += 1
answer = client.messages.create(model=model, messages=hello, max_tokens=5)
tokens, requests = tokens + answer.usage.output_tokens, requests + 1
with client.messages.stream(model=model, messages=hello, max_tokens=6) as stream:
    assert "".join(stream.text_stream)
    tokens, requests = tokens + stream.get_final_message().usage.output_tokens, requests + 1

chat = ChatOpenAI(base_url=url + "/v1", api_key="none", model=model, max_tokens=5, stream_usage=True, max_retries=0)
tokens, requests = tokens + chat.invoke("Hello").usage_metadata["output_tokens"], requests + 1
for chunk in chat.stream("Hello"):
    tokens += chunk.usage_metadata["output_tokens"] if chunk.usage_metadata else 0
requests += 1


async def agents() -> tuple[int, int]:
    output_tokens = asked = 0
    own = AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        agent = Agent(name="a", instructions="Say hello.", model=kind(model=model, openai_client=own))
        result = await Runner.run(agent, "Hello")
        output_tokens, asked = output_tokens + result.context_wrapper.usage.output_tokens, asked + 1
    return output_tokens, asked


more_tokens, more_requests = asyncio.run(agents())
print(json.dumps({"requests": requests + more_requests, "output_tokens": tokens + more_tokens}))
