"""How replicas hand KV to each other, as vLLM's NixlConnector does: leases, reads, heartbeats, and what goes wrong.

The replica that answers pulls: it tells the one that computed the prompt, over HTTP on its own port, that it is there
(`HANDSHAKE`), that its request still waits (`HEARTBEAT`), and that it needs the blocks no more (`DONE`), having read
them or not.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import aiohttp
from yarl import URL

from llmproxy.lab.simulator.engine.kv_transfer import KvTransfer, MalformedParamsError, TransferParams
from llmproxy.lab.simulator.server.faults import FaultSwitch
from llmproxy.lab.simulator.server.pacer import GenerationJob, Pacer
from llmproxy.lab.simulator.server.requests import ApiError

PATH = "/sim/kv_transfer"


class Notice(StrEnum):
    """What a replica tells the one that keeps KV for it."""

    HANDSHAKE = "handshake"
    HEARTBEAT = "heartbeat"
    DONE = "done"


class KvLoadError(ApiError):
    """The KV of a request cannot be had, and the policy is to fail. Nothing in it speaks of KV, as in vLLM."""

    def __init__(self) -> None:
        super().__init__(500, "Internal server error", "InternalServerError")


@dataclass(slots=True, eq=False)
class _Fetch:
    """A sequence whose KV is elsewhere; without `params` where they are malformed. `began` is its transfer."""

    job: GenerationJob
    params: TransferParams | None
    heartbeats: asyncio.Task[None] | None = None
    began: bool = False


class NixlConnector:
    """The part of one replica in transfers: it keeps blocks for others, and fetches those of others.

    Times are those of `times`, `speed` times as fast. `open` says where others find it, `close` ends all of it.
    """

    def __init__(self, pacer: Pacer, times: KvTransfer, speed: float, faults: FaultSwitch) -> None:
        self.engine_id = str(uuid.uuid4())
        self._pacer = pacer
        self._engine = pacer.engine
        self._metrics = pacer.metrics
        self._times = times
        self._speed = speed
        self._faults = faults
        self._address = "localhost", 0
        # Of the engines at these addresses the connection is set up.
        self._known: dict[tuple[str, int], str] = {}
        self._leases: dict[str, asyncio.TimerHandle] = {}
        self._fetches: dict[str, _Fetch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._client: aiohttp.ClientSession | None = None
        pacer.on_fetch, pacer.on_finished, pacer.on_abort = self._begin, self._lease, self._give_up

    def open(self, host: str, port: int) -> None:
        """Others find it there."""
        self._address = "localhost" if host in ("0.0.0.0", "::", "") else host, port

    async def close(self) -> None:
        """Keep nothing, tell nobody any more."""
        for handle in self._leases.values():
            handle.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    # --- KV that others fetch -----------------------------------------------------------------------------------------

    def params_of(self, job: GenerationJob) -> dict[str, Any] | None:
        """What the answer to a job is to say of its blocks. Of several sequences it names the first one alone, and
        the others stay until their lease ends.
        """
        sequence = job.sequences[0]
        kept = self._engine.kv.kept.get(sequence.id)
        if kept is None:
            return None
        blocks, cached = (tuple(kept.blocks),), job.progress[0].cached_tokens
        host, port = self._address
        return TransferParams(blocks, self.engine_id, sequence.id, host, port, sequence.prompt_tokens, cached).body()

    def told(self, notice: Notice, engine_id: str, request_id: str) -> bool:
        """Another replica tells something; whether the blocks of that request are kept (until now)."""
        if engine_id != self.engine_id:
            raise ApiError(404, f"the engine {engine_id} is not here", "NotFoundError")
        kept = request_id in self._leases
        if notice is Notice.HEARTBEAT and kept:
            self._extend(request_id)
        elif notice is Notice.DONE:
            if not kept:
                self._metrics.count("nixl_num_notifications_after_expiry")
            self._release(request_id)
        return kept

    def _lease(self, request_id: str) -> None:
        """The blocks of a request that has ended stay, if it asked for that."""
        if request_id in self._engine.kv.kept:
            loop = asyncio.get_running_loop()
            self._leases[request_id] = loop.call_later(self._s(self._times.lease_s), self._expire, request_id)

    def _extend(self, request_id: str) -> None:
        lease, loop = self._leases[request_id], asyncio.get_running_loop()
        until_s = max(lease.when(), loop.time() + self._s(self._times.extension_s))
        lease.cancel()
        self._leases[request_id] = loop.call_at(until_s, self._expire, request_id)

    def _expire(self, request_id: str) -> None:
        self._metrics.count("nixl_num_kv_expired_reqs")
        self._release(request_id)

    def _release(self, request_id: str) -> None:
        if (lease := self._leases.pop(request_id, None)) is not None:
            lease.cancel()
            self._engine.release(request_id)
            self._pacer.wake()

    # --- KV of others -------------------------------------------------------------------------------------------------

    def submit(self, job: GenerationJob) -> None:
        """A job enters the engine: others keep what its sequences will fetch."""
        for sequence in job.sequences:
            if sequence.remote:
                self._fetches[sequence.id] = fetch = _Fetch(job, _readable(job.kv_transfer_params))
                if fetch.params is not None:
                    fetch.heartbeats = self._spawn(self._heartbeats(fetch.params))

    def reject(self, params: object) -> None:
        """A request is refused: whoever keeps KV for it need not wait."""
        if isinstance(params, Mapping) and params.get("do_remote_prefill") and (readable := _readable(params)):
            self._spawn(self._done(readable))

    def _begin(self, request_id: str, lacking_tokens: int) -> None:
        """The engine has blocks for the KV of a sequence."""
        fetch = self._fetches[request_id]
        fetch.began = True
        if fetch.params is not None:
            self._spawn(self._transfer(request_id, fetch, fetch.params, lacking_tokens))
        elif not any(name.startswith("remote_") for name in fetch.job.kv_transfer_params):
            self._faults.die()
        # With some of the parameters the request hangs, and the engine dies when it is aborted.

    def _give_up(self, request_id: str) -> None:
        """A sequence is aborted. A transfer that has begun goes on to its end."""
        fetch = self._fetches.get(request_id)
        if fetch is None:
            return
        if fetch.params is None:
            del self._fetches[request_id]
            if fetch.began:
                self._faults.die()
        elif not fetch.began:
            self._end(request_id, fetch)
            self._spawn(self._done(fetch.params))

    async def _transfer(self, request_id: str, fetch: _Fetch, params: TransferParams, tokens: int) -> None:
        """Read the KV of a sequence, and let it go on."""
        started_s = asyncio.get_running_loop().time()
        address = params.remote_host, params.remote_port
        known = self._known.get(address) == params.remote_engine_id
        transfer_s = self._times.transfer_s(tokens)
        kept = await self._tell(params, Notice.HANDSHAKE)
        if kept is not None:
            self._known[address] = params.remote_engine_id
            await self._until(started_s, transfer_s + (0.0 if known else self._times.handshake_s))
            # Only now is it certain that the blocks were its own to the end.
            kept = await self._tell(params, Notice.DONE)
        else:
            await self._until(started_s, self._times.lost_s if known else self._times.unreachable_s)
        self._end(request_id, fetch)
        if kept is None:
            self._failed(request_id, fetch.job)
        else:
            self._metrics.transferred(self._s(transfer_s), self._times.bytes_of(tokens))
            fetch.job.remote_cached_tokens = params.remote_prefill_cached_tokens
            self._engine.fetched(request_id, right=kept)
        self._pacer.wake()

    def _failed(self, request_id: str, job: GenerationJob) -> None:
        self._metrics.count("nixl_num_failed_transfers")
        if self._times.on_failure == "fail" and not job.ended:
            self._metrics.failed()
            self._pacer.fail(KvLoadError(), [job])
        self._engine.not_fetched(request_id)

    def _end(self, request_id: str, fetch: _Fetch) -> None:
        del self._fetches[request_id]
        if fetch.heartbeats is not None:
            fetch.heartbeats.cancel()

    # --- words to others ----------------------------------------------------------------------------------------------

    async def _heartbeats(self, params: TransferParams) -> None:
        while True:
            await asyncio.sleep(self._s(self._times.heartbeat_s))
            await self._tell(params, Notice.HEARTBEAT)

    async def _done(self, params: TransferParams) -> None:
        await self._tell(params, Notice.DONE)

    async def _tell(self, params: TransferParams, notice: Notice) -> bool | None:
        """Whether the blocks of a request are kept; None where its engine is not found."""
        if self._client is None:
            # A connection that is kept may be closed just when it is used again, which would look like a lost replica.
            connector = aiohttp.TCPConnector(force_close=True)
            timeout = aiohttp.ClientTimeout(self._times.unreachable_s)
            self._client = aiohttp.ClientSession(connector=connector, timeout=timeout)
        words = {"notice": notice, "engine_id": params.remote_engine_id, "request_id": params.remote_request_id}
        try:
            url = URL.build(scheme="http", host=params.remote_host, port=params.remote_port, path=PATH)
            async with self._client.post(url, json=words, allow_redirects=False) as answer:
                return {200: True, 410: False}.get(answer.status)
        except (aiohttp.ClientError, OSError, ValueError):
            return None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _until(self, started_s: float, seconds: float) -> None:
        """Wait until so many seconds of the model have passed since then."""
        await asyncio.sleep(max(started_s + self._s(seconds) - asyncio.get_running_loop().time(), 0.0))

    def _s(self, seconds: float) -> float:
        """Real seconds for those of the model."""
        return seconds / self._speed


def _readable(params: Mapping[str, Any]) -> TransferParams | None:
    try:
        return TransferParams.read(params)
    except MalformedParamsError:
        return None
