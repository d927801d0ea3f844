"""A member without clients, bodies and backends: only its leader client and a connection.

`python -m benchmarks.cluster.asks ADDRESS NAME AT_ONCE SECONDS` says `ready`, waits for a line, and prints how many
leases it was granted and gave back.
"""

from __future__ import annotations

import asyncio
import sys
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

from llmproxy.core.domain import Outcome, Request, Usage, Verdict
from llmproxy.observe.exit import RequestExit, RequestInput, RequestResult, RequestRouting
from llmproxy.remote.cluster.channel import MemberChannel
from llmproxy.remote.cluster.leader_client import LeaderClient
from llmproxy.remote.cluster.network import split_address
from llmproxy.remote.cluster.protocol import PROTOCOL, TO_MEMBER, Hello, Welcome
from llmproxy.remote.workers import protocol
from llmproxy.scheduling.attempts import AttemptRecord

MODEL = "mock"
BLOCKS = 16
"""Hashes of a prompt of some 256 tokens."""


NO_DISPATCHER = SimpleNamespace(pools=SimpleNamespace(backends={}))


class Everything:
    """All backends."""

    def __contains__(self, _: object) -> bool:
        return True


class Asking:
    """The relay, its connection, and what it asks."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._leader_client = LeaderClient(cast(Any, NO_DISPATCHER), Everything())
        self._serial = count()
        self._channel = MemberChannel(TO_MEMBER, self._take, lambda: None)
        self._loop = asyncio.get_running_loop()
        self._welcome = asyncio.Event()
        self.done = 0

    def _take(self, message: object) -> None:
        match message:
            case Welcome():
                self._leader_client.attach(self._channel)
                self._welcome.set()
            case protocol.LeaseGranted() | protocol.CallRefused() | protocol.LeaseCut():
                self._leader_client.handle(message)

    async def go(self, address: str, at_once: int, seconds: float) -> None:
        await self._loop.create_connection(lambda: self._channel, *split_address(address))
        self._channel.send(Hello(PROTOCOL, "0", self._name, "1", "127.0.0.1:1", "", 0))
        await self._welcome.wait()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        until_s = self._loop.time() + seconds
        await asyncio.gather(*(self._ask(until_s) for _ in range(at_once)))
        self._channel.close()

    async def _ask(self, until_s: float) -> None:
        usage = Usage(256, 16, 0)
        while (now := self._loop.time()) < until_s:
            number = next(self._serial)
            prefix = tuple(hash((self._name, number, block)) & (1 << 63) - 1 for block in range(BLOCKS))
            request = Request(
                f"{self._name}-{number}", MODEL, MODEL, None, 0, f"flow-{number % 8}", now, now + 60.0, 800, 256, 16,
                prefix=prefix, prefix_tokens=16.0,
            )  # fmt: skip
            async with self._leader_client.admit(request) as lease:
                lease.started()
                lease.committed()
                lease.verdict, lease.usage = Verdict.SERVED, usage
            self._leader_client.ended(request, None)
            asked = RequestInput(
                request_id=request.id, method="POST", path="/v1/chat/completions", model=MODEL, band="default", level=0,
                flow=request.flow, arrived_s=now, body_bytes=800, expected_prompt_tokens=256,
            )  # fmt: skip
            result = RequestResult(outcome=Outcome.COMPLETED, status=200, duration_s=self._loop.time() - now)
            tried = AttemptRecord.begun(lease.grant, now)
            self._leader_client.exited(RequestExit(asked, result, RequestRouting(tried=(tried,), attempts=1)))
            self.done += 1


async def main(address: str, name: str, at_once: str, seconds: str) -> None:
    asking = Asking(name)
    await asking.go(address, int(at_once), float(seconds))
    print(asking.done)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
