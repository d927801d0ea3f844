"""OpenAI's Python SDK where it may ask twice a second: it waits as Retry-After says, and loses nothing."""

import json
import sys

from openai import OpenAI

url, model = sys.argv[1:3]
client = OpenAI(base_url=url + "/v1", api_key="none", max_retries=5)
tokens = 0
for number in range(5):
    hello = [{"role": "user", "content": f"Hello number {number}"}]
    tokens += client.chat.completions.create(model=model, messages=hello, max_tokens=3).usage.completion_tokens
print(json.dumps({"output_tokens": tokens}))
