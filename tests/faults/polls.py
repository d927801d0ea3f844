"""The ways in which a replica may answer polls wrongly while it serves, and what must come of each."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.e2e.proxies import until
from tests.e2e.scripted import Script, answering, serving_script, whole
from tests.faults.misbehaviours import says
from tests.upstream.raw_server import Peer

BODY = whole(b'{"id":"1"}')
PAGE = b'vllm:num_requests_running{model_name="base"} %b\nvllm:num_requests_waiting{model_name="base"} %b\n'


async def huge(peer: Peer, _: bytes) -> None:
    """A page of 100 MB, as long as it is read."""
    await peer.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 104857600\r\n\r\n")
    for _n in range(1600):
        await peer.send(b"x" * 65536)


def page(text: bytes) -> Script:
    return answering(whole(text, content_type="text/plain"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PollFault:
    """An answer of the replica at `path`; whether it must stay `up`, and its known load (`running`).

    `unread` is whether the log must say that its load cannot be read.
    """

    name: str
    path: bytes = b"/metrics"
    script: Script
    up: bool
    running: int | None = None
    unread: bool = False
    timeout_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Polled:
    status: int
    up: bool
    running: int | None
    log: list[Mapping[str, Any]]


async def watch(fault: PollFault) -> Polled:
    """Let it be polled until four more polls were answered or failed, then send one request."""
    asked = 0

    async def counted(peer: Peer, request: bytes) -> None:
        nonlocal asked
        asked += 1
        await fault.script(peer, request)

    config: dict[str, Any] = {"poll": {"timeout_s": fault.timeout_s}, "queue": {"no_backend_wait_s": 0.0}}
    with capture_logs() as log, pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmproxy.backends.poller.REPROBE_INTERVAL_S", 0.02)
        async with serving_script(answering(BODY), **config) as (proxy, backend):
            backend.polls[fault.path] = counted
            known = proxy.app.pools.backends["b0"]
            await until(lambda: asked >= 6 and (fault.up or known.health.down))
            answer = await proxy.chat()
            now = asyncio.get_running_loop().time()
            reading = known.reading
            polled = Polled(
                status=answer.status,
                up=known.health.available(now),
                running=reading.running if reading is not None else None,
                log=[],
            )
            backend.polls.clear()
            await until(lambda: not known.health.down)
            assert (await proxy.chat()).status == 200, "it is back with its next good answer"
    polled.log.extend(line for line in log if line["event"] in ("backend_down", "backend_metrics_unreadable"))
    return polled


POLL_FAULTS = [
    PollFault(name="has a `/metrics` of 100 MB", script=huge, up=True, unread=True),
    PollFault(name="has a `/metrics` without vLLM's names", script=page(b"python_gc_objects 1\n"), up=True),
    PollFault(name="has a `/metrics` of other bytes", script=page(bytes(range(256)) * 64), up=True),
    PollFault(name="says it runs -3 requests", script=page(PAGE % (b"-3", b"0")), up=True, running=0),
    PollFault(name="says it runs NaN requests", script=page(PAGE % (b"NaN", b"0")), up=True, running=0),
    PollFault(name="has a `/metrics` that answers 500", script=answering(whole(b"", "500 Oh")), up=True),
    PollFault(name="has a `/metrics` that hangs", script=says(), up=True, unread=True, timeout_s=0.3),
    PollFault(
        name="has a `/health` that answers 500", path=b"/health", script=answering(whole(b"", "500 Oh")), up=False
    ),
    PollFault(name="has a `/health` that hangs", path=b"/health", script=says(), up=False, timeout_s=0.3),
    PollFault(name="has a `/v1/models` of garbage", path=b"/v1/models", script=page(b"<html>"), up=True),
]
