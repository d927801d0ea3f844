"""LiteLLM's proxy in front, asked in both dialects: `litellm_proxy.py URL MODEL`, by its environment's Python."""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

url, model = sys.argv[1:3]
Path("litellm.yaml").write_text(f"""
model_list:
  - model_name: {model}
    litellm_params: {{model: hosted_vllm/{model}, api_base: {url}/v1, api_key: none}}
general_settings:
  master_key: sk-compat
  forward_client_headers_to_llm_api: true
litellm_settings: {{num_retries: 0, telemetry: false}}
""")
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
command = [str(Path(sys.executable).parent / "litellm"), "--config", "litellm.yaml", "--host", "127.0.0.1"]
front = subprocess.Popen(
    [*command, "--port", str(port)], stdout=Path("litellm.log").open("wb"), stderr=subprocess.STDOUT
)


def ask(path: str, body: dict, **fields: str) -> bytes:
    headers = {"content-type": "application/json", "authorization": "Bearer sk-compat", **fields}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read()


try:
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=2).read()
            break
        except OSError:
            if front.poll() is not None:
                sys.exit(Path("litellm.log").read_text()[-3000:])
            time.sleep(0.2)
    hello = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
    tokens = json.loads(ask("/v1/chat/completions", hello, **{"x-session-id": "one"}))["usage"]["completion_tokens"]
    streamed = hello | {"stream": True, "stream_options": {"include_usage": True}}
    events = [line[6:] for line in ask("/v1/chat/completions", streamed).splitlines() if line.startswith(b"data: {")]
    tokens += max((json.loads(event).get("usage") or {}).get("completion_tokens", 0) for event in events)
    tokens += json.loads(ask("/v1/messages", hello))["usage"]["output_tokens"]
    print(json.dumps({"requests": 3, "output_tokens": tokens}))
finally:
    front.terminate()
    front.wait(20)
