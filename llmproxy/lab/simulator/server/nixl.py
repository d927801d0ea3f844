"""KV transfers between replicas as in vLLM's NixlConnector: leases, reads, heartbeats and failures.

The decode replica fetches the blocks, and sends notices to the prefill replica's HTTP port: `HANDSHAKE` before its
first transfer, and `HEARTBEAT` while its request waits. `DONE` follows when it no longer needs the blocks, whether or
not it has read them.
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
    """A notice from the decode replica to the prefill replica."""

    HANDSHAKE = "handshake"
    HEARTBEAT = "heartbeat"
    DONE = "done"


class KvLoadError(ApiError):
    """A request's KV is not available, and the policy is to fail. As in vLLM, the message does not mention KV."""

    def __init__(self) -> None:
        super().__init__(500, "Internal server error", "InternalServerError")


@dataclass(slots=True, eq=False)
class _Fetch:
    """A sequence whose KV blocks are on another replica."""

    job: GenerationJob
    params: TransferParams | None  # Transfer parameters of the request; None if they are malformed.
    heartbeats: asyncio.Task[None] | None = None
    began: bool = False  # Whether the transfer has begun.


class NixlConnector:
    """The KV connector of a replica. It keeps blocks for other replicas, and fetches blocks from them.

    All times are divided by `speed`.
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
        # Addresses of the engines with an established connection.
        self._known: dict[tuple[str, int], str] = {}
        self._leases: dict[str, asyncio.TimerHandle] = {}
        self._fetches: dict[str, _Fetch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._client: aiohttp.ClientSession | None = None
        pacer.on_fetch, pacer.on_finished, pacer.on_abort = self._begin, self._lease, self._give_up

    def open(self, host: str, port: int) -> None:
        """Sets the address at which other replicas reach this one. It is part of the transfer parameters."""
        self._address = "localhost" if host in ("0.0.0.0", "::", "") else host, port

    async def close(self) -> None:
        """Releases all blocks, and ends all transfers and notices."""
        for handle in self._leases.values():
            handle.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    # --- KV that others fetch -----------------------------------------------------------------------------------------

    def params_of(self, job: GenerationJob) -> dict[str, Any] | None:
        """Returns the `kv_transfer_params` of a job's answer.

        They name only the first sequence. The blocks of other sequences stay until their leases expire.
        """
        sequence = job.sequences[0]
        kept = self._engine.kv.kept.get(sequence.id)
        if kept is None:
            return None
        blocks, cached = (tuple(kept.blocks),), job.progress[0].cached_tokens
        host, port = self._address
        return TransferParams(blocks, self.engine_id, sequence.id, host, port, sequence.prompt_tokens, cached).body()

    def handle_notice(self, notice: Notice, engine_id: str, request_id: str) -> bool:
        """Handles a notice from another replica. Returns whether the request's blocks were still leased."""
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
        """Leases the blocks of an ended request, if the request asked for that."""
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
        """Records a job that enters the engine.

        From now on, heartbeats extend the leases of the blocks that it will fetch.
        """
        for sequence in job.sequences:
            if sequence.remote:
                self._fetches[sequence.id] = fetch = _Fetch(job, _readable(job.kv_transfer_params))
                if fetch.params is not None:
                    fetch.heartbeats = self._spawn(self._heartbeats(fetch.params))

    def reject(self, params: object) -> None:
        """Sends `DONE` for a refused request, so that the prefill replica frees its blocks."""
        if isinstance(params, Mapping) and params.get("do_remote_prefill") and (readable := _readable(params)):
            self._spawn(self._done(readable))

    def _begin(self, request_id: str, lacking_tokens: int) -> None:
        """Begins the transfer of a sequence, for which the engine has allocated blocks."""
        fetch = self._fetches[request_id]
        fetch.began = True
        if fetch.params is not None:
            self._spawn(self._transfer(request_id, fetch, fetch.params, lacking_tokens))
        elif not any(name.startswith("remote_") for name in fetch.job.kv_transfer_params):
            self._faults.die()
        # As in vLLM: with incomplete parameters the request hangs, and aborting it crashes the engine.

    def _give_up(self, request_id: str) -> None:
        """Stops waiting for the blocks of a sequence. A transfer that has begun runs to its end."""
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
        """Reads the KV of a sequence, and resumes the sequence."""
        started_s = asyncio.get_running_loop().time()
        address = params.remote_host, params.remote_port
        known = self._known.get(address) == params.remote_engine_id
        transfer_s = self._times.transfer_s(tokens)
        kept = await self._tell(params, Notice.HANDSHAKE)
        if kept is not None:
            self._known[address] = params.remote_engine_id
            await self._until(started_s, transfer_s + (0.0 if known else self._times.handshake_s))
            # Only now is it certain that the lease has lasted until the end of the read.
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

    # --- notices to other replicas ------------------------------------------------------------------------------------

    async def _heartbeats(self, params: TransferParams) -> None:
        while True:
            await asyncio.sleep(self._s(self._times.heartbeat_s))
            await self._tell(params, Notice.HEARTBEAT)

    async def _done(self, params: TransferParams) -> None:
        await self._tell(params, Notice.DONE)

    async def _tell(self, params: TransferParams, notice: Notice) -> bool | None:
        """Sends a notice. Returns whether the request's blocks are still leased; None if the engine is unreachable."""
        if self._client is None:
            # A reused connection may be closed at the same moment, which would look like a lost replica.
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
        """Waits until `seconds` of model time have passed since `started_s`."""
        await asyncio.sleep(max(started_s + self._s(seconds) - asyncio.get_running_loop().time(), 0.0))

    def _s(self, seconds: float) -> float:
        """Converts seconds of model time to real seconds."""
        return seconds / self._speed


def _readable(params: Mapping[str, Any]) -> TransferParams | None:
    try:
        return TransferParams.read(params)
    except MalformedParamsError:
        return None
