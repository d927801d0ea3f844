"""Sends the requests of a batch. Refused and failed requests are sent again."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from llmproxy.tools.batch import window as pauses
from llmproxy.tools.batch.requests import BatchError, BatchRequest, RequestFile
from llmproxy.tools.batch.results import Failure, Response, Result, ResultFile
from llmproxy.tools.batch.tally import Tally
from llmproxy.tools.batch.window import Window, pause_s, retry_after_s
from llmproxy.tools.terminal import printable
from llmproxy.tools.top.ask import cause

AGAIN = frozenset({408, 409, 429, 500, 502, 503, 504})
"""The HTTP statuses after which a request is sent again, unless the answer has `x-should-retry: false`."""
NO_KEY = frozenset({401, 403})  # The HTTP statuses of a server that refuses the key.
UNAVAILABLE = frozenset({429, 503})  # The HTTP statuses whose Retry-After counts.
SYNC_S = 1.0  # The seconds between two calls of `ResultFile.sync`.
CHECK = aiohttp.ClientTimeout(total=30.0)  # The time limit for the list of models.


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_MODELS = msgspec.json.Decoder(_Models)


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The outcome of sending a request once.

    `trouble` is "" if `response` is the result, otherwise the reason why it is not.
    """

    response: Response | None
    trouble: str = ""
    retry_after_s: float | None = None


