"""OpenAI's and Anthropic's Python SDKs and LangChain, while streams break: `continued.py URL MODEL`.

Answers in one piece do not break, so they are the texts that streams must have.
"""

import asyncio
import json
import sys

import anthropic
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI, OpenAI

url, model = sys.argv[1:3]
client = OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
usage = {"stream_options": {"include_usage": True}}
chain = ChatOpenAI(base_url=url + "/v1", api_key="none", model=model, stream_usage=True, max_retries=0)
tokens = requests = 0


def check(answer: tuple[str, int, int], wanted: tuple[str, int, int]) -> None:
    """Compares texts, tokens of the prompt and tokens of the answer."""
    global tokens, requests
    assert answer == wanted, f"{answer} is not {wanted}"
    tokens, requests = tokens + answer[2], requests + 1


def joined(chunks: list) -> tuple[str, int, int]:
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    if hasattr(choices[0], "delta"):
        assert [choice.delta.role for choice in choices if choice.delta.role] == ["assistant"]
        text = "".join(choice.delta.content or "" for choice in choices)
    else:
        text = "".join(choice.text for choice in choices)
    return text, chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens


async def read_async(messages: list[dict[str, str]]) -> tuple[str, int, int]:
    async with AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as own:
        stream = await own.chat.completions.create(model=model, messages=messages, stream=True, **usage)
        return joined([chunk async for chunk in stream])


for number in range(2):
    prompt = f"Count from number {number} on"
    messages = [{"role": "user", "content": prompt}]
    answer = client.chat.completions.create(model=model, messages=messages)
    wanted = answer.choices[0].message.content, answer.usage.prompt_tokens, answer.usage.completion_tokens
    check(wanted, wanted)
    check(joined(list(client.chat.completions.create(model=model, messages=messages, stream=True, **usage))), wanted)
    check(asyncio.run(read_async(messages)), wanted)
    with client.chat.completions.stream(model=model, messages=messages, **usage) as stream:
        final = stream.get_final_completion()
    check((final.choices[0].message.content, final.usage.prompt_tokens, final.usage.completion_tokens), wanted)
    parts = list(chain.stream(prompt))
    counted = [part.usage_metadata for part in parts if part.usage_metadata]
    check(("".join(part.content for part in parts), counted[0]["input_tokens"], counted[0]["output_tokens"]), wanted)

    answer = client.completions.create(model=model, prompt=prompt)
    wanted = answer.choices[0].text, answer.usage.prompt_tokens, answer.usage.completion_tokens
    check(wanted, wanted)
    check(joined(list(client.completions.create(model=model, prompt=prompt, stream=True, **usage))), wanted)

# Messages are not continued. Their client raises the error.
claude = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
requests += 1
try:
    with claude.messages.stream(model=model, messages=messages, max_tokens=100) as stream:
        stream.until_done()
except anthropic.APIError as error:
    assert "The stream broke" in str(error)
else:
    raise AssertionError("no error")

print(json.dumps({"requests": requests, "output_tokens": tokens}))
