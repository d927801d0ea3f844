"""OpenAI's Python SDK over the routes: `openai_matrix.py URL MODEL`. Prints the counts last."""

import json
import sys

from openai import NotFoundError, OpenAI

url, model = sys.argv[1:3]
client = OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
hello = [{"role": "user", "content": "Hello there"}]
tokens = requests = 0

assert model in [one.id for one in client.models.list()]
assert client.models.retrieve("lora-0").id == "lora-0"

answer = client.chat.completions.create(model=model, messages=hello, max_tokens=5)
tokens, requests = tokens + answer.usage.completion_tokens, requests + 1

options = {"include_usage": True}
for chunk in client.chat.completions.create(
    model=model, messages=hello, max_tokens=6, stream=True, stream_options=options
):
    tokens += chunk.usage.completion_tokens if chunk.usage else 0
requests += 1

# Who does not ask for usage gets no event of it; its tokens are counted all the same.
chunks = list(client.chat.completions.create(model=model, messages=hello, max_tokens=7, stream=True))
assert all(chunk.choices and not chunk.usage for chunk in chunks)
tokens, requests = tokens + 7, requests + 1

answer = client.completions.create(model="lora-0", prompt="Once", max_tokens=4)
tokens, requests = tokens + answer.usage.completion_tokens, requests + 1

made = client.responses.create(model=model, input="Hello", max_output_tokens=5)
tokens, requests = tokens + made.usage.output_tokens, requests + 1
assert client.responses.retrieve(made.id).id == made.id
requests += 1

for event in client.responses.create(model=model, input="Hello", max_output_tokens=5, stream=True):
    tokens += event.response.usage.output_tokens if event.type == "response.completed" else 0
requests += 1

raw = client.chat.completions.with_raw_response.create(model=model, messages=hello, max_tokens=1)
assert raw.headers["x-request-id"]
tokens, requests = tokens + raw.parse().usage.completion_tokens, requests + 1

try:
    client.chat.completions.create(model="nobody", messages=hello)
except NotFoundError as error:
    assert "nobody" in error.message
    requests += 1

# The client leaves in the middle and the replica stops. Its tokens are not reported, so they are not counted.
endless = client.chat.completions.create(
    model="lora-0", messages=hello, max_tokens=20_000, stream=True, extra_body={"ignore_eos": True}
)
next(endless)
endless.close()
requests += 1

print(json.dumps({"requests": requests, "output_tokens": tokens}))
