"""The rig: a replica that misbehaves, perhaps a healthy replica, a request, and its results."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from structlog.testing import capture_logs

from llmproxy.core.domain import Stage
from llmproxy.lab.simulator.replica import Replica
from llmproxy.lab.simulator.server.faults import FaultKind
from tests.e2e.proxies import FAST, HELLO, STREAM, ProxyUnderTest, raw_post, serving, until
from tests.e2e.scripted import Script, Scripted, scripted

QUICK: dict[str, Any] = {
    "scheduling": {"placement": "round_robin"},
    # Only the request meets the fault.
    "poll": {"interval_s": 60, "page_interval_s": 60, "models_interval_s": 60},
    "health": {"ejection_s": 30},
    "timeouts": {"connect_s": 5, "first_byte_s": 10, "stall_s": 10, "total_s": 20},
}
SHORT: dict[str, Any] = {"timeouts": {"connect_s": 5, "first_byte_s": 0.4, "stall_s": 0.3, "total_s": 1.0}}
"""For what only a time limit ends."""
ASKS: dict[str, dict[str, Any]] = {"stream": STREAM, "whole": HELLO}


@dataclass(frozen=True, slots=True)
class Misbehaviour:
    """A misbehaviour of a replica and its expected results.

    It is either a `script` below HTTP (`plain` for answers in one piece, if different), or a `fault` of a simulated
    replica. `before` is called when the proxy runs, and may prepare the scripted backend. The client's result of a
    `stream` (`whole`, if different) beside a healthy replica is in the words of `Seen.client`. Without a healthy
    replica, `alone` (`whole_alone`, if different) takes the place of `other` in it. `verdict` (`whole_verdict`, if
    different) is the verdict on the backend.
    """

    name: str
    script: Script | None = None
    plain: Script | None = None
    _: KW_ONLY
    fault: FaultKind | None = None
    before: Callable[[Scripted], None] | None = None
    stream: str = "other"
    whole: str | None = None
    alone: str = "502"
    whole_alone: str | None = None
    verdict: str = "failed"
    whole_verdict: str | None = None
    stream_alone: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    def client(self, ask: str, alone: bool) -> str:
        """Returns the expected result of a client that asks for a `stream` or a `whole` answer."""
        seen = self.whole if ask == "whole" and self.whole is not None else self.stream
        if alone and ask == "stream" and self.stream_alone is not None:
            return self.stream_alone
        if not alone or seen != "other":
            return seen
        return self.whole_alone if ask == "whole" and self.whole_alone is not None else self.alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """Bytes received on a connection. `whole`: the answer ended as its own framing says."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    whole: bool

    @property
    def events(self) -> list[bytes]:
        return [event for event in self.body.split(b"\n\n") if event]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The results of a request at its client, at the misbehaving backend (`b0`) and in the log."""

    received: Received
    verdicts: tuple[str, ...]
    retries: int
    outcomes: Mapping[str, int]
    log: list[Mapping[str, Any]]

    @property
    def client(self) -> str:
        """`other` (the other replica served it), `own` (the backend's answer, as it came), `event` (one error event,
        and the connection closed without the mark of an end), `cut` (visibly incomplete), or the status of an error."""
        received = self.received
        if not received.whole:
            return "event" if b"The stream broke" in received.body else "cut"
        if received.status != 200:
            return str(received.status)
        return "other" if received.headers.get("x-llmproxy-backend") == "b1" else "own"

    @property
    def exit(self) -> Mapping[str, Any]:
        """The one line about the request."""
        (line,) = [each for each in self.log if each["event"] == "request"]
        return line


async def receive(proxy: ProxyUnderTest, data: bytes) -> Received:
    """Send the bytes of a request and read the answer to its end, by its framing."""
    async with proxy.wire(data) as (reader, _), asyncio.timeout(10):
        return await read_answer(reader)


async def read_answer(reader: asyncio.StreamReader) -> Received:
    status, headers, body = 0, dict[str, str](), bytearray()
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status = int(head.split(" ", 2)[1])
        headers = {name.lower(): value for name, value in re.findall(r"^([^:\r\n]+):[ \t]*(.*)\r$", head, re.MULTILINE)}
        if "content-length" in headers:
            left = int(headers["content-length"])
            while left:
                piece = await reader.read(min(left, 1 << 16))
                if not piece:
                    raise ConnectionResetError
                body += piece
                left -= len(piece)
        else:
            while length := int(await reader.readuntil(b"\r\n"), 16):
                body += (await reader.readexactly(length + 2))[:-2]
            await reader.readexactly(2)
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return Received(status=status, headers=headers, body=bytes(body), whole=False)
    return Received(status=status, headers=headers, body=bytes(body), whole=True)


@asynccontextmanager
async def faulty_fleet(
    fault: Misbehaviour, ask: str, alone: bool, stage: Stage = Stage.WHOLE
) -> AsyncIterator[tuple[ProxyUnderTest, Scripted | Replica]]:
    """A proxy whose `b0` misbehaves, and whose `b1`, unless `alone`, does not.

    `b0` has the role of a `stage`, then, and `b1` takes answers. A third one computes the prompts for a decode.
    """
    config: dict[str, Any] = {**QUICK, **fault.config}
    good = FAST
    if stage is not Stage.WHOLE:
        good = replace(FAST, kv_transfer="nixl", kv_latency_s=0.0, kv_handshake_s=0.0, kv_lease_s=0.2)
        config |= {"scheduling": {"placement": "round_robin", "disaggregation": "always"}}
        config |= {"roles": {"b0": stage.value, "b1": "decode", "b2": "prefill"}}
    async with AsyncExitStack() as stack:
        bad: Scripted | Replica
        script = fault.plain if ask == "whole" and fault.plain is not None else fault.script
        if script is not None:
            bad = await stack.enter_async_context(scripted(script))
        else:
            bad = await stack.enter_async_context(Replica(good))
        others = [Replica(good) for _ in range(0 if alone else 2 if stage is Stage.DECODE else 1)]
        for other in others:
            await stack.enter_async_context(other)
        proxy = await stack.enter_async_context(serving(extra=[one.url for one in (bad, *others)], **config))
        if isinstance(bad, Scripted):
            if fault.before is not None:
                fault.before(bad)
        elif fault.fault is not None:
            bad.faults.set(fault.fault)
        yield proxy, bad
        await until(lambda: not any(other.engine.kv.kept for other in others))
        if isinstance(bad, Replica):
            await until(lambda: not bad.in_flight or bad.faults.kind in (FaultKind.HANG, FaultKind.FROZEN))


async def play(fault: Misbehaviour, ask: str = "stream", *, alone: bool = False, stage: Stage = Stage.WHOLE) -> Seen:
    """Send one request to a proxy whose backend misbehaves so; on return the proxy was closed and checked.

    With a `stage`, the backend misbehaves in that part of a split request.
    """
    with capture_logs() as log:
        async with faulty_fleet(fault, ask, alone, stage) as (proxy, bad):
            received = await receive(proxy, raw_post(ASKS[ask]))
            await proxy.settled()
            if isinstance(bad, Scripted):
                # Its connection is gone, or its answer has ended: nothing of the request is left on this side either.
                await until(lambda: not bad.answering, 2.0)
            page = proxy.app.metrics.page().decode()
            verdicts = re.findall(r'^llmproxy_attempts_total{backend="b0",verdict="(\w+)"} [1-9]', page, re.MULTILINE)
            seen = Seen(
                received=received,
                verdicts=tuple(verdicts),
                retries=int(proxy.metric("llmproxy_retries_total")),
                outcomes=+proxy.outcomes(),
                log=[],
            )
    seen.log.extend(log)
    return seen


def posts(replica: Replica) -> int:
    """How many requests a simulated replica was given."""
    return sum(request.method == "POST" for request in replica.requests_seen)
