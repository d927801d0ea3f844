"""Inference requests whose answers an engine was once recorded to give, for comparing direct with proxied answers.

Where a recording left the sampling to chance, `temperature` is 0 here, so that one request has one answer.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]

CHAT_PATH = "/v1/chat/completions"
PATHS = (
    "/abort_requests", "/adapters", "/adapters/{adapter_name}", "/collective_rpc", "/detokenize",
    "/finish_weight_update", "/generative_scoring", "/get_world_size", "/health", "/inference/v1/abort_requests",
    "/inference/v1/generate", "/init_weight_transfer_engine", "/invocations", "/is_paused", "/is_scaling_elastic_ep",
    "/is_sleeping", "/kv_event_sources", "/load", "/metrics", "/pause", "/ping", "/pooling",
    "/release_kv_cache_memory", "/rerank", "/reset_encoder_cache", "/reset_mm_cache", "/reset_prefix_cache",
    "/resume", "/scale_elastic_ep", "/score", "/server_info", "/shutdown_weight_transfer_engine", "/sleep",
    "/start_draft_weight_update", "/start_weight_update", "/tokenize", "/tokenizer_info", "/update_weight_version",
    "/update_weights", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/chat/completions/derender",
    "/v1/chat/completions/render", "/v1/completions", "/v1/completions/derender", "/v1/completions/render",
    "/v1/embeddings", "/v1/load_lora_adapter", "/v1/messages", "/v1/messages/count_tokens", "/v1/messages/render",
    "/v1/models", "/v1/rerank", "/v1/responses", "/v1/responses/render", "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/cancel", "/v1/score", "/v1/systemone", "/v1/unload_lora_adapter", "/v2/embed",
    "/v2/rerank", "/version", "/wake_up", "/weight_checker", "/weight_info",
)  # fmt: skip
"""Every path of vLLM 0.32 with its options for management on, of a generating and of an embedding server."""
FRESH = b"{fresh}"
"""Replaced by something new in every request, so that no prefix cache knows the prompt."""


@dataclass(frozen=True, slots=True)
class Case:
    """A request. `loses_fingerprint`: the proxy asks for the usage event of the stream and hides it."""

    name: str
    path: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = (("content-type", "application/json"),)
    method: str = "POST"
    loses_fingerprint: bool = False

    @property
    def streams(self) -> bool:
        return b'"stream":true' in self.body


JSON = ("content-type", "application/json")
HELLO = [{"role": "user", "content": "Hello there"}]
TERSE = [{"role": "system", "content": "You are a terse helper."}, *HELLO]
CHAT: Body = {"model": "tiny", "messages": TERSE, "max_tokens": 12, "temperature": 0}
SHORT: Body = {"model": "tiny", "messages": HELLO, "max_tokens": 2, "temperature": 0}
COMPLETION: Body = {"model": "tiny", "prompt": "Hello there", "max_tokens": 12, "temperature": 0}
MESSAGE: Body = {"model": "tiny", "max_tokens": 8, "temperature": 0, "messages": HELLO}
RESPONSE: Body = {"model": "tiny", "input": "Hello there", "max_output_tokens": 8, "temperature": 0}
USAGE: Body = {"stream": True, "stream_options": {"include_usage": True}}
# Greedy sampling of several answers is refused; a seed makes them repeatable too.
TWO: Body = {"n": 2, "seed": 1, "temperature": 1}
FOX = "The quick brown fox jumps over the lazy dog. " * 12
WEATHER: Body = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Bern"]}},
            "required": ["city"],
        },
    },
}
WITH_TOOL: Body = CHAT | {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 48}
LONG_PROMPT = "word " * 6000
TOO_LONG: Body = {"messages": [{"role": "user", "content": LONG_PROMPT}]}


def chat(name: str, body: Body, *headers: tuple[str, str], loses_fingerprint: bool = False) -> Case:
    return Case(name, CHAT_PATH, _json(body), (JSON, *headers), loses_fingerprint=loses_fingerprint)


def post(name: str, path: str, body: Body, *headers: tuple[str, str]) -> Case:
    return Case(name, path, _json(body), (JSON, *headers))


def refused(name: str, path: str, body: bytes | Body, *headers: tuple[str, str], method: str = "POST") -> Case:
    content = body if isinstance(body, bytes) else _json(body)
    return Case(name, path, content, headers or (JSON,), method)


def _json(body: Body) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def fox(question: str, **more: Any) -> Body:
    messages = [{"role": "system", "content": FOX}, {"role": "user", "content": question}]
    return {"model": "tiny", "max_tokens": 3, "temperature": 0, "messages": messages, **more}


PREFIX_CACHE = [
    chat("cached-tokens-1-cold", fox("one", cache_salt=FRESH.decode())),
    chat("cached-tokens-2-warm", fox("two")),
    chat("cached-tokens-3-other-lora", fox("two", model="lora-0")),
    chat("cached-tokens-4-warm-stream", fox("two", **USAGE)),
    chat("cached-tokens-5-cache-salt", fox("two", cache_salt="tenant-1")),
]

CHATS = [
    chat("chat", CHAT),
    chat("chat-lora", CHAT | {"model": "lora-0"}),
    chat("chat-no-model-field", {name: value for name, value in CHAT.items() if name != "model"}),
    chat("chat-stop", CHAT | {"max_tokens": 200, "stop": ["e"]}),
    chat("chat-stream", CHAT | USAGE),
    chat(
        "chat-stream-continuous-usage",
        CHAT
        | {"max_tokens": 6, "stream": True}
        | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    chat(
        "chat-stream-continuous-usage-alone",
        CHAT | {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        loses_fingerprint=True,
    ),
    chat(
        "chat-stream-usage-refused",
        CHAT | {"stream": True, "stream_options": {"include_usage": False}},
        loses_fingerprint=True,
    ),
    chat("chat-stream-options-empty", CHAT | {"stream": True, "stream_options": {}}, loses_fingerprint=True),
    chat("chat-stream-options-null", CHAT | {"stream": True, "stream_options": None}, loses_fingerprint=True),
    chat("chat-stream-n2-logprobs", CHAT | USAGE | TWO | {"max_tokens": 3, "logprobs": True, "top_logprobs": 1}),
    chat("chat-stream-no-usage", CHAT | {"max_tokens": 6, "stream": True}, loses_fingerprint=True),
    chat("chat-lora-stream-no-usage", CHAT | {"model": "lora-1", "stream": True}, loses_fingerprint=True),
    chat("chat-n2-stream-no-usage", CHAT | TWO | {"stream": True}, loses_fingerprint=True),
    chat("chat-tool-required", WITH_TOOL),
    chat("chat-tool-required-stream", WITH_TOOL | {"stream": True}, loses_fingerprint=True),
    chat("default-chat-usage", SHORT | {"messages": [{"role": "user", "content": "x"}]}),
    chat("max_completion_tokens", {"model": "tiny", "messages": HELLO, "max_completion_tokens": 2, "temperature": 0}),
    chat("ok-model-empty-string", SHORT | {"model": ""}),
    chat("ok-model-null", SHORT | {"model": None}),
    chat("ok-priority-with-fcfs", SHORT | {"priority": 5}),
    chat("orca-stream", SHORT | {"stream": True}, ("endpoint-load-metrics-format", "TEXT"), loses_fingerprint=True),
    chat("orca-text", SHORT, ("endpoint-load-metrics-format", "TEXT")),
    chat("per-request-metrics", SHORT | {"max_tokens": 4}),
    chat("per-request-metrics-stream", SHORT | {"max_tokens": 4, "stream": True}, loses_fingerprint=True),
    chat("request-id-field", SHORT | {"request_id": "from-body"}),
    chat("request-id-header", SHORT, ("x-request-id", "my-req-42")),
    chat("request-id-header-stream", SHORT | {"stream": True}, ("x-request-id", "my-req-43"), loses_fingerprint=True),
    chat("unknown-field-ignored", SHORT | {"zzz_unknown": 1}),
    chat("with-origin", SHORT, ("origin", "https://app.example")),
    chat("accepts-gzip", SHORT, ("accept-encoding", "gzip")),
]

COMPLETIONS = [
    post("completion", "/v1/completions", COMPLETION),
    post("completion-batch-prompts", "/v1/completions", COMPLETION | {"prompt": ["Hello", "World"], "max_tokens": 4}),
    post("completion-stream", "/v1/completions", COMPLETION | USAGE),
    Case("completion-stream-no-usage", "/v1/completions", _json(COMPLETION | {"stream": True}), loses_fingerprint=True),
    post(
        "completion-token-ids-prompt",
        "/v1/completions",
        COMPLETION | {"prompt": [44, 73, 3971, 1270, 1470], "max_tokens": 4, "return_token_ids": True},
    ),
    post("completion-after-resume", "/v1/completions", COMPLETION | {"prompt": "x", "max_tokens": 2}),
    post(
        "data-parallel-rank-header-out-of-range",
        "/v1/completions",
        COMPLETION | {"prompt": "x", "max_tokens": 2},
        ("x-data-parallel-rank", "5"),
    ),
    post("orca-json", "/v1/completions", COMPLETION | {"max_tokens": 2}, ("endpoint-load-metrics-format", "JSON")),
    post("request-id-completions", "/v1/completions", COMPLETION | {"max_tokens": 2}, ("x-request-id", "my-req-44")),
    post(
        "session-id-header",
        "/v1/completions",
        COMPLETION | {"prompt": "session test" + " a b c d e f g h i j k l m" * 2, "max_tokens": 2},
        ("x-session-id", "sess-7"),
    ),
]

OTHERS = [
    post("responses", "/v1/responses", RESPONSE),
    post("responses-stream", "/v1/responses", RESPONSE | {"stream": True}),
    post("request-id-responses", "/v1/responses", RESPONSE | {"max_output_tokens": 2}, ("x-request-id", "my-req-45")),
    post("messages", "/v1/messages", MESSAGE, ("anthropic-version", "2023-06-01")),
    post("messages-stream", "/v1/messages", MESSAGE | {"stream": True}, ("anthropic-version", "2023-06-01")),
    post("messages-count-tokens", "/v1/messages/count_tokens", {"model": "tiny", "messages": HELLO}),
    post("request-id-messages", "/v1/messages", MESSAGE | {"max_tokens": 2}, ("x-request-id", "my-req-46")),
    post("tokenize-chat", "/tokenize", {"model": "tiny", "messages": [{"role": "user", "content": "Hello world"}]}),
    post("tokenize-prompt", "/tokenize", {"model": "tiny", "prompt": "Hello world", "return_token_strs": True}),
    post("no-auth-tokenize", "/tokenize", {"model": "tiny", "prompt": "x"}),
    post("detokenize", "/detokenize", {"model": "tiny", "tokens": [10, 20, 300]}),
    post("embeddings", "/v1/embeddings", {"model": "tiny", "input": "Hello there"}),
    post(
        "embeddings-base64-2",
        "/v1/embeddings",
        {"model": "tiny", "input": ["Hello there", "x"], "encoding_format": "base64"},
    ),
    post("embeddings-too-long", "/v1/embeddings", {"model": "tiny", "input": LONG_PROMPT}),
]

ENGINE_ERRORS = [
    chat("error-body-11MB", {"model": "tiny", "messages": [{"role": "user", "content": "x" * 11_000_000}]}),
    chat("error-expect-100", SHORT | TOO_LONG, ("expect", "100-continue")),
    chat("error-max-tokens-negative", SHORT | {"max_tokens": -5}),
    chat("error-max-tokens-too-large", SHORT | {"max_tokens": 100_000}),
    chat("error-max-tokens-zero", SHORT | {"max_tokens": 0}),
    chat("error-messages-empty", {"model": "tiny", "messages": []}),
    chat("error-missing-messages", {"model": "tiny"}),
    post("error-missing-prompt", "/v1/completions", {"model": "tiny"}),
    chat("error-prompt-too-long", SHORT | TOO_LONG),
    chat("error-prompt-too-long-stream", SHORT | TOO_LONG | {"stream": True}),
    post("error-prompt-too-long-completions", "/v1/completions", COMPLETION | {"prompt": LONG_PROMPT}),
    chat("error-stream-options-without-stream", SHORT | {"stream_options": {"include_usage": True}}),
    chat("error-temperature-negative", SHORT | {"temperature": -1}),
    chat("error-tool-choice-auto-off", SHORT | {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    chat("error-wrong-type", SHORT | {"max_tokens": "many"}),
]  # fmt: skip

# Answered by the proxy itself: the words are its own, the status is the engine's.
REFUSED = [
    refused("error-bad-json", CHAT_PATH, b'{"model":"tiny", "messages": ['),
    refused("error-empty-body", CHAT_PATH, b""),
    refused("error-json-array", CHAT_PATH, b"[]"),
    refused("error-model-number", CHAT_PATH, SHORT | {"model": 5}),
    refused("error-content-type", CHAT_PATH, SHORT, ("content-type", "text/plain")),
    refused("no-content-type", CHAT_PATH, SHORT, ("accept", "*/*")),
    refused("error-encoded-gzip-request", CHAT_PATH, gzip.compress(_json(SHORT)), JSON, ("content-encoding", "gzip")),
    refused("error-unknown-model", CHAT_PATH, SHORT | {"model": "nope"}),
    refused("error-unknown-model-stream", CHAT_PATH, SHORT | {"model": "nope", "stream": True}),
    refused("error-unknown-model-completions", "/v1/completions", {"model": "nope", "prompt": "x"}),
    refused("error-unknown-model-responses", "/v1/responses", {"model": "nope", "input": "x"}),
    refused("error-unknown-model-messages", "/v1/messages", MESSAGE | {"model": "nope"}),
    refused("error-unloaded-lora", CHAT_PATH, SHORT | {"model": "lora-2"}),
    refused("error-unknown-path", "/v1/nope", b"", method="GET"),
    refused("error-wrong-method", CHAT_PATH, b"", method="GET"),
    refused("error-options", CHAT_PATH, b"", method="OPTIONS"),
    refused("error-responses-not-stored", "/v1/responses/resp_123", b"", method="GET"),
]

CASES = [*PREFIX_CACHE, *CHATS, *COMPLETIONS, *OTHERS, *ENGINE_ERRORS]

# Answered in another way by design.
TRAILING_SLASH = post("error-trailing-slash", CHAT_PATH + "/", SHORT)
INVOCATIONS = post("no-auth-invocations", "/invocations", SHORT)

ENDLESS = chat("endless", SHORT | TWO | {"n": 4, "max_tokens": 3900, "ignore_eos": True, "stream": True})
"""Many seconds of tokens in four sequences, for clients that leave before."""