class Sender:
    """Sends the requests of a batch, as many at once as `window` allows.

    `attempts` is how often a request may fail before its failure is the result.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: URL,
        requests: RequestFile,
        results: ResultFile,
        window: Window,
        tally: Tally,
        attempts: int,
    ) -> None:
        self._session = session
        self._url = url
        self._requests = requests
        self._results = results
        self._attempts = attempts
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()
        self._resume_s = 0.0
        self.window = window
        self.tally = tally
        self.reason = ""
        """Why the batch was stopped; "" while it runs."""

    def stop(self, reason: str) -> None:
        """Sends no more requests. Open requests may end. The first `reason` counts."""
        self.reason = self.reason or reason
        self._stopping.set()
        self._changed.set()

    async def check(self) -> None:
        """Raises BatchError if the batch cannot be sent.

        This is so if no OpenAI-compatible server answers, if it refuses the key, or if it lacks a model of the batch.
        """
        status, body = await self._get("v1/models")
        if status in NO_KEY:
            raise BatchError(f"{self._url} refuses the key (--api-key): {_message(body)}")
        try:
            known = {model.id for model in _MODELS.decode(body).data} if status == 200 else None
        except (ValueError, RecursionError):
            known = None
        if known is None:
            raise BatchError(f"{self._url} gives no list of models: /v1/models answers {status}: {_message(body)}")
        # A proxy may serve names that it does not list: patterns, adapters that it loads, and models without a replica.
        unknown = []
        for name in sorted(self._requests.models - known):
            status, _ = await self._get(f"v1/models/{quote(name, '', errors='replace')}")
            unknown += [name] if status == 404 else []
        if unknown:
            names = printable(", ".join(unknown)), printable(", ".join(sorted(known)))
            raise BatchError(f"{self._url} does not have the models of the batch: {names[0]}; it has {names[1]}")

    async def _get(self, path: str) -> tuple[int, bytes]:
        """Returns the status and the body of the answer to a GET. Raises BatchError without an answer."""
        try:
            async with self._session.get(self._url.joinpath(path, encoded=True), timeout=CHECK) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise BatchError(f"{self._url} is not reachable: {printable(cause(error))}") from None

    async def run(self, custom_ids: Iterable[str]) -> None:
        """Sends these requests of the request file.

        Returns when each has a result, or the batch is stopped. Raises BatchError if results cannot be written.
        """
        async with asyncio.TaskGroup() as outer:
            syncing = outer.create_task(self._sync())
            async with asyncio.TaskGroup() as group:
                for custom_id in custom_ids:
                    while not (self.window.takes_line or self._stopping.is_set()):
                        self._changed.clear()
                        await self._changed.wait()
                    if self._stopping.is_set():
                        break
                    self.window.lines += 1
                    group.create_task(self._answer(custom_id)).add_done_callback(self._ended)
            syncing.cancel()

    async def _sync(self) -> None:
        while True:
            await asyncio.sleep(SYNC_S)
            await asyncio.to_thread(self._results.sync)

    def _ended(self, _: object) -> None:
        self.window.lines -= 1
        self._changed.set()

    async def _answer(self, custom_id: str) -> None:
        """Sends a request until it has a result or the batch is stopped."""
        request = self._requests.request(custom_id)
        done_before, failures = self.tally.done, 0
        while await self._turn():
            try:
                attempt = await self._attempt(request)
            finally:
                self.window.sending -= 1
                self._changed.set()
            if not attempt.trouble:
                self._write(Result(request.custom_id, attempt.response))
                return
            self.tally.trouble = attempt.trouble
            status = attempt.response.status_code if attempt.response else 0
            if status in NO_KEY:
                self.stop(f"{self._url} refuses the key: {attempt.trouble}")
                return
            if status == 429 and attempt.retry_after_s is not None:
                continue  # Nothing was computed, and the proxy says when there will be room.
            failures += 1
            if failures < self._attempts:
                done_before = self.tally.done
                await self._pause(pause_s(failures) * random.uniform(0.5, 1.0))
            elif self.tally.done == done_before and (status in UNAVAILABLE or not await self._serves()):
                self.stop(f"{self._url} answers no request: {attempt.trouble}")
            else:
                message = f"{failures} attempts failed, the last with {attempt.trouble}"
                self._write(Result(request.custom_id, attempt.response, Failure("attempts_failed", message)))
                return

    async def _serves(self) -> bool:
        """Returns whether the server still answers, accepts the key and has the models of the batch."""
        try:
            await self.check()
        except BatchError:
            return False
        return True

    def _write(self, result: Result) -> None:
        self._results.append(result)
        self.tally.count(result)

    async def _turn(self) -> bool:
        """Waits until the window has room, and as long as Retry-After said. Returns False if the batch is stopped."""
        while not self._stopping.is_set():
            left_s = self._resume_s - time.monotonic()
            if left_s > 0:
                await self._pause(left_s)
            elif self.window.has_room:
                self.window.sending += 1
                return True
            else:
                self._changed.clear()
                await self._changed.wait()
        return False

    async def _pause(self, seconds: float) -> None:
        """Waits for `seconds`, or until the batch is stopped."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _attempt(self, request: BatchRequest) -> _Attempt:
        sent_s = time.monotonic()
        try:
            url = self._url.with_path(request.url)
            async with self._session.post(url, data=bytes(request.body)) as answer:
                status, headers, body = answer.status, answer.headers, await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self.window.refused(sent_s, time.monotonic())
            return _Attempt(None, printable(cause(error)))
        now = time.monotonic()
        response = Response(status, headers.get("x-request-id", ""), _on_one_line(body))
        again = status in AGAIN and headers.get("x-should-retry") != "false"
        if not again and status not in NO_KEY:
            self.window.answered(_wait_s(headers.get("x-llmproxy-queue-ms")))
            return _Attempt(response)
        self.window.refused(sent_s, now)
        retry_s = retry_after_s(headers.get("retry-after")) if status in UNAVAILABLE else None
        if retry_s is not None:
            self._resume_s = max(self._resume_s, now + max(retry_s, pauses.PAUSE_S))
        return _Attempt(response, f"{status}: {_message(body)}", retry_s)


def _wait_s(queue_ms: str | None) -> float:
    try:
        return float(queue_ms or "") / 1e3
    except ValueError:
        return 0.0


def _on_one_line(body: bytes) -> msgspec.Raw:
    """Returns JSON without white space, and any other text as a JSON string."""
    text = body.decode(errors="replace")
    try:
        return msgspec.Raw(msgspec.json.format(text, indent=-1).encode())
    except (ValueError, RecursionError):
        return msgspec.Raw(msgspec.json.encode(text))


def _message(body: bytes) -> str:
    """Returns the message of an error answer, or the beginning of an answer in another format."""
    try:
        return printable(str(msgspec.json.decode(body)["error"]["message"]))
    except (ValueError, TypeError, LookupError, RecursionError):
        return printable(body[:200].decode(errors="replace"))
