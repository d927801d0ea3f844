"""Requests of real clients, recorded and shortened: the answers, and the requests that the engine gets.

`make compat` runs the clients themselves.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.e2e.proxies import FAST, ProxyUnderTest, serving
from tests.strictness.wire import connected

MODEL = "sim-8b"
CODEX_OPENING = b"""\
GET /v1/responses HTTP/1.1
Host: 127.0.0.1
Connection: Upgrade
Upgrade: websocket
Sec-WebSocket-Version: 13
Sec-WebSocket-Key: JfJ2HVq/Dh57kmIr2eKt+A==
authorization: Bearer none
user-agent: codex_exec/0.169.0 (Debian 12.0.0; x86_64) xterm (codex_exec; 0.169.0)
originator: codex_exec
openai-beta: responses_websockets=2026-02-06
version: 0.169.0
x-codex-beta-features: remote_compaction_v2
session-id: 01a2049f-e759-79f1-a4e0-47dce19b78aa
thread-id: 01a2049f-e759-79f1-a4e0-47dce19b78aa
sec-websocket-extensions: permessage-deflate; client_max_window_bits
"""
CODEX = b"""\
POST /v1/responses HTTP/1.1
version: 0.169.0
x-codex-beta-features: remote_compaction_v2
x-codex-window-id: 01a2049f-e759-79f1-a4e0-47dce19b78aa:0
x-codex-turn-metadata: {"session_id":"01a2049f-e759-79f1-a4e0-47dce19b78aa","agent_name":"/root","request_kind":"turn"}
x-client-request-id: 01a2049f-e759-79f1-a4e0-47dce19b78aa
session-id: 01a2049f-e759-79f1-a4e0-47dce19b78aa
thread-id: 01a2049f-e759-79f1-a4e0-47dce19b78aa
accept: text/event-stream
content-type: application/json
authorization: Bearer none
originator: codex_exec
user-agent: codex_exec/0.169.0 (Debian 12.0.0; x86_64) xterm (codex_exec; 0.169.0)
host: 127.0.0.1
"""
CODEX_BODY: dict[str, Any] = {
    "model": MODEL,
    "stream": True,
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You are an agent."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "say hello"}]},
    ],
    "tools": [{"type": "function", "name": "exec_command", "strict": False, "parameters": {"type": "object"}}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a2049f-e759-79f1-a4e0-47dce19b78aa",
    "client_metadata": {"session_id": "01a2049f-e759-79f1-a4e0-47dce19b78aa"},
}
CLAUDE_PROBE = b"""\
HEAD / HTTP/1.1
Connection: keep-alive
User-Agent: Bun/1.4.0
Accept: */*
Host: 127.0.0.1
Accept-Encoding: gzip, deflate, br, zstd
"""
CLAUDE_MODELS = b"""\
GET /v1/models?limit=1000 HTTP/1.1
Authorization: Bearer none
anthropic-version: 2023-06-01
Host: 127.0.0.1
Accept-Encoding: gzip, deflate, br, zstd
"""
CLAUDE = b"""\
POST /v1/messages?beta=true HTTP/1.1
Accept: application/json
Authorization: Bearer none
Content-Type: application/json
User-Agent: claude-cli/2.1.197 (external, sdk-cli)
X-Claude-Code-Session-Id: 24c2cd60-8129-454c-828d-61d57e2320c4
X-Stainless-Arch: x64
X-Stainless-Lang: js
X-Stainless-Retry-Count: 0
X-Stainless-Timeout: 600
anthropic-beta: claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27
anthropic-dangerous-direct-browser-access: true
anthropic-version: 2023-06-01
x-app: cli
Connection: keep-alive
Host: 127.0.0.1
Accept-Encoding: gzip, deflate, br, zstd
"""
CLAUDE_BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]}
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.c9a; cc_entrypoint=sdk-cli;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [{"name": "Bash", "description": "Runs.", "input_schema": {"type": "object", "properties": {}}}],
    "metadata": {"user_id": '{"device_id":"0","account_uuid":"","session_id":"24c2cd60-8129-454c-828d-61d57e2320c4"}'},
    "max_tokens": 4096,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}
LM_EVAL = b"""\
GET /tokenizer_info HTTP/1.1
Host: 127.0.0.1
User-Agent: python-requests/2.32.5
Accept-Encoding: gzip, deflate, br, zstd
Accept: */*
Connection: keep-alive
"""
AIPERF_METRICS = b"""\
HEAD /metrics HTTP/1.1
Host: 127.0.0.1
Accept: */*
Accept-Encoding: gzip, deflate, br
User-Agent: Python/3.11 aiohttp/3.14.5
"""
AIPERF = b"""\
POST /v1/chat/completions HTTP/1.1
Host: 127.0.0.1
User-Agent: aiperf/0.13.0
X-Request-ID: d415607d-4612-4be7-8e3b-527abe6f7015
X-Correlation-ID: 5e938fff-80d0-4e9c-a74f-a354cdb44b8a
Accept: text/event-stream
Content-Type: application/json
X-Session-Affinity: 5e938fff-80d0-4e9c-a74f-a354cdb44b8a
"""
AIPERF_BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "rnd the witness And hes indicted falsely"}],
    "model": MODEL,
    "stream": True,
    "max_completion_tokens": 16,
    "stream_options": {"include_usage": True},
}
SIM = replace(FAST, model=MODEL)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A client's answer: status, all bytes after the status line, and whether the next request was answered too."""

    status: int
    rest: bytes
    kept: bool


async def exchanged(proxy: ProxyUnderTest, head: bytes, body: dict[str, Any] | None = None) -> Exchange:
    """Send this as it is, and a small request behind it."""
    data = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
    length = b"" if body is None else b"Content-Length: %d\n" % len(data)
    async with connected(proxy.url) as wire:
        wire.write((head + length + b"\n").replace(b"\n", b"\r\n") + data)
        wire.write(b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        got = await wire.all()
    line, _, rest = got.partition(b"\r\n")
    answer, mark, _ = rest.rpartition(b"HTTP/1.1 200 OK\r\n")
    return Exchange(int(line.split()[1]), answer if mark else rest, bool(mark))


def reached(proxy: ProxyUnderTest) -> dict[str, Any]:
    """The body of the latest request that reached the engine."""
    found: dict[str, Any] = json.loads(proxy.sent().body)
    return found


async def test_codex_opens_a_websocket_and_then_asks_by_http() -> None:
    async with serving(SIM) as proxy:
        opened = await exchanged(proxy, CODEX_OPENING)
        assert (opened.status, opened.kept) == (426, False)
        assert proxy.outcomes() == {}
        asked = await exchanged(proxy, CODEX, CODEX_BODY)
        assert (asked.status, asked.kept, b"event: response.completed" in asked.rest) == (200, True, True)
        assert reached(proxy) == CODEX_BODY
        assert "authorization" not in proxy.sent().headers
        assert proxy.sent().headers["session-id"] == CODEX_BODY["prompt_cache_key"]
        assert proxy.outcomes() == {"completed": 1}


async def test_claude_code_probes_looks_for_models_and_asks() -> None:
    async with serving(SIM) as proxy:
        probed, models = await exchanged(proxy, CLAUDE_PROBE), await exchanged(proxy, CLAUDE_MODELS)
        assert (probed.status, probed.kept, probed.rest.endswith(b"\r\n\r\n")) == (200, True, True)
        assert (models.status, models.kept, b'"display_name":"sim-8b"' in models.rest) == (200, True, True)
        assert proxy.outcomes() == {}, "a probe is no bad request"
        asked = await exchanged(proxy, CLAUDE, CLAUDE_BODY)
        assert (asked.status, asked.kept, b"event: message_stop" in asked.rest) == (200, True, True)
        assert reached(proxy) == CLAUDE_BODY
        sent = proxy.sent()
        assert (sent.path, sent.headers["accept-encoding"]) == ("/v1/messages?beta=true", "identity")
        assert sent.headers["anthropic-version"] == "2023-06-01"
        assert proxy.outcomes() == {"completed": 1}


async def test_lm_eval_asks_for_the_tokenizer_before_anything_else() -> None:
    async with serving(SIM) as proxy:
        asked = await exchanged(proxy, LM_EVAL)
        assert (asked.status, asked.kept) == (200, True)
        about = json.loads(asked.rest.partition(b"\r\n\r\n")[2])
        assert {"eos_token", "bos_token", "chat_template"} <= about.keys()
        assert (proxy.sent().method, proxy.sent().body) == ("GET", b"")


async def test_aiperf_looks_for_metrics_and_asks() -> None:
    async with serving(SIM) as proxy:
        looked = await exchanged(proxy, AIPERF_METRICS)
        assert (looked.status, looked.kept) == (200, True)
        asked = await exchanged(proxy, AIPERF, AIPERF_BODY)
        assert (asked.status, asked.kept, b"data: [DONE]" in asked.rest) == (200, True, True)
        assert b'"usage":{' in asked.rest
        assert reached(proxy) == AIPERF_BODY
        assert proxy.sent().headers["x-request-id"] == "d415607d-4612-4be7-8e3b-527abe6f7015"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("head", "body", "other"),
    [
        (CODEX, CODEX_BODY, b"session-id: "),
        (CLAUDE, CLAUDE_BODY, b"X-Claude-Code-Session-Id: "),
        (AIPERF, AIPERF_BODY, b"X-Session-Affinity: "),
    ],
)
async def test_the_conversations_of_a_client_stay_where_they_are(
    head: bytes, body: dict[str, Any], other: bytes
) -> None:
    body = body | {"max_tokens": 1, "max_completion_tokens": 1, "max_output_tokens": 1}
    async with serving(SIM, SIM, SIM, scheduling={"placement": "session"}) as proxy:
        places = []
        for _ in range(2):
            for i in range(12):
                assert (await exchanged(proxy, head.replace(other, other + b"%d" % i), body)).status == 200
            places.append([len([s for s in replica.requests_seen if s.method == "POST"]) for replica in proxy.replicas])
        first, both = places
        assert all(first), "twelve sessions are on all three"
        assert both == [2 * count for count in first]
